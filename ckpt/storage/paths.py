"""A place in an object store, with the part of pathlib's interface that is used here.

universal_pathlib has such a class as well. Its ``is_dir`` and ``is_file`` answer False where the
store denies access or does not answer, which would make "no such directory" of both, and each is
a request; these ask a listing that is made once, and raise what went wrong.
"""

from __future__ import annotations

import io
import stat
from dataclasses import dataclass
from errno import ENOENT
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, cast

from ckpt.errors import OptionsError
from ckpt.storage.store import Entry, Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

_STREAM_BYTES = 64 * 1024


@dataclass(frozen=True)
class ObjectStat:
    """What pathlib's ``stat()`` tells, as far as a store knows it."""

    st_mode: int
    st_size: int


def open_location(text: str) -> ObjectPath:
    """The place that a URL names; raises OptionsError as ``to_location`` does."""
    protocol, _, rest = text.partition("://")
    bucket = rest.partition("/")[0]
    if "@" in bucket and (":" in bucket or protocol in {"s3", "gs", "gcs"}):
        raise OptionsError(
            f"a {protocol}:// URL with credentials in it",
            hint="Give them by the environment, such as AWS_PROFILE, and only the bucket here",
        )
    if "?" in rest or "#" in rest or not rest.strip("/"):
        raise OptionsError(
            "not the URL of a directory", file=text.partition("?")[0], expected="s3://BUCKET/PATH"
        )
    key = "/".join(part for part in rest.split("/") if part)
    return ObjectPath(open_store(protocol), key, given=True)


class ObjectPath:
    """A key in a store. A directory is whatever keys continue with a slash."""

    __slots__ = ("_given", "key", "store")

    def __init__(self, store: Store, key: str, *, given: bool = False) -> None:
        """``key`` begins with the bucket. What the user ``given`` is asked for by itself.

        Others are looked up in the listing of the directory above.
        """
        self.store, self.key, self._given = store, key, given

    def __str__(self) -> str:
        """The URL."""
        return f"{self.store.protocol}://{self.key}"

    def __repr__(self) -> str:
        """The URL, and that it is one."""
        return f"ObjectPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        """Whether both have the same URL."""
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __hash__(self) -> int:
        """The URL's."""
        return hash(str(self))

    def __lt__(self, other: ObjectPath) -> bool:
        """In the order of the names, as pathlib sorts."""
        return self.key.split("/") < other.key.split("/")

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """A store is opened anew in another process."""
        return open_location, (str(self),)

    def __truediv__(self, name: object) -> ObjectPath:
        """What lies below."""
        parts = [part for part in str(name).split("/") if part not in {"", "."}]
        return ObjectPath(self.store, "/".join([self.key, *parts]))

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """What follows the name's last dot, with the dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> ObjectPath:
        """The directory above; of a bucket, the bucket."""
        above = self.key.rpartition("/")[0]
        return ObjectPath(self.store, above, given=True) if above else self

    def with_name(self, name: str) -> ObjectPath:
        """Another name in the same directory."""
        return self.parent / name

    def named(self, text: str) -> ObjectPath:
        """The place in this store that a URL names."""
        return ObjectPath(self.store, text.partition("://")[2])

    def resolve(self) -> ObjectPath:
        """Itself: a store has no links."""
        return self

    def is_relative_to(self, other: object) -> bool:
        """Whether it is, or lies below, ``other``."""
        return f"{self}/".startswith(f"{other}/")

    def relative_to(self, other: object) -> PurePosixPath:
        """The way from ``other`` down to here; ValueError if there is none."""
        return PurePosixPath(self.key).relative_to(str(other).partition("://")[2])

    def entry(self) -> Entry | None:
        """What the store says of it, or None if there is nothing."""
        return self.store.entry(self.key, alone=self._given)

    def exists(self) -> bool:
        """Whether there is an object or a directory of that name."""
        return self.entry() is not None

    def is_dir(self) -> bool:
        """Whether objects lie below it."""
        found = self.entry()
        return found is not None and found.is_directory

    def is_file(self) -> bool:
        """Whether it is an object."""
        found = self.entry()
        return found is not None and not found.is_directory

    def is_symlink(self) -> bool:
        """Never: a store has no links."""
        return False

    def stat(self) -> ObjectStat:
        """Size and kind; FileNotFoundError if there is nothing."""
        found = self._present()
        return ObjectStat(stat.S_IFDIR if found.is_directory else stat.S_IFREG, found.size)

    def stamp(self) -> tuple[int, str]:
        """Size and state, which changes whenever the object is written; FileNotFoundError."""
        found = self._present()
        return found.size, found.state

    def _present(self) -> Entry:
        found = self.entry()
        if found is None:
            raise FileNotFoundError(ENOENT, "no such object", str(self))
        return found

    def entries(self) -> Iterator[Entry]:
        """What the store says of everything in the directory."""
        return iter(self.store.listing(self.key).values())

    def list_whole(self) -> None:
        """List all that lies below, at once."""
        self.store.list_whole(self.key)

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Nothing: a directory is there when something is in it."""

    def files_below(self) -> Iterator[ObjectPath]:
        """Every object below, at any depth."""
        if not self.is_dir():
            return
        self.list_whole()
        for entry in list(self.entries()):
            path = self / entry.name
            if entry.is_directory:
                yield from path.files_below()
            else:
                yield path

    def iterdir(self) -> Iterator[ObjectPath]:
        """Everything in the directory; FileNotFoundError if there is nothing."""
        return (self / entry.name for entry in self.entries())

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """What fits a pattern of names and ``*``, level by level."""
        head, _, rest = pattern.partition("/")
        if not self.is_dir():
            return
        for entry in list(self.entries()):
            if not fnmatchcase(entry.name, head):
                continue
            if not rest:
                yield self / entry.name
            elif entry.is_directory:
                yield from (self / entry.name).glob(rest)

    def open(self, mode: str = "rb") -> BinaryIO:
        """A stream of its bytes, each part fetched when it is read; for reading only."""
        if mode != "rb":
            raise ValueError(f"an object is read as bytes, not opened with {mode!r}")
        stream = io.BufferedReader(_Stream(self, self._present().size), _STREAM_BYTES)
        return cast("BinaryIO", stream)

    def read_bytes(self) -> bytes:
        """All bytes; FileNotFoundError if there is nothing."""
        size = self._present().size
        return self.store.read(self.key, 0, size)

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """All of it as text."""
        return self.read_bytes().decode(encoding, errors)

    def write_bytes(self, content: bytes) -> None:
        """Put an object in its place, whole or not at all."""
        self.store.write(self.key, content)

    def unlink(self) -> None:
        """Delete the object; nothing happens if there is none."""
        self.store.delete(self.key)


class _Stream(io.RawIOBase):
    """An object as a file that is read from any place on."""

    def __init__(self, path: ObjectPath, size: int) -> None:
        super().__init__()
        self._path, self._size, self._at = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        end = min(self._size, self._at + len(buffer))
        if end <= self._at:
            return 0
        content = self._path.store.read(self._path.key, self._at, end)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
