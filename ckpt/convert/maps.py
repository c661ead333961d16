"""The few steps that are not copies (``ckpt.convert.steps``) at work, each on a bounded buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ckpt.convert.rounding import PIECE, Outcome, Scratch, all_finite, bits_kind, convert
from ckpt.convert.steps import AddOne, Combined, result_dtype
from ckpt.tensors import Combine, DType

if TYPE_CHECKING:
    from ckpt.convert.nonfinite import NonfiniteCount
    from ckpt.convert.steps import Step


@dataclass
class CastReport:
    """What a conversion's casts did to values, by tensor."""

    overflowed: dict[str, int] = field(default_factory=dict)
    underflowed: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, *, overflowed: int = 0, underflowed: int = 0) -> None:
        """Add to a tensor's counts; a tensor without losses does not appear."""
        for counts, amount in ((self.overflowed, overflowed), (self.underflowed, underflowed)):
            if amount:
                counts[name] = counts.get(name, 0) + amount


@dataclass
class Stepper:
    """The steps of one tensor, window by window.

    Losses of the casts go to ``report`` under the tensor's ``name``. Infinite and NaN values
    among the stored bytes are counted in ``found`` on the way: a piece whose result is finite
    was finite before, and only another one is looked at twice.
    """

    dtype: DType
    steps: tuple[Step, ...]
    name: str
    report: CastReport
    found: NonfiniteCount | None = None
    _scratch: Scratch = field(default_factory=Scratch, init=False, repr=False)

    def apply(self, buffer: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """The bytes of the next elements after the steps, in ``out`` or in another buffer.

        Under ``Combined`` the buffer has one row for each rank's copy. ``out`` are bytes of the
        right number, at any address.
        """
        stored, size = self.dtype.itemsize, result_dtype(self.dtype, self.steps).itemsize
        count = buffer.shape[-1] // stored
        out = np.empty(count * size, np.uint8) if out is None else out
        with np.errstate(all="ignore"):  # what overflows is counted
            for first in range(0, count, PIECE):
                end = min(first + PIECE, count)
                piece = buffer[..., first * stored : end * stored]
                self._apply_piece(piece, out[first * size : end * size])
        return out

    def _apply_piece(self, piece: np.ndarray, out: np.ndarray) -> None:
        rows = [_elements(row, self.dtype) for row in piece.reshape(-1, piece.shape[-1])]
        values, dtype, finite = rows[0], self.dtype, False
        for number, step in enumerate(self.steps):
            to = result_dtype(dtype, (step,))
            held = self._room(out, number, to, values.size)
            if isinstance(step, Combined):
                finite = self._combine(rows, step, held)
            elif isinstance(step, AddOne):
                finite = self._add(values, dtype, step.amount, held)
            else:
                finite = self._count(convert(values, dtype, to, held, self._scratch))
            values, dtype = held, to
        if not np.may_share_memory(values, out):
            np.copyto(out, values.view(np.uint8))
        if self.found is not None and finite:
            self.found.skip(piece.shape[-1])
        elif self.found is not None:
            self.found.add(piece)

    def _room(self, out: np.ndarray, number: int, dtype: DType, size: int) -> np.ndarray:
        """Where a step's result goes: the last one's to its place, if NumPy can work there."""
        if number == len(self.steps) - 1:
            place = out.view(bits_kind(dtype))
            if place.flags.aligned:
                return place
        return self._scratch.of(f"step {number}", bits_kind(dtype), size)

    def _count(self, outcome: Outcome) -> bool:
        over, under = outcome.overflowed, outcome.underflowed
        self.report.count(self.name, overflowed=over, underflowed=under)
        return outcome.finite

    def _add(self, values: np.ndarray, dtype: DType, amount: int, held: np.ndarray) -> bool:
        convert(values, dtype, DType.F32, held, self._scratch)
        np.add(held.view("f4"), amount, out=held.view("f4"))
        return all_finite(held, DType.F32, self._scratch)

    def _combine(self, rows: list[np.ndarray], step: Combined, held: np.ndarray) -> bool:
        scratch, dtype = self._scratch, self.dtype
        total = scratch.of("total", "f8", held.size)
        total[:] = 0
        for row in rows:
            copy = row
            if dtype is not DType.F64:
                copy = scratch.of("copy", "u4", held.size)
                convert(row, dtype, DType.F32, copy, scratch)
            np.add(total, copy.view(f"f{copy.itemsize}"), out=total)
        if step.how is Combine.MEAN:
            np.divide(total, step.count, out=total)
        outcome = convert(total.view("u8"), DType.F64, dtype, held, scratch)
        return self._count(outcome._replace(underflowed=0))


def _elements(content: np.ndarray, dtype: DType) -> np.ndarray:
    """Bytes as elements, copied where they lie at an address that NumPy would work around."""
    elements = content.view(bits_kind(dtype))
    return elements if elements.flags.aligned else elements.copy()
