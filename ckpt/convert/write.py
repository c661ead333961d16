"""One output file on its way to the disk: filled, hashed and written in turn, in fixed memory.

The bytes pass through a few page-aligned buffers. While one is being filled, those before it
are hashed and written by threads of their own; a buffer is used again when both are done. Local
files are opened with O_DIRECT where the file system has it (open(2)): the bytes go from the
buffer to the disk without a copy in the page cache, which neither costs a copy nor drives out
what others have cached, and leaves nothing to flush at the end.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ckpt.convert import read
from ckpt.errors import OutputError
from ckpt.storage import is_remote

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

PART_SUFFIX = ".part"
BUFFERS = 4
_BLOCK = 4096  # O_DIRECT wants memory, offset and length in multiples of it
_REASONS = {
    errno.ENOSPC: ("the disk is full", "Make room"),
    errno.EDQUOT: ("the quota of disk space is used up", "Make room, or have it raised"),
    errno.EFBIG: ("larger files are not allowed here", "Raise the limit (ulimit -f)"),
}
_NO_DIRECT = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


class OutputFile(Protocol):
    """A file that is written once, from its begin to its end, and appears when it is whole."""

    def write(self, content: memoryview, at: int) -> None:
        """Write bytes at a multiple of the window; called from a thread, in order."""

    def commit(self, size: int) -> None:
        """Make the file of ``size`` bytes durable, and visible under its name."""

    def abort(self) -> None:
        """Leave nothing of it."""


class LocalFile:
    """A file on a disk: it grows under another name and is flushed before it gets its own."""

    def __init__(self, file: Path) -> None:
        """Open a new ``NAME.*.part`` beside it: an attempt that was given up may still write."""
        self._file = file
        self._part = file.with_name(f"{file.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
        self._fd, self._direct = _open_new(self._part)

    def write(self, content: memoryview, at: int) -> None:
        """Write ``content``, whose memory goes on to the next multiple of a block."""
        done = 0
        while done < len(content):
            try:
                done += os.pwritev(self._fd, [content[done:]], at + done)
            except OSError as error:
                if not self._direct or error.errno not in _NO_DIRECT:
                    raise
                self._give_up_direct()
            if self._direct and done % _BLOCK:  # a short write: what follows is not aligned
                self._give_up_direct()
        if not self._direct and hasattr(os, "posix_fadvise"):
            # Starts writing back at once, so that little is left for the flush at the end.
            os.posix_fadvise(self._fd, at, len(content), os.POSIX_FADV_DONTNEED)

    def _give_up_direct(self) -> None:
        self._close()
        self._fd, self._direct = os.open(self._part, os.O_WRONLY), False

    def commit(self, size: int) -> None:
        """Cut what was written beyond ``size``, flush, and give the file its name."""
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)
        self._close()
        self._part.replace(self._file)

    def abort(self) -> None:
        """Remove what was written."""
        with suppress(OSError):  # what went wrong before is what counts
            self._close()
            self._part.unlink(missing_ok=True)

    def _close(self) -> None:
        """Close it once: after an error of close(2) the number may be another file's."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _open_new(part: Path) -> tuple[int, bool]:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return os.open(part, flags | direct, 0o666), True
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            part.unlink(missing_ok=True)
    return os.open(part, flags, 0o666), False


def open_output(file: Path, nbytes: int) -> OutputFile:
    """A new file of about ``nbytes`` bytes, on this machine or in a store."""
    if is_remote(file):
        from ckpt.convert.object_stage import ObjectFile  # noqa: PLC0415 - only for a store

        return ObjectFile(file, nbytes)
    return LocalFile(file)


class Stream(AbstractContextManager["Stream"]):
    """The bytes of one output file in order; committed by :meth:`close`, else aborted."""

    def __init__(self, file: OutputFile) -> None:
        """Bytes put into it go to ``file``."""
        self._file = file
        self._buffers = [mmap.mmap(-1, read.WINDOW_BYTES + _BLOCK) for _ in range(BUFFERS)]
        self._busy: list[tuple[Future[None], ...]] = [()] * BUFFERS
        self._number = self._filled = self._at = 0
        self._digest = hashlib.sha256()
        self._hasher, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._open = True

    def __exit__(self, *_: object) -> None:
        """End the threads; without a :meth:`close` nothing of the file is left."""
        self._writer.shutdown(cancel_futures=True)
        self._hasher.shutdown(cancel_futures=True)
        if self._open:
            self._file.abort()

    def room(self, item: int) -> np.ndarray:
        """Memory for the bytes that follow: whole elements of ``item`` bytes, at least one.

        It may reach a few bytes over the end of a window, so that no element is cut.
        """
        free = read.WINDOW_BYTES - self._filled
        size = -(-free // item) * item
        buffer = self._buffers[self._number]
        return np.frombuffer(buffer, np.uint8, size, self._filled)

    def put(self, count: int) -> None:
        """The first ``count`` bytes of :meth:`room` have been filled."""
        self._filled += count
        if self._filled < read.WINDOW_BYTES:
            return
        buffer, over = self._buffers[self._number], self._filled - read.WINDOW_BYTES
        self._send(read.WINDOW_BYTES)
        self._number = (self._number + 1) % BUFFERS
        self._wait(self._number)
        self._buffers[self._number][:over] = buffer[read.WINDOW_BYTES : read.WINDOW_BYTES + over]
        self._filled = over

    def put_bytes(self, content: bytes) -> None:
        """Copy bytes in."""
        done = 0
        while done < len(content):
            room = self.room(1)
            count = min(len(room), len(content) - done)
            room[:count] = np.frombuffer(content, np.uint8, count, done)
            self.put(count)
            done += count

    def close(self) -> tuple[int, str]:
        """Write what is left and commit the file: its size and SHA-256."""
        size = self._at + self._filled
        if self._filled:
            self._send(self._filled)
        for number in range(BUFFERS):
            self._wait(number)
        self._file.commit(size)
        self._open = False
        return size, self._digest.hexdigest()

    def _send(self, count: int) -> None:
        """Hash ``count`` bytes of the buffer and write them, in whole blocks."""
        view = memoryview(self._buffers[self._number])
        end = -(-count // _BLOCK) * _BLOCK
        self._busy[self._number] = (
            self._writer.submit(self._file.write, view[:end], self._at),
            self._hasher.submit(self._digest.update, view[:count]),
        )
        self._at += count

    def _wait(self, number: int) -> None:
        for future in self._busy[number]:
            future.result()
        self._busy[number] = ()


@contextmanager
def disk_faults(file: Path) -> Iterator[None]:
    """Turn what the disk refuses inside into an OutputError about ``file``."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        reason, hint = _REASONS.get(number, (error.strerror, "Once the disk takes it again"))
        raise OutputError(
            f"cannot write: {reason}", file=file, hint=f"{hint}; the same command goes on from here"
        ) from error
