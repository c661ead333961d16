"""Plain values that describe tensors without holding them.

A :class:`View` says where the elements of a tensor lie in a file, as NumPy's strides do
in memory. A :class:`Shard` is a view with its place in a larger tensor: either a rank
(the layout rule of the tensor then says where it belongs) or a known offset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from math import prod


class DType(Enum):
    """An element type under its safetensors name; the value is (torch name, bytes)."""

    F64 = ("float64", 8)
    F32 = ("float32", 4)
    F16 = ("float16", 2)
    BF16 = ("bfloat16", 2)
    F8_E4M3 = ("float8_e4m3fn", 1)
    F8_E5M2 = ("float8_e5m2", 1)
    I64 = ("int64", 8)
    I32 = ("int32", 4)
    I16 = ("int16", 2)
    I8 = ("int8", 1)
    U8 = ("uint8", 1)
    BOOL = ("bool", 1)

    def __setstate__(self, state: object) -> None:
        """Refuse: a pickle that names a type must not change it."""
        raise TypeError(f"an element type has no state, found {state!r:.40}")

    def __init__(self, torch_name: str, itemsize: int) -> None:
        """``torch_name`` is what torch and transformers say, ``itemsize`` counts bytes."""
        self.torch_name, self.itemsize = torch_name, itemsize

    @property
    def is_float(self) -> bool:
        """Whether a cast to another floating type makes sense."""
        return "float" in self.value[0]

    @classmethod
    def from_torch_name(cls, name: str) -> DType | None:
        """The type called ``name`` by torch (``float32``), or None for one that is not listed."""
        return next((item for item in cls if item.value[0] == name), None)


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a file seen as a tensor.

    ``offset`` counts bytes from the file's start; ``strides`` count elements.
    """

    file: str
    offset: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def contiguous(cls, file: str, offset: int, dtype: DType, shape: tuple[int, ...]) -> View:
        """A view of elements that lie in C order without gaps."""
        return cls(file, offset, dtype, shape, contiguous_strides(shape))

    def narrow(self, dim: int, start: int, length: int) -> View:
        """``length`` entries of ``dim`` from ``start`` on."""
        offset = self.offset + start * self.strides[dim] * self.dtype.itemsize
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return View(self.file, offset, self.dtype, shape, self.strides)

    def box(self, start: tuple[int, ...], size: tuple[int, ...]) -> View:
        """The sub-tensor of ``size`` that begins at ``start``."""
        view = self
        for dim, (first, length) in enumerate(zip(start, size, strict=True)):
            view = view.narrow(dim, first, length)
        return view

    def select(self, dim: int, index: int) -> View:
        """Entry ``index`` of ``dim``; that dimension goes away."""
        shape, strides = self.shape, self.strides
        return View(
            self.file,
            self.offset + index * strides[dim] * self.dtype.itemsize,
            self.dtype,
            (*shape[:dim], *shape[dim + 1 :]),
            (*strides[:dim], *strides[dim + 1 :]),
        )

    def transpose(self) -> View:
        """The last two dimensions swapped."""
        shape, strides = self.shape, self.strides
        return replace(
            self,
            shape=(*shape[:-2], shape[-1], shape[-2]),
            strides=(*strides[:-2], strides[-1], strides[-2]),
        )

    def reshape(self, shape: tuple[int, ...]) -> View:
        """The same elements under another shape; the view must be contiguous."""
        return replace(self, shape=shape, strides=contiguous_strides(shape))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        step = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != step:
                return False
            step *= length
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without any gaps between them."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a tensor: at ``start`` of the whole, or held by rank ``rank``.

    Where a rank's tensor lies in several parts, both are set, and ``start`` is that of the
    rank's own tensor. Ranks are tensor-parallel ranks, or expert-tensor-parallel ranks for
    the weights of routed experts.
    """

    view: View
    start: tuple[int, ...] | None = None
    rank: int | None = None


class Combine(Enum):
    """How the copies make one tensor that several ranks hold whole."""

    EQUAL = "equal"
    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a training checkpoint under its Megatron-Core name, global numbering.

    ``shape`` is that of the whole tensor where the format stores it, else None: then the
    layout rule of the tensor derives it from the shards, which are in order of rank.
    ``copies`` are further stored copies of the whole, such as the tied embedding that the
    last pipeline stage keeps; they must equal the tensor byte for byte. ``copy_names`` are
    the names under which they are stored. ``combine`` says what a tensor is that every rank
    holds whole: one of the ranks' copies, which must be equal; their mean, where training
    lets them drift apart; or their sum, where each rank adds its own.
    """

    name: str
    dtype: DType
    shards: tuple[Shard, ...]
    shape: tuple[int, ...] | None = None
    copies: tuple[tuple[Shard, ...], ...] = ()
    copy_names: tuple[str, ...] = ()
    combine: Combine = Combine.EQUAL


@lru_cache(2**16)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a C-ordered tensor of ``shape``.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)
