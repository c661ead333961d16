"""From one floating type to another on arrays of bits, with NumPy alone.

Rounds to nearest, ties to even; float64 becomes 16 bits by way of float32. Both are what torch
does, and the tests compare every bit with it. A NaN stays a NaN with its sign and the leading
bits of its payload; torch's own bits of a NaN differ with the length of the tensor.

Arrays here are pieces of at most ``PIECE`` elements: small enough that several passes over them
stay in the processor's cache. Each pass is a plain ufunc, which releases the interpreter's lock.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ckpt.tensors import DType

PIECE = 2**16
# Bits of positive infinity. E4M3FN has none: its one NaN stands there.
INFINITY = {
    DType.F64: 0x7FF0000000000000,
    DType.F32: 0x7F800000,
    DType.BF16: 0x7F80,
    DType.F16: 0x7C00,
    DType.F8_E4M3: 0x7F,
    DType.F8_E5M2: 0x7C,
}
_QUIET_BF16 = 0x40


class Scratch:
    """Memory for one piece's intermediate results, by name; used again for the next piece."""

    def __init__(self) -> None:
        """Nothing is held yet."""
        self._held: dict[str, np.ndarray] = {}

    def of(self, name: str, kind: str, size: int) -> np.ndarray:
        """An array of ``size`` elements of the NumPy type ``kind``; what it holds is undefined."""
        held = self._held.get(name + kind)
        if held is None or held.size < size:
            held = self._held[name + kind] = np.empty(size, kind)
        return held[:size]


def bits_kind(dtype: DType) -> str:
    """NumPy's unsigned integers of the same size."""
    return f"u{dtype.itemsize}"


class Outcome(NamedTuple):
    """What became of a piece: values that are infinite or zero now and were not before.

    ``finite`` says that the result holds numbers alone, and so did what it was made of.
    """

    overflowed: int
    underflowed: int
    finite: bool


def all_finite(bits: np.ndarray, dtype: DType, scratch: Scratch) -> bool:
    """Whether none is infinite or NaN."""
    return bool(_doubled(bits, scratch).max() < 2 * INFINITY[dtype])


def convert(
    bits: np.ndarray, source: DType, to: DType, out: np.ndarray, scratch: Scratch
) -> Outcome:
    """Fill ``out`` with the bits of the same values in ``to``.

    That is F32, BF16, F16 or ``source`` itself; raises ValueError for another.
    """
    if source is to:
        np.copyto(out, bits)
    elif source is DType.BF16 and to is DType.F32:
        np.copyto(out, bits)
        np.left_shift(out, 16, out=out)
    elif source.itemsize <= 2:  # noqa: PLR2004 - a table of every value fits the cache
        places = scratch.of("places", "i8", bits.size)
        np.copyto(places, bits)
        np.take(_table(source, to), places, out=out, mode="clip")
    else:
        return _from_wide(bits, source, to, out, scratch)
    return _compare(bits, source, to, out, scratch)


def _from_wide(
    bits: np.ndarray, source: DType, to: DType, out: np.ndarray, scratch: Scratch
) -> Outcome:
    single = bits
    if source is DType.F64:
        single = out if to is DType.F32 else scratch.of("single", "u4", bits.size)
        np.copyto(single.view("f4"), bits.view("f8"), casting="same_kind")
    if to is DType.BF16:
        _round_to_bf16(single, out, scratch)
    elif to is DType.F16:
        np.copyto(out.view("f2"), single.view("f4"), casting="same_kind")
    elif to is not DType.F32:
        raise ValueError(f"no cast to {to.name}")
    found = _compare(bits, source, to, out, scratch)
    # A NaN that became a number became zero, and was counted as such.
    suspect = to is DType.BF16 and (found.underflowed or not found.finite)
    if suspect and _mend_nan(single, out):
        return _compare(bits, source, to, out, scratch)
    return found


def _compare(
    bits: np.ndarray, source: DType, to: DType, out: np.ndarray, scratch: Scratch
) -> Outcome:
    """Count what was lost; a look at the least and the greatest shows that mostly nothing was.

    Without the sign, bit patterns are in the order of the values they stand for.
    """
    doubled, infinity, over, under = _doubled(out, scratch), 2 * INFINITY[to], 0, 0
    finite = bool(doubled.max() < infinity)
    if not finite:
        over = int(np.count_nonzero(doubled == infinity))
    if not doubled.min():
        under = doubled.size - int(np.count_nonzero(doubled))
    if over and source is not DType.F8_E4M3:
        over -= int(np.count_nonzero(_doubled(bits, scratch) == 2 * INFINITY[source]))
    if under:
        under -= bits.size - int(np.count_nonzero(_doubled(bits, scratch)))
    return Outcome(over, under, finite)


def _doubled(bits: np.ndarray, scratch: Scratch) -> np.ndarray:
    """The bits without their sign, times two."""
    doubled = scratch.of("doubled", bits.dtype.str[1:], bits.size)
    np.add(bits, bits, out=doubled)
    return doubled


def _round_to_bf16(bits: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    """Add just under half of what is cut off, and the last bit that is kept; then cut.

    A carry goes on into the exponent, up to infinity, which is as it should be. It may also
    make a NaN infinite or zero: the caller mends that.
    """
    wide = scratch.of("wide", "u4", bits.size)
    np.right_shift(bits, 16, out=wide)
    np.bitwise_and(wide, 1, out=wide)
    np.add(wide, 0x7FFF, out=wide)
    np.add(wide, bits, out=wide)
    np.right_shift(wide, 16, out=wide)
    np.copyto(out, wide, casting="same_kind")


def _mend_nan(single: np.ndarray, out: np.ndarray) -> bool:
    nan = np.isnan(single.view("f4"))
    out[nan] = (single[nan] >> 16) | _QUIET_BF16
    return bool(nan.any())


@lru_cache
def _table(source: DType, to: DType) -> np.ndarray:
    """The bits in ``to`` of every value of a type of 8 or 16 bits."""
    bits = np.arange(2 ** (8 * source.itemsize)).astype(bits_kind(source))
    out = np.empty(bits.size, bits_kind(to))
    with np.errstate(all="ignore"):
        convert(_as_float32(bits, source).view("u4"), DType.F32, to, out, Scratch())
    return out


def _as_float32(bits: np.ndarray, source: DType) -> np.ndarray:
    """Values of 8 or 16 bits; those of 8 are told as values of float16 with the same fields."""
    wide = bits.astype("u2")
    if source is DType.BF16:
        values = (bits.astype("u4") << 16).view("f4")
    elif source is DType.F16:
        values = wide.view("f2").astype("f4")
    elif source is DType.F8_E5M2:
        values = (wide << 8).view("f2").astype("f4")
    else:  # F8_E4M3: one bit of exponent less, and a bias of 7 instead of 15
        half = (wide & 0x80) << 8 | (wide & 0x7F) << 7
        values = half.view("f2").astype("f4") * np.float32(2**8)
        values[(bits & 0x7F) == INFINITY[source]] = np.nan
        values = np.copysign(values, half.view("f2"))
    return values
