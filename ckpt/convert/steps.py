"""The few steps of a plan that are not copies, as values; ``ckpt.convert.maps`` carries them out.

A step works on a flat buffer of elements. ``Cast`` and ``AddOne`` have no exact inverse:
rounding loses bits. ``Combined`` has none at all: what each rank held is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.tensors import Combine, DType


@dataclass(frozen=True)
class Cast:
    """Round to float32, bfloat16 or float16; ties to even, as torch does."""

    to: DType


@dataclass(frozen=True)
class AddOne:
    """Add 1 (or -1) to gains that are stored as distance from 1; the sum is in float32.

    The result is float32 for 16-bit input too: 1 + w needs more bits than w has.
    """

    amount: int = 1


@dataclass(frozen=True)
class Combined:
    """The mean or the sum of ``count`` ranks' copies, rounded to their own type at the end.

    Reckoned in float64 in the order of the ranks; the mean of equal copies is exactly that copy.
    """

    how: Combine
    count: int


Step = Cast | AddOne | Combined


def result_dtype(dtype: DType, steps: tuple[Step, ...]) -> DType:
    """The element type after the steps."""
    for step in steps:
        if isinstance(step, Combined):
            continue
        dtype = step.to if isinstance(step, Cast) else DType.F32
    return dtype
