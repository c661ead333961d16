"""An object store, through fsspec: listings that are made once, and reads of ranges.

fsspec's libraries bring credentials, endpoints, retries and parallel requests. What they raise
becomes a FileNotFoundError, or a StoreError that says what to do.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from errno import ENOENT
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ckpt.errors import CkptError, OptionsError, OutputError, StoreError, extra_hint
from ckpt.storage.faults import explain, is_missing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

# The part of pip's extra for each protocol.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
# Where the libraries put an object's entity tag and its time.
_TAGS = ("ETag", "etag", "generation", "md5Hash", "md5")
_TIMES = ("LastModified", "updated", "mtime", "created")
# Ranges that lie closer than this are one request: it costs what this many bytes do.
_GAP_BYTES = 64 * 1024
_PART_BYTES = 4 * 2**20
_SMALL_BYTES = 2**20


@dataclass(frozen=True)
class Entry:
    """An object or a directory; ``state`` changes whenever the object is written again."""

    name: str
    size: int
    is_directory: bool
    state: str


@dataclass(frozen=True)
class Range:
    """Bytes ``start`` to ``end`` of an object."""

    key: str
    start: int
    end: int


def open_store(protocol: str) -> Store:
    """The store of a protocol; OptionsError where it is unknown or its library is missing."""
    extra = _EXTRAS.get(protocol)
    try:
        import fsspec  # noqa: PLC0415 - an extra

        files = fsspec.filesystem(protocol)
        prefix = str(fsspec.core.url_to_fs(f"{protocol}://bucket")[1]).removesuffix("bucket")
    except ImportError as error:
        raise OptionsError(
            f"{protocol}:// needs a library that is not installed: {error}",
            hint=f"Install it: {extra_hint(extra)}"
            if extra
            else "ckpt is tested with s3:// and gs://; else copy it here first, and give the path",
        ) from error
    except ValueError as error:
        raise OptionsError(
            f"{protocol}:// is no known kind of store", expected="s3:// or gs://"
        ) from error
    except Exception as error:
        raise explain(error, f"{protocol}://", "cannot open the store") from error
    return Store(protocol, files, prefix)


class Store:
    """All buckets that one protocol reaches. Keys begin with the bucket."""

    def __init__(self, protocol: str, files: Any, prefix: str) -> None:  # noqa: ANN401 - fsspec
        """``files`` is fsspec's file system, whose names begin with ``prefix``."""
        self.protocol, self.files, self._prefix = protocol, files, prefix
        self._listings: dict[str, dict[str, Entry]] = {}
        self._alone: dict[str, Entry | None] = {}
        self._contents: dict[str, bytes] = {}

    def url(self, key: str) -> str:
        """How the user writes a key."""
        return f"{self.protocol}://{key}"

    def name(self, key: str) -> str:
        """How fsspec writes a key."""
        return f"{self._prefix}{key}"

    def forget(self) -> None:
        """Look at everything anew from here on."""
        self._listings.clear()
        self._alone.clear()
        self._contents.clear()
        self.files.invalidate_cache()

    def forget_changed(self, key: str) -> None:
        """Look anew at what a key's writing or deletion changes: all that is above it."""
        self._contents.pop(key, None)
        self._alone.clear()
        while key:
            key = key.rpartition("/")[0]
            self._listings.pop(key, None)

    def entry(self, key: str, *, alone: bool = False) -> Entry | None:
        """What is there; ``alone`` asks for the key itself unless its neighbours are known."""
        above, _, name = key.rpartition("/")
        if not above or (alone and above not in self._listings):
            return self._entry_alone(key)
        try:
            return self.listing(above).get(name)
        except FileNotFoundError:
            return None

    def _entry_alone(self, key: str) -> Entry | None:
        if key not in self._alone:
            found = None
            try:
                with self.faults(key, "cannot look at it"):
                    found = _entry(self.files.info(self.name(key)))
            except FileNotFoundError:
                pass
            self._alone[key] = found
        return self._alone[key]

    def stamp(self, key: str) -> tuple[int, str]:
        """Size and state of an object; FileNotFoundError if there is none."""
        entry = self.entry(key, alone=True)
        if entry is None or entry.is_directory:
            raise FileNotFoundError(ENOENT, "no such object", self.url(key))
        return entry.size, entry.state

    def listing(self, key: str) -> Mapping[str, Entry]:
        """What is in a directory, by name; FileNotFoundError if there is nothing."""
        if key not in self._listings:
            with self.faults(key, "cannot list it"):
                found = self.files.ls(self.name(key), detail=True)
            own = self.name(key).strip("/")
            entries = [_entry(info) for info in found if info["name"].strip("/") != own]
            if not entries:
                raise FileNotFoundError(ENOENT, "no such directory", self.url(key))
            self._listings[key] = {entry.name: entry for entry in entries}
        return self._listings[key]

    def list_whole(self, key: str) -> None:
        """List a directory and all below it with as few requests as the store has pages."""
        if not any(entry.is_directory for entry in self.listing(key).values()):
            return
        with self.faults(key, "cannot list all of it"):
            found = self.files.find(self.name(key), detail=True)
        listings: dict[str, dict[str, Entry]] = {key: {}}
        for name, info in found.items():
            inner = name[len(self.name(key)) :].strip("/").split("/")
            above = key
            for folder in inner[:-1]:
                entry = Entry(folder, 0, is_directory=True, state="")
                listings.setdefault(above, {}).setdefault(folder, entry)
                above = f"{above}/{folder}"
            if inner[-1]:
                listings.setdefault(above, {})[inner[-1]] = _entry(info)
        self._listings |= {above: entries for above, entries in listings.items() if entries}

    def read(self, key: str, start: int, end: int) -> bytes:
        """Bytes ``start`` to ``end``, fetched in parts side by side where they are many."""
        whole = self._contents.get(key)
        if whole is not None:
            return whole[start:end]
        if start >= end:
            return b""
        return b"".join(self._fetch(_parts(key, start, end)))

    def read_into(self, key: str, start: int, view: memoryview) -> int:
        """Fill ``view`` with the bytes from ``start`` on, in parts side by side; how many came."""
        at = 0
        for content in self._fetch(_parts(key, start, start + len(view))):
            view[at : at + len(content)] = content
            at += len(content)
        return at

    def read_ranges(self, key: str, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, bytes]]:
        """Ranges of an object side by side, in order, each with its start.

        Those that are close to each other come as one.
        """
        merged = list(merge(Range(key, start, end) for start, end in pairs))
        return [
            (part.start, content) for part, content in zip(merged, self._fetch(merged), strict=True)
        ]

    def fetch_small(self, keys: Sequence[str]) -> None:
        """Keep the content of small objects for their later reading."""
        wanted = []
        for key in keys:
            entry = self.entry(key)
            if entry is not None and 0 < entry.size <= _SMALL_BYTES and key not in self._contents:
                wanted.append(Range(key, 0, entry.size))
        contents = self._fetch(wanted)
        for part, content in zip(wanted, contents, strict=True):
            self._contents[part.key] = content

    def _fetch(self, ranges: Sequence[Range]) -> list[bytes]:
        if not ranges:
            return []
        with self.faults(ranges[0].key, "cannot read it"):
            if len(ranges) == 1:
                one = ranges[0]
                return [self.files.cat_file(self.name(one.key), start=one.start, end=one.end)]
            found = self.files.cat_ranges(
                [self.name(part.key) for part in ranges],
                [part.start for part in ranges],
                [part.end for part in ranges],
                on_error="return",
            )
        for part, content in zip(ranges, found, strict=True):
            if isinstance(content, Exception):
                with self.faults(part.key, "cannot read it"):
                    raise content
        return list(found)

    def write(self, key: str, content: bytes) -> None:
        """Put an object in its place, whole or not at all."""
        with self.faults(key, "cannot write it", OutputError):
            self.files.pipe_file(self.name(key), content)
        self.forget_changed(key)

    def delete(self, key: str) -> None:
        """Delete an object; nothing happens if there is none."""
        try:
            with self.faults(key, "cannot delete it", OutputError):
                self.files.rm_file(self.name(key))
        except FileNotFoundError:
            pass
        self.forget_changed(key)

    @contextmanager
    def faults(self, key: str, doing: str, kind: type[CkptError] = StoreError) -> Iterator[None]:
        """Turn what a library raises into FileNotFoundError or an error of ``kind``."""
        try:
            yield
        except CkptError:
            raise
        except Exception as error:
            if is_missing(error):
                raise FileNotFoundError(ENOENT, "no such object", self.url(key)) from error
            raise explain(error, self.url(key), doing, kind) from error


def _parts(key: str, start: int, end: int) -> list[Range]:
    bounds = [*range(start, end, _PART_BYTES), end]
    return [Range(key, low, high) for low, high in pairwise(bounds)]


def merge(ranges: Iterable[Range]) -> Iterator[Range]:
    """Ranges in order, those with a small gap or none between them put together.

    >>> [(r.start, r.end) for r in merge([Range("a", 9, 12), Range("a", 0, 4)])]
    [(0, 12)]
    """
    current: Range | None = None
    for part in sorted(ranges, key=lambda part: (part.key, part.start, part.end)):
        if (
            current is not None
            and part.key == current.key
            and part.start - current.end <= _GAP_BYTES
            and part.end - current.start <= _PART_BYTES
        ):
            current = Range(part.key, current.start, max(current.end, part.end))
            continue
        if current is not None:
            yield current
        current = part
    if current is not None:
        yield current


def _entry(info: Mapping[str, Any]) -> Entry:
    name = str(info["name"]).rstrip("/").rpartition("/")[2]
    is_directory = info.get("type") == "directory"
    parts = [str(info[key]).strip('"') for key in _TAGS if info.get(key) is not None][:1]
    times = [info[key] for key in _TIMES if info.get(key) is not None][:1]
    parts += [_time(value) for value in times]
    state = "" if is_directory else " ".join(parts)
    return Entry(name, int(info.get("size") or 0), is_directory, state)


def _time(value: object) -> str:
    """Whole seconds: a listing may tell more than an object's own answer does."""
    return value.isoformat(timespec="seconds") if isinstance(value, datetime) else str(value)
