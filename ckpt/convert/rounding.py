"""From one floating type to another on arrays of bits, with NumPy alone.

Rounds to nearest, ties to even; float64 becomes 16 bits by way of float32. Both are what torch
does, and the tests compare every bit with it. A NaN stays a NaN with its sign and the leading
bits of its payload; torch's own bits of a NaN differ with the length of the tensor.

Arrays here are pieces of at most ``PIECE`` elements: small enough that several passes over them
stay in the processor's cache. Each pass is a plain ufunc, which releases the interpreter's lock.
"""

from __future__ import annotations

from functools import lru_cache

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


def doubled_range(bits: np.ndarray, scratch: Scratch) -> tuple[int, int]:
    """The least and the greatest of the bits without their sign, times two.

    Without the sign, bit patterns are in the order of the values they stand for.
    """
    doubled = scratch.of("doubled", bits.dtype.str[1:], bits.size)
    np.add(bits, bits, out=doubled)
    return int(doubled.min()), int(doubled.max())


def count_of(bits: np.ndarray, magnitude: int, scratch: Scratch) -> int:
    """How many elements have these bits, whatever their sign."""
    doubled = scratch.of("doubled", bits.dtype.str[1:], bits.size)
    np.add(bits, bits, out=doubled)
    if magnitude:
        return int(np.count_nonzero(doubled == 2 * magnitude))
    return bits.size - int(np.count_nonzero(doubled))


def convert(
    bits: np.ndarray, source: DType, to: DType, out: np.ndarray, scratch: Scratch
) -> tuple[int, int]:
    """Fill ``out`` with the bits of the same values in ``to``: F32, BF16, F16 or ``source`` itself.

    Returns the range of the result, as :func:`doubled_range` does.
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
    return doubled_range(out, scratch)


def _from_wide(
    bits: np.ndarray, source: DType, to: DType, out: np.ndarray, scratch: Scratch
) -> tuple[int, int]:
    if source is DType.F64:
        single = out if to is DType.F32 else scratch.of("single", "u4", bits.size)
        np.copyto(single.view("f4"), bits.view("f8"), casting="same_kind")
        bits = single
    if to is DType.BF16:
        return _to_bf16(bits, out, scratch)
    if to is DType.F16:
        np.copyto(out.view("f2"), bits.view("f4"), casting="same_kind")
    elif to is not DType.F32:
        raise ValueError(f"no cast to {to.name}")
    return doubled_range(out, scratch)


def _to_bf16(bits: np.ndarray, out: np.ndarray, scratch: Scratch) -> tuple[int, int]:
    _round_to_bf16(bits, out, scratch)
    least, greatest = doubled_range(out, scratch)
    if least and greatest < 2 * INFINITY[DType.BF16]:
        return least, greatest
    nan = np.isnan(bits.view("f4"))
    if nan.any():
        out[nan] = (bits[nan] >> 16) | _QUIET_BF16
        return doubled_range(out, scratch)
    return least, greatest


def _round_to_bf16(bits: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    """Add just under half of what is cut off, and the last bit that is kept; then cut.

    A carry goes on into the exponent, up to infinity, which is as it should be. A NaN may have
    become infinity or zero: the caller mends it.
    """
    wide = scratch.of("wide", "u4", bits.size)
    np.right_shift(bits, 16, out=wide)
    np.bitwise_and(wide, 1, out=wide)
    np.add(wide, 0x7FFF, out=wide)
    np.add(wide, bits, out=wide)
    np.right_shift(wide, 16, out=wide)
    np.copyto(out, wide, casting="same_kind")


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
