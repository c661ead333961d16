"""NaN and infinity among stored weights, found by their bits while these pass through memory.

Of a floating type, the values that are no numbers are those with all bits of the exponent set:
seen as integers, the largest ones of either sign. Two maxima over the window find them, at
memory speed and without a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckpt.convert.rounding import INFINITY

if TYPE_CHECKING:
    from ckpt.tensors import DType

_PIECE = 2**17  # elements; the second maximum finds them in the processor's cache


def find_nonfinite(window: np.ndarray, dtype: DType) -> np.ndarray:
    """Places of NaN and infinite elements in the bytes of ``window``, counted in elements."""
    first = INFINITY.get(dtype)  # the least magnitude that is no number
    if first is None or not window.size:
        return np.empty(0, np.int64)
    size = dtype.itemsize
    bits = window.reshape(-1).view(f"u{size}")
    sign = 1 << (8 * size - 1)
    pieces = (bits[at : at + _PIECE] for at in range(0, bits.size, _PIECE))
    if all(p.view(f"i{size}").max() < first and p.max() < (first | sign) for p in pieces):
        return np.empty(0, np.int64)
    return np.flatnonzero((bits & bits.dtype.type(sign - 1)) >= first)


class NonfiniteCount:
    """Counts them for one tensor, window by window.

    ``first`` is where the first one lies: which rank's copy, where several are combined, and
    the byte of the tensor.
    """

    def __init__(self, dtype: DType) -> None:
        """None is found yet in elements of ``dtype``."""
        self._dtype = dtype
        self._done = 0
        self.count = 0
        self.first = (0, 0)

    def add(self, window: np.ndarray) -> None:
        """Look at the next window of stored bytes; it may have a row for each rank's copy."""
        places, width = find_nonfinite(window, self._dtype), window.shape[-1]
        if len(places) and not self.count:
            row, byte = divmod(int(places[0]) * self._dtype.itemsize, width)
            self.first = (row, self._done + byte)
        self.count += len(places)
        self._done += width

    def skip(self, width: int) -> None:
        """Go on over bytes that are known to hold numbers."""
        self._done += width
