"""Rectangles of source files become bytes in memory, into buffers that are used again.

Files are read, never mapped: pages of a mapping would count as memory of the process.
"""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ckpt.convert.objects import Objects
from ckpt.errors import SourceError
from ckpt.storage import MARK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckpt.rectangles import Copy
    from ckpt.storage import Stamp

WINDOW_BYTES = 16 * 2**20
_OPEN_FILES = 200
_AHEAD_BYTES = 128 * 2**20  # asked of the kernel ahead of what is read: the disk never waits
_SPARSE = 4  # read rows one by one when less than 1/4 of the bytes between them is wanted
_GAP_BYTES = 16 * 2**10  # and when a call costs less than reading what lies between two rows


class Files(AbstractContextManager["Files"]):
    """Source files by path, opened when first read, the oldest closed beyond a limit."""

    def __init__(self, stamps: Mapping[str, Stamp] | None = None) -> None:
        """No file is open yet; ``stamps`` are sizes and times of files that must not change."""
        self._open: dict[str, int] = {}
        self._stamps = stamps or {}
        self._objects = Objects()
        self._scratch = np.empty(0, np.uint8)
        self._upcoming: Iterator[tuple[str, int, int]] = iter(())
        self._expected = self._done = 0

    def __exit__(self, *_: object) -> None:
        """Close all files."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def expect(self, copies: Iterable[Copy]) -> None:
        """Rectangles that will be read, in this order: the kernel reads them ahead."""
        self._upcoming, self._expected, self._done = _spans(copies), 0, 0

    def scratch(self, nbytes: int) -> np.ndarray:
        """Room for so many bytes, the same at each call: its old content is lost."""
        if len(self._scratch) < nbytes:
            self._scratch = np.empty(max(nbytes, WINDOW_BYTES), np.uint8)
        return self._scratch[:nbytes]

    def read_into(self, file: str, offset: int, target: np.ndarray) -> None:
        """Fill a contiguous array of bytes from ``offset`` on.

        Raises SourceError for a file that ends early, is not the one that was planned with,
        or cannot be read.
        """
        if MARK in file:
            self._read_object(file, offset, memoryview(target.data).cast("B"))
            return
        self._read_ahead(len(target))
        fd, done, view = self._fd(file), 0, memoryview(target.data).cast("B")
        while done < len(view):
            try:
                count = os.preadv(fd, [view[done:]], offset + done)
            except OSError as error:
                raise _unreadable("read", error, file) from error
            if count == 0:
                raise _changed(file, "to go on", "its end")
            done += count

    def check_unchanged(self, names: Sequence[str]) -> None:
        """Raise SourceError if one of these files is not as it was when the plan was made.

        A file that was deleted while it is open here is as it was.
        """
        held = [file for file in names if file in self._stamps]
        objects = [file for file in held if MARK in file]
        for file, found in self._objects.stamps_now(objects) if objects else ():
            if found is None:
                raise _gone(file)
            self._compare(file, found)
        for file in held:
            if MARK in file:
                continue
            fd = self._open.get(file)
            try:
                state = Path(file).stat() if fd is None else os.fstat(fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _unreadable("read", error, file) from error
            self._compare(file, (state.st_size, state.st_mtime_ns))

    def _read_object(self, file: str, offset: int, view: memoryview) -> None:
        try:
            self._compare(file, self._objects.stamp(file))
            self._objects.read_into(file, offset, view)
        except FileNotFoundError as error:
            raise _gone(file) from error

    def _read_ahead(self, count: int) -> None:
        self._done += count
        while self._expected < self._done + _AHEAD_BYTES:
            file, start, length = next(self._upcoming, ("", 0, 0))
            if not length:
                return
            self._expected += length
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd(file), start, length, os.POSIX_FADV_WILLNEED)

    def _fd(self, file: str) -> int:
        fd = self._open.pop(file, None)
        if fd is None:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            fd = self._open_file(file)
            self._open[file] = fd
            state = os.fstat(fd)
            self._compare(file, (state.st_size, state.st_mtime_ns))
        self._open[file] = fd
        return fd

    def _open_file(self, file: str) -> int:
        while True:
            try:
                return os.open(file, os.O_RDONLY)
            except OSError as error:
                if error.errno != errno.EMFILE or not self._open:
                    raise _unreadable("open", error, file) from error
                os.close(self._open.pop(next(iter(self._open))))

    def _compare(self, file: str, found: Stamp) -> None:
        planned = self._stamps.get(file)
        if planned is not None and tuple(planned) != found:
            what = "modified at {} ns" if isinstance(found[1], int) else "state {}"
            words = [f"{size} bytes, {what.format(state)}" for size, state in (planned, found)]
            raise _changed(file, *words)


def _gone(file: str) -> SourceError:
    return SourceError(
        "the object is gone",
        file=file,
        hint="It was there when the plan was made: keep the checkpoint until it is converted",
    )


def _unreadable(what: str, error: OSError, file: str) -> SourceError:
    gone = isinstance(error, FileNotFoundError)
    return SourceError(
        f"cannot {what}: {error.strerror}",
        file=file,
        hint="It was there when the plan was made: put it back; the same command then goes on"
        if gone
        else "Nothing is lost: once it can be read, the same command goes on from here",
    )


def _changed(file: str, expected: str, found: str) -> SourceError:
    return SourceError(
        "the file changed while it was being converted",
        file=file,
        expected=expected,
        found=found,
        hint="Wait until its writer has finished; the same command then starts afresh",
    )


def _spans(copies: Iterable[Copy]) -> Iterator[tuple[str, int, int]]:
    """File, offset and length of what rectangles read, in pieces of a window."""
    for copy in copies:
        lines = copy.width // copy.item if copy.transposed else copy.rows
        line = copy.rows * copy.item if copy.transposed else copy.width
        span = (lines - 1) * copy.source_pitch + line if copy.nbytes else 0
        for at in range(0, span, WINDOW_BYTES):
            yield copy.file, copy.source + at, min(WINDOW_BYTES, span - at)


def clip(copy: Copy, first: int, end: int) -> Iterator[Copy]:
    """The parts of a rectangle whose target bytes lie in [``first``, ``end``), as rectangles."""
    last_row = copy.target + (copy.rows - 1) * copy.target_pitch
    if copy.target >= first and last_row + copy.width <= end:
        yield copy
        return
    row = max(0, (first - copy.target) // copy.target_pitch) if copy.target_pitch else 0
    while row < copy.rows:
        start = copy.target + row * copy.target_pitch
        if start >= end:
            return
        if start >= first and start + copy.width <= end:
            fit = (end - start - copy.width) // copy.target_pitch + 1
            count = min(copy.rows - row, fit)
            yield _part(copy, row, count, 0, copy.width)
            row += count
            continue
        low, high = max(first, start) - start, min(end, start + copy.width) - start
        if low < high:
            yield _part(copy, row, 1, low, high - low)
        row += 1


def _part(copy: Copy, row: int, rows: int, byte: int, width: int) -> Copy:
    if copy.transposed:
        moved = row * copy.item + byte // copy.item * copy.source_pitch
    else:
        moved = row * copy.source_pitch + byte
    return copy._replace(
        source=copy.source + moved,
        target=copy.target + row * copy.target_pitch + byte,
        rows=rows,
        width=width,
    )


def fill_window(files: Files, copies: Sequence[Copy], window: np.ndarray, first: int) -> None:
    """Fill bytes ``first`` and on of a target; ``copies`` are in order of their target."""
    end = first + len(window)
    for copy in copies:
        if copy.target >= end:
            break
        for part in clip(copy, first, end):
            fill(files, part, window, first)


def fill(files: Files, copy: Copy, window: np.ndarray, base: int) -> None:
    """Carry out one rectangle; ``window`` holds the target's bytes from ``base`` on."""
    at = copy.target - base
    if copy.transposed:
        _fill_transposed(files, copy, window, at)
        return
    whole_target = copy.rows == 1 or copy.target_pitch == copy.width
    whole_source = copy.rows == 1 or copy.source_pitch == copy.width
    if whole_target and whole_source:
        files.read_into(copy.file, copy.source, window[at : at + copy.nbytes])
        return
    gap = copy.source_pitch - copy.width  # below zero where rows are views of the same bytes
    if gap < 0 or gap >= _GAP_BYTES or copy.source_pitch > _SPARSE * copy.width:
        for row in range(copy.rows):
            start = at + row * copy.target_pitch
            target = window[start : start + copy.width]
            files.read_into(copy.file, copy.source + row * copy.source_pitch, target)
        return
    _fill_strided(files, copy, window, at)


def _fill_strided(files: Files, copy: Copy, window: np.ndarray, at: int) -> None:
    """Read rows with the gaps between them, as many as a window takes, and drop the gaps."""
    step = max(1, WINDOW_BYTES // copy.source_pitch)
    for row in range(0, copy.rows, step):
        count = min(step, copy.rows - row)
        span = (count - 1) * copy.source_pitch + copy.width
        buffer = files.scratch(count * copy.source_pitch)
        files.read_into(copy.file, copy.source + row * copy.source_pitch, buffer[:span])
        source = buffer.reshape(count, copy.source_pitch)[:, : copy.width]
        start = at + row * copy.target_pitch
        target = np.lib.stride_tricks.as_strided(
            window[start:], (count, copy.width), (copy.target_pitch, 1)
        )
        np.copyto(target, source)


def _fill_transposed(files: Files, copy: Copy, window: np.ndarray, at: int) -> None:
    """Read the file's rows (the target's columns), as many as a window takes, and turn them."""
    columns, line, pitch = copy.width // copy.item, copy.rows * copy.item, copy.source_pitch
    dense = line <= pitch <= _SPARSE * line and pitch - line < _GAP_BYTES
    step = max(1, WINDOW_BYTES // max(pitch if dense else line, 1))
    kind = np.dtype(f"V{copy.item}")
    for column in range(0, columns, step):
        count = min(step, columns - column)
        start = copy.source + column * pitch
        between = pitch if dense else line
        buffer = files.scratch(count * between)
        if dense:
            files.read_into(copy.file, start, buffer[: (count - 1) * pitch + line])
        else:
            for index in range(count):
                row = buffer[index * line : (index + 1) * line]
                files.read_into(copy.file, start + index * pitch, row)
        source = np.ndarray((copy.rows, count), kind, buffer, 0, (copy.item, between))
        place = at + column * copy.item
        target = np.ndarray((copy.rows, count), kind, window, place, (copy.target_pitch, copy.item))
        np.copyto(target, source)
