"""A plan becomes files: windows of bounded size, written in order, hashed on the way.

Peak memory is one window of the target plus one of the source, whatever the model's size.
Finished files of an interrupted run are recognised by their receipts and kept.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ckpt.convert.maps import CastReport, apply_steps
from ckpt.convert.nonfinite import NonfiniteCount
from ckpt.errors import CkptError, OutputError, SourceError
from ckpt.manifest import write_json
from ckpt.shards import header_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from ckpt.convert.plan import Target
    from ckpt.progress import Progress
    from ckpt.rectangles import Copy

WINDOW_BYTES = 16 * 2**20
RECEIPT_SUFFIX = ".receipt.json"
PART_SUFFIX = ".part"
_OPEN_FILES = 200
_SPARSE = 4  # read rows one by one when less than 1/4 of the bytes between them is wanted


@dataclass(frozen=True)
class Written:
    """One finished output file."""

    name: str
    size: int
    sha256: str
    overflowed: dict[str, int] = field(default_factory=dict)
    underflowed: dict[str, int] = field(default_factory=dict)
    nonfinite: dict[str, int] = field(default_factory=dict)


class Files(AbstractContextManager["Files"]):
    """Source files by path, opened when first read, the oldest closed beyond a limit."""

    def __init__(self) -> None:
        """No file is open yet."""
        self._open: dict[str, int] = {}

    def __exit__(self, *_: object) -> None:
        """Close all files."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def read_into(self, file: str, offset: int, target: np.ndarray) -> None:
        """Fill a contiguous array of bytes from ``offset`` on; SourceError if the file ends."""
        fd, done, view = self._fd(file), 0, memoryview(target.data).cast("B")
        while done < len(view):
            try:
                count = os.preadv(fd, [view[done:]], offset + done)
            except OSError as error:
                raise SourceError(f"cannot read: {error.strerror}", file=file) from error
            if count == 0:
                raise SourceError(
                    "the file ended early: it changed while it was being converted", file=file
                )
            done += count

    def _fd(self, file: str) -> int:
        fd = self._open.pop(file, None)
        if fd is None:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                fd = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise SourceError(f"cannot open: {error.strerror}", file=file) from error
        self._open[file] = fd
        return fd


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
    return replace(
        copy,
        source=copy.source + moved,
        target=copy.target + row * copy.target_pitch + byte,
        rows=rows,
        width=width,
    )


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
    if copy.source_pitch > _SPARSE * copy.width:
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
        buffer = np.empty(count * copy.source_pitch, np.uint8)
        files.read_into(copy.file, copy.source + row * copy.source_pitch, buffer[:span])
        source = buffer.reshape(count, copy.source_pitch)[:, : copy.width]
        start = at + row * copy.target_pitch
        target = np.lib.stride_tricks.as_strided(
            window[start:], (count, copy.width), (copy.target_pitch, 1)
        )
        np.copyto(target, source)


def _fill_transposed(files: Files, copy: Copy, window: np.ndarray, at: int) -> None:
    """Read the file's rows (the target's columns) and lay them down as columns."""
    columns, line = copy.width // copy.item, copy.rows * copy.item
    kind = np.dtype(f"V{copy.item}")
    buffer = np.empty(line, np.uint8)
    for column in range(columns):
        files.read_into(copy.file, copy.source + column * copy.source_pitch, buffer)
        start = at + column * copy.item
        end = start + (copy.rows - 1) * copy.target_pitch + copy.item
        target = np.lib.stride_tricks.as_strided(
            window[start:end], (copy.rows, copy.item), (copy.target_pitch, 1)
        )
        np.copyto(target, buffer.view(kind).view(np.uint8).reshape(copy.rows, copy.item))


def windows(files: Files, target: Target) -> Iterator[np.ndarray]:
    """The stored bytes of a target, before its steps, in windows of bounded size.

    A window of a target that combines ranks' copies has one row for each of them.
    """
    layers = [
        sorted(copies, key=lambda copy: copy.target) for copies in (target.copies, *target.further)
    ]
    item = target.stored.itemsize
    size = max(1, WINDOW_BYTES // item // len(layers)) * item
    for first in range(0, target.stored_bytes, size):
        end = min(first + size, target.stored_bytes)
        window = np.empty((len(layers), end - first), np.uint8)
        for row, copies in zip(window, layers, strict=True):
            fill_window(files, copies, row, first)
        yield window if target.further else window[0]


def fill_window(files: Files, copies: Sequence[Copy], window: np.ndarray, first: int) -> None:
    """Fill bytes ``first`` and on of a target; ``copies`` are in order of their target."""
    end = first + len(window)
    for copy in copies:
        if copy.target >= end:
            break
        for part in clip(copy, first, end):
            fill(files, part, window, first)


def write_file(
    directory: Path,
    name: str,
    targets: Sequence[Target],
    files: Files,
    progress: Progress,
    *,
    allow_nonfinite: bool = False,
) -> Written:
    """Write one safetensors file and its receipt, or keep the finished one of an earlier run.

    Raises SourceError for a tensor with NaN or infinite values unless they are allowed.
    """
    known = read_receipt(directory, name)
    if known is not None:
        progress.advance(sum(target.spec.nbytes for target in targets))
        return known
    part = directory / f"{name}{PART_SUFFIX}"
    with disk_faults(part):
        try:
            content = _Content(files, progress, allow_nonfinite=allow_nonfinite)
            written = _write_part(part, name, targets, content)
        except (OSError, CkptError):
            part.unlink(missing_ok=True)
            raise
        part.replace(directory / name)
        write_json(directory / f"{name}{RECEIPT_SUFFIX}", asdict(written))
    return written


@contextmanager
def disk_faults(file: Path) -> Iterator[None]:
    """Turn what the disk refuses inside into an OutputError about ``file``."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error.strerror)
        raise OutputError(
            f"cannot write: {reason}",
            file=file,
            hint="Make room; the same command goes on from here",
        ) from error


class _Content:
    """The bytes to write, target by target, and what was noticed in them."""

    def __init__(self, files: Files, progress: Progress, *, allow_nonfinite: bool) -> None:
        self._files, self._progress, self._allow = files, progress, allow_nonfinite
        self.casts = CastReport()
        self.nonfinite: dict[str, int] = {}

    def of(self, target: Target) -> Iterator[memoryview]:
        """The target's bytes after its steps, in windows."""
        found = NonfiniteCount(target.stored)
        for window in windows(self._files, target):
            found.add(window)
            content = window
            if target.steps:
                content = apply_steps(
                    window, target.stored, target.steps, name=target.spec.name, report=self.casts
                )
            yield memoryview(content.data).cast("B")
            self._progress.advance(content.nbytes)
        if found.count and not self._allow:
            raise _nonfinite(target, found)
        if found.count:
            self.nonfinite[target.spec.name] = found.count


def _nonfinite(target: Target, found: NonfiniteCount) -> SourceError:
    row, at = found.first
    end = at + target.stored.itemsize
    copies = (target.copies, *target.further)[row]
    return SourceError(
        "weights that are no numbers",
        file=next(copy.file for copy in copies if any(True for _ in clip(copy, at, end))),
        tensor=target.spec.name,
        expected="finite values",
        found=f"{found.count} that are NaN or infinite",
        hint="Training may have diverged: take an earlier --iteration, or convert them as they "
        "are with --allow-nonfinite",
    )


def _write_part(part: Path, name: str, targets: Sequence[Target], content: _Content) -> Written:
    digest, size = hashlib.sha256(), 0
    with part.open("wb") as stream, ThreadPoolExecutor(1) as hasher:
        pending: Future[None] | None = None
        header = header_bytes([target.spec for target in targets])
        digest.update(header)
        size += stream.write(header)
        for target in targets:
            for window in content.of(target):
                if pending is not None:
                    pending.result()
                pending = hasher.submit(digest.update, window)
                size += stream.write(window)
        if pending is not None:
            pending.result()
        stream.flush()
        os.fsync(stream.fileno())
    casts = content.casts
    return Written(
        name, size, digest.hexdigest(), casts.overflowed, casts.underflowed, content.nonfinite
    )


def read_receipt(directory: Path, name: str) -> Written | None:
    """What an earlier run left of this file, if it was finished and is still whole."""
    try:
        content = json.loads((directory / f"{name}{RECEIPT_SUFFIX}").read_text(encoding="utf-8"))
        size = (directory / name).stat().st_size
    except (OSError, ValueError):
        return None
    return Written(**content) if content.get("size") == size else None
