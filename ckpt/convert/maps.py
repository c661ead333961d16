"""The few steps that are not copies, each on one bounded buffer.

A step works on a flat buffer of elements. ``Cast`` and ``AddOne`` have no exact inverse:
rounding loses bits. ``Combined`` has none at all: what each rank held is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.tensors import Combine, DType

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Cast:
    """Round to another floating type; ties to even, as torch does."""

    to: DType


@dataclass(frozen=True)
class AddOne:
    """Add 1 (or -1) to gains that are stored as distance from 1; the sum is in float32.

    The result is float32 for 16-bit input too: 1 + w needs more bits than w has.
    """

    amount: int = 1


@dataclass(frozen=True)
class Combined:
    """The mean or the sum of ``count`` ranks' copies, rounded once to their own type.

    Reckoned in float64, in which the mean of equal copies is exactly that copy.
    """

    how: Combine
    count: int


Step = Cast | AddOne | Combined


@dataclass
class CastReport:
    """What a conversion's casts did to values, by tensor."""

    overflowed: dict[str, int] = field(default_factory=dict)
    underflowed: dict[str, int] = field(default_factory=dict)


def result_dtype(dtype: DType, steps: tuple[Step, ...]) -> DType:
    """The element type after the steps."""
    for step in steps:
        if isinstance(step, Combined):
            continue
        dtype = step.to if isinstance(step, Cast) else DType.F32
    return dtype


def apply_steps(
    buffer: np.ndarray, dtype: DType, steps: tuple[Step, ...], *, name: str, report: CastReport
) -> np.ndarray:
    """The bytes of ``buffer`` (elements of ``dtype``) after the steps, as another buffer.

    Under ``Combined`` the buffer has one row for each rank's copy.
    """
    import torch  # noqa: PLC0415 - a conversion of plain copies never loads it

    values = torch.from_numpy(buffer).view(getattr(torch, dtype.torch_name))
    for step in steps:
        if isinstance(step, AddOne):
            values = values.float() + step.amount
            continue
        if isinstance(step, Combined):
            total = values.double().sum(0)
            share = step.count if step.how is Combine.MEAN else 1
            values = (total / share).to(values.dtype)
            _count(report.overflowed, name, int((torch.isinf(values) & ~torch.isinf(total)).sum()))
            continue
        cast = values.to(getattr(torch, step.to.torch_name))
        lost = torch.isinf(cast) & ~torch.isinf(values)
        _count(report.overflowed, name, int(lost.sum()))
        _count(report.underflowed, name, int(((cast == 0) & (values != 0)).sum()))
        values = cast
    result: np.ndarray = values.contiguous().view(torch.uint8).numpy()
    return result


def _count(counts: dict[str, int], name: str, amount: int) -> None:
    if amount:
        counts[name] = counts.get(name, 0) + amount
