"""Rectangles of bytes: how the elements of a view in a file come to their place in a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.tensors import View


class Copy(NamedTuple):
    """A rectangle of bytes from a file to a target tensor.

    ``rows`` times ``width`` bytes, rows ``source_pitch`` bytes apart in the file and
    ``target_pitch`` bytes apart in the target. A ``transposed`` rectangle has elements of
    ``item`` bytes: element (i, j) of the target lies at ``i`` times ``item`` plus ``j``
    times ``source_pitch``; ``width`` still counts bytes of a target row.
    """

    file: str
    source: int
    source_pitch: int
    target: int
    target_pitch: int
    rows: int
    width: int
    item: int
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that the rectangle moves."""
        return self.rows * self.width


def rectangles(view: View, strides: tuple[int, ...], target: int) -> Iterator[Copy]:
    """The rectangles that move a view to byte ``target``, with target ``strides`` in elements."""
    item = view.dtype.itemsize
    dims = [
        (length, source * item, to * item)
        for length, source, to in zip(view.shape, view.strides, strides, strict=True)
        if length != 1
    ]
    if any(length == 0 for length, _, _ in dims):
        return
    dims.sort(key=lambda dim: -dim[2])
    dims = _merge(dims)
    if not dims or dims[-1][2] != item:
        dims.append((1, item, item))
    width, source_step, _ = dims.pop()
    if source_step == item:
        rows, source_pitch, target_pitch = dims.pop() if dims else (1, width * item, width * item)
        shape = _Rectangle(source_pitch, target_pitch, rows, width * item, item, transposed=False)
    else:
        shape = _transposed(dims, width, source_step, item)
    for source_offset, target_offset in _corners(dims):
        yield Copy(
            view.file,
            view.offset + source_offset,
            shape.source_pitch,
            target + target_offset,
            shape.target_pitch,
            shape.rows,
            shape.width,
            item,
            shape.transposed,
        )


@dataclass(frozen=True)
class _Rectangle:
    source_pitch: int
    target_pitch: int
    rows: int
    width: int
    item: int
    transposed: bool


def _transposed(
    dims: list[tuple[int, int, int]], width: int, source_step: int, item: int
) -> _Rectangle:
    """Target rows run along the file's columns: take the dimension that is dense in the file."""
    for index, (rows, source_pitch, target_pitch) in enumerate(dims):
        if source_pitch == item:
            del dims[index]
            return _Rectangle(source_step, target_pitch, rows, width * item, item, transposed=True)
    dims.append((width, source_step, item))
    return _Rectangle(item, item, 1, item, item, transposed=False)


def _merge(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join neighbouring dimensions that run on without a gap on both sides."""
    merged: list[tuple[int, int, int]] = []
    for length, source, to in dims:
        if merged:
            outer, outer_source, outer_to = merged[-1]
            if outer_source == length * source and outer_to == length * to:
                merged[-1] = (outer * length, source, to)
                continue
        merged.append((length, source, to))
    return merged


def _corners(dims: list[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    if not dims:
        yield (0, 0)
        return
    (length, source, to), *rest = dims
    for index in range(length):
        for source_offset, target_offset in _corners(rest):
            yield (index * source + source_offset, index * to + target_offset)
