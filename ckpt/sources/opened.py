"""A file that is open for a few small reads, on this machine or in an object store."""

from __future__ import annotations

import os
from bisect import bisect_right
from typing import TYPE_CHECKING, BinaryIO, Protocol

from ckpt.errors import SourceError
from ckpt.storage import as_object, is_remote

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    Part = tuple[int, int]  # where it begins, and its bytes

_WINDOW_BYTES = 1024
_OBJECT_WINDOW_BYTES = 16 * 1024  # a request takes longer than the bytes do
_FEW = 2  # parts that are read when they are wanted


class OpenFile(Protocol):
    """A file to read archives from: few and small reads, each at a place of its own.

    Close it at the end. What was read last is kept, since an archive's parts lie together.
    """

    path: Path
    size: int

    def close(self) -> None:
        """Close the file."""

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on, fewer at the file's end."""

    def expect(self, parts: Iterable[Part]) -> None:
        """Say what will be read, so that it may be fetched at once."""

    def stream(self) -> BinaryIO:
        """The whole file as a stream of its own."""


def open_file(path: Path) -> OpenFile:
    """Open ``path``; raises SourceError if there is none or it cannot be read."""
    return _Object(path) if is_remote(path) else _File(path)


class _File:
    """A file of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise SourceError("no such file", file=path) from error
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror}", file=path) from error
        self.size = os.fstat(self._descriptor).st_size
        self._start, self._kept = 0, b""

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, length: int) -> bytes:
        at = offset - self._start
        if at < 0 or at + length > len(self._kept):
            if length > _WINDOW_BYTES:
                return self._read_all(offset, length)
            self._kept = self._read_all(offset, _WINDOW_BYTES)
            self._start, at = offset, 0
        return self._kept[at : at + length]

    def _read_all(self, offset: int, length: int) -> bytes:
        """One call may give less than there is: never more than 2 GiB, at times far less."""
        parts, end = [], min(offset + length, self.size)
        while offset < end:
            part = os.pread(self._descriptor, end - offset, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def expect(self, parts: Iterable[Part]) -> None:
        """Nothing: a read costs little here."""

    def stream(self) -> BinaryIO:
        return self.path.open("rb")


class _Object:
    """An object: what is expected comes side by side, the rest in windows."""

    def __init__(self, path: Path) -> None:
        self.path, place = path, as_object(path)
        entry = place.entry()
        if entry is None or entry.is_directory:
            raise SourceError("no such object", file=path)
        self.size, self._store, self._key = entry.size, place.store, place.key
        self._starts: list[int] = []
        self._parts: list[bytes] = []
        self._window = (0, b"")

    def close(self) -> None:
        """Nothing is open."""

    def read(self, offset: int, length: int) -> bytes:
        end = max(offset, min(offset + length, self.size))
        for start, content in (self._known(offset), self._window):
            if start <= offset and end <= start + len(content):
                return content[offset - start : end - start]
        stop = min(self.size, max(end, offset + _OBJECT_WINDOW_BYTES))
        self._window = offset, self._fetch(offset, stop)
        return self._window[1][: end - offset]

    def _known(self, offset: int) -> tuple[int, bytes]:
        """The expected part that may hold ``offset``."""
        number = bisect_right(self._starts, offset) - 1
        return (self._starts[number], self._parts[number]) if number >= 0 else (0, b"")

    def _fetch(self, start: int, end: int) -> bytes:
        content = self._store.read(self._key, start, end)
        if len(content) < end - start:
            raise SourceError(
                "the object changed while it was being read",
                file=self.path,
                expected=f"{self.size} bytes",
                hint="Wait until its writer has finished",
            )
        return content

    def expect(self, parts: Iterable[Part]) -> None:
        wanted = []
        for offset, length in parts:
            end = min(offset + length, self.size)
            start, content = self._known(offset)
            if offset < end and end > start + len(content):
                wanted.append((offset, end))
        if len(wanted) < _FEW:
            return
        known = {**dict(zip(self._starts, self._parts, strict=True))}
        known |= self._store.read_ranges(self._key, wanted)
        self._starts = sorted(known)
        self._parts = [known[start] for start in self._starts]

    def stream(self) -> BinaryIO:
        return self.path.open("rb")
