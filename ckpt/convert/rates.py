"""How fast this machine reads a source's weights and hashes them, found in half a second."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt.rectangles import Copy

PLACES = 8
LIMIT_SECONDS = 0.5
SMALL_BYTES = 256 * 2**20  # less is read before anyone has read the estimate
_SAMPLE_BYTES = 8 * 2**20
_STEP_BYTES = 2**20
_HASHED_BYTES = 2**20
_HASHED_ROUNDS = 3


@dataclass(frozen=True)
class ReadRate:
    """Bytes a second of reads from ``places`` places, or in ``lacks`` why nothing was measured."""

    per_second: float = 0.0
    places: int = 0
    lacks: str = ""


def measure_reads(copies: Sequence[Copy]) -> ReadRate:
    """The rate at which the disk gives a source's own weights, at places spread over it.

    Pages that the system holds of them are given back first, so that it is the disk that is
    measured. Holes in sparse files and files that are not of this machine are not read.
    """
    nbytes = sum(copy.rows * copy.width for copy in copies)
    if nbytes < SMALL_BYTES:
        return ReadRate(lacks="there is little to read")
    if any("://" in copy.file for copy in copies):
        return ReadRate(lacks="the source is not on this machine")
    if not hasattr(os, "posix_fadvise"):
        return ReadRate(lacks="this system keeps what was read")
    done, seconds, places = 0, 0.0, 0
    for copy in _spread(copies):
        count, spent = _read(copy, LIMIT_SECONDS - seconds)
        done, seconds, places = done + count, seconds + spent, places + (count > 0)
        if seconds >= LIMIT_SECONDS:
            break
    if not done:
        return ReadRate(lacks="the weights are holes in sparse files")
    return ReadRate(done / max(seconds, 1e-9), places)


def _spread(copies: Sequence[Copy]) -> Iterator[Copy]:
    """The largest rectangle in each of some equal parts of the plan."""
    step = -(-len(copies) // PLACES)
    for first in range(0, len(copies), step):
        yield max(copies[first : first + step], key=lambda copy: copy.rows * copy.width)


def _read(copy: Copy, limit_seconds: float) -> tuple[int, float]:
    """Bytes that were read within the limit, and the seconds that they took; 0 for a hole."""
    length = min(_SAMPLE_BYTES, copy.rows * copy.width)
    try:
        fd = os.open(copy.file, os.O_RDONLY)
    except OSError:  # the conversion itself will say so
        return 0, 0.0
    try:
        if not _is_data(fd, copy.source, length):
            return 0, 0.0
        os.posix_fadvise(fd, copy.source, length, os.POSIX_FADV_DONTNEED)
        started, done = time.monotonic(), 0
        os.posix_fadvise(fd, copy.source, length, os.POSIX_FADV_WILLNEED)
        while done < length and time.monotonic() - started < limit_seconds:
            count = len(os.pread(fd, min(_STEP_BYTES, length - done), copy.source + done))
            if not count:
                break
            done += count
        seconds = time.monotonic() - started
        os.posix_fadvise(fd, copy.source, length, os.POSIX_FADV_DONTNEED)
    except OSError:
        return 0, 0.0
    finally:
        os.close(fd)
    return done, seconds


def _is_data(fd: int, offset: int, length: int) -> bool:
    """Whether all of these bytes are stored; holes cost no reading and say nothing."""
    try:
        return (
            os.lseek(fd, offset, os.SEEK_DATA) == offset
            and os.lseek(fd, offset, os.SEEK_HOLE) >= offset + length
        )
    except OSError:  # a hole to the end of the file
        return False


def hash_rate() -> float:
    """Bytes a second that one thread of this processor hashes with SHA-256: the best of three."""
    content, best = bytes(_HASHED_BYTES), 1.0
    for _ in range(_HASHED_ROUNDS):
        started = time.perf_counter()
        sha256(content).digest()
        best = min(best, time.perf_counter() - started)
    return _HASHED_BYTES / best
