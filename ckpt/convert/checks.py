"""Stored copies of one tensor are compared before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckpt.convert import read
from ckpt.convert.read import Files
from ckpt.errors import SourceError
from ckpt.rectangles import rectangles
from ckpt.tensors import DType, contiguous_strides
from ckpt.terminal import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ckpt.convert.plan import Check
    from ckpt.storage import Stamp

# How far ranks' copies may have drifted apart, as a share of the tensor's largest value: eight
# steps of bfloat16 at 1. Rounding that differs from rank to rank stays below it; another layer's
# or another iteration's gains, which must not be averaged, do not.
DRIFT_LIMIT = 1 / 16
_PAIR_BYTES = 4 * 2**20  # of each copy; drifts are reckoned in float64, four times as much


def describe_drift(found: Mapping[str, float]) -> str | None:
    """One line about what :func:`compare_copies` measured, or None where all copies are equal."""
    if not found:
        return None
    are = "is" if len(found) == 1 else "are"
    worst = max(found, key=lambda name: found[name])
    return (
        f"{plural(len(found), 'tensor')} {are} the mean of their ranks' copies, which had drifted "
        f"apart: by {found[worst]:.2g} of the largest value at most, in {worst}"
    )


def compare_copies(
    checks: Sequence[Check], stamps: Mapping[str, Stamp], advance: Callable[[int], None]
) -> dict[str, float]:
    """Compare stored copies of the same tensor; raises SourceError naming both places.

    Copies that may drift are measured, and refused beyond ``DRIFT_LIMIT``: the result has the
    name of each tensor whose copies differ, and by how much at most, as a share of its largest
    value. Files must be as ``stamps`` say; ``advance`` is told the bytes of first copies.
    """
    with Files(stamps) as files:
        return _compare(checks, files, advance)


def _compare(
    checks: Sequence[Check], files: Files, advance: Callable[[int], None]
) -> dict[str, float]:
    found: dict[str, float] = {}
    both = _Pairs(files)
    for check in checks:
        pairs = both.of(check)
        if check.may_drift and check.first.dtype in _AS_FLOAT:
            distance = _distance(check, pairs)
            if distance:
                found[check.name] = max(distance, found.get(check.name, 0.0))
        elif not all(_equal(a, b) for a, b in pairs):
            raise SourceError(
                "two stored copies of this tensor differ",
                file=check.first.file,
                tensor=check.name,
                expected=f"the same bytes as {check.other_name or check.name} "
                f"in {check.other.file}",
                found="other bytes",
                hint="Ranks have drifted apart or a stale copy was kept; none is chosen silently",
            )
        advance(check.first.nbytes)
    return found


def _distance(check: Check, pairs: Iterator[tuple[np.ndarray, np.ndarray]]) -> float:
    """The largest difference as a share of the largest value."""
    most = size = 0.0
    for first, other in pairs:
        a, b = (_AS_FLOAT[check.first.dtype](each) for each in (first, other))
        if _equal(first, other):
            most, size = max(most, 0.0), max(size, float(np.abs(a).max(initial=0.0)))
            continue
        most = max(most, float(np.abs(a - b).max(initial=0.0)))
        size = max(size, float(np.abs(a).max(initial=0.0)), float(np.abs(b).max(initial=0.0)))
    distance = most / size if size else 0.0
    if not distance <= DRIFT_LIMIT:  # also for what is no number
        raise SourceError(
            "ranks hold copies of this tensor that are too far apart to be averaged",
            file=check.first.file,
            tensor=check.name,
            expected=f"differences up to {DRIFT_LIMIT:.2%} of the largest value",
            found=f"{distance:.2%} against {check.other.file}",
            hint="More than rounding: the files are of different iterations, or one is damaged",
        )
    return distance


def _bfloat16(buffer: np.ndarray) -> np.ndarray:
    return (buffer.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


_AS_FLOAT = {
    DType.F64: lambda buffer: buffer.view(np.float64),
    DType.F32: lambda buffer: buffer.view(np.float32).astype(np.float64),
    DType.F16: lambda buffer: buffer.view(np.float16).astype(np.float64),
    DType.BF16: _bfloat16,
}


class _Pairs:
    """Windows of two stored copies, side by side, in two buffers that are used again."""

    def __init__(self, files: Files) -> None:
        """Both are read through ``files``."""
        self._files = files
        self._size = min(read.WINDOW_BYTES, _PAIR_BYTES)
        self._buffers = np.empty((2, self._size), np.uint8)

    def of(self, check: Check) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The bytes of both copies in order; each pair is overwritten by the next."""
        strides = contiguous_strides(check.first.shape)
        sides = [
            sorted(rectangles(view, strides, 0), key=lambda copy: copy.target)
            for view in (check.first, check.other)
        ]
        for at in range(0, check.first.nbytes, self._size):
            size = min(self._size, check.first.nbytes - at)
            first, other = self._buffers[:, :size]
            for copies, window in zip(sides, (first, other), strict=True):
                read.fill_window(self._files, copies, window, at)
            yield first, other


def _equal(first: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays of bytes are the same, compared eight at a time."""
    whole = len(first) // 8 * 8
    wide = (first[:whole].view(np.uint64), other[:whole].view(np.uint64))
    return np.array_equal(*wide) and np.array_equal(first[whole:], other[whole:])
