"""Tensors put together of parts: boxes of elements, each with its place.

Integers only. A part is a view of a file and where it begins; parts that cover a shape
exactly once are a tensor, however they are cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

from ckpt.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt.tensors import Shard, View


@dataclass(frozen=True, slots=True)
class Placed:
    """A part of a whole tensor: the elements of ``view`` belong at ``start``."""

    view: View
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor as one rank holds it: its shape and the parts that cover it."""

    shape: tuple[int, ...]
    parts: tuple[Placed, ...]

    @classmethod
    def whole(cls, view: View) -> Held:
        """A tensor that lies in one piece."""
        return cls(view.shape, (Placed(view, (0,) * len(view.shape)),))

    def narrow(self, dim: int, start: int, length: int) -> Held:
        """``length`` entries of ``dim`` from ``start`` on."""
        parts = []
        for part in self.parts:
            at = part.start[dim]
            first, end = max(start, at), min(start + length, at + part.view.shape[dim])
            if first < end:
                view = part.view.narrow(dim, first - at, end - first)
                parts.append(Placed(view, _with(part.start, dim, first - start)))
        return Held(_with(self.shape, dim, length), tuple(parts))

    def moved(self, dim: int, distance: int) -> tuple[Placed, ...]:
        """The parts, ``distance`` entries of ``dim`` further on."""
        return tuple(
            replace(part, start=_with(part.start, dim, part.start[dim] + distance))
            for part in self.parts
        )


def stack_rows(pieces: Sequence[Held]) -> Held:
    """The pieces one after another along their first dimension."""
    parts: list[Placed] = []
    at = 0
    for piece in pieces:
        parts += piece.moved(0, at)
        at += piece.shape[0]
    return Held((at, *pieces[0].shape[1:]), tuple(parts))


def held_by_ranks(shards: Sequence[Shard]) -> list[Held]:
    """What each rank holds, in order of rank; a rank's shards with starts make one tensor.

    Raises PlanError for a rank whose shards leave a gap or overlap.
    """
    by_rank: dict[int, list[Shard]] = {}
    for shard in shards:
        by_rank.setdefault(shard.rank or 0, []).append(shard)
    held = []
    for _, own in sorted(by_rank.items()):
        if len(own) == 1 and own[0].start is None:
            held.append(Held.whole(own[0].view))
            continue
        parts = tuple(Placed(shard.view, shard.start or ()) for shard in own)
        ends = [[s + n for s, n in zip(p.start, p.view.shape, strict=False)] for p in parts]
        shape = tuple(max(sizes) for sizes in zip(*ends, strict=True))
        check_cover(shape, parts)
        held.append(Held(shape, parts))
    return held


def flat_boxes(
    shape: tuple[int, ...], first: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (start, size) that elements ``first`` to ``end`` of a C-ordered tensor make.

    In their order; at most three for a matrix: the rest of a row, whole rows, a row's begin.

    >>> list(flat_boxes((4, 5), 3, 17))
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    """
    if first >= end:
        return
    if len(shape) < 2:  # noqa: PLR2004 - a vector or a single number
        yield ((first,), (end - first,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    top, bottom = -(-first // row), end // row
    if top > bottom:  # inside one row
        yield from _inside(shape, first // row, first % row, end % row)
        return
    yield from _inside(shape, top - 1, first % row or row, row)
    if top < bottom:
        zeros = (0,) * (len(shape) - 1)
        yield ((top, *zeros), (bottom - top, *shape[1:]))
    yield from _inside(shape, bottom, 0, end % row)


def _inside(
    shape: tuple[int, ...], row: int, first: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for start, size in flat_boxes(shape[1:], first, end):
        yield ((row, *start), (1, *size))


def check_cover(shape: tuple[int, ...], parts: Sequence[Placed]) -> None:
    """Raise PlanError unless the parts cover ``shape`` exactly once."""
    if len(parts) == 1 and parts[0].view.shape == shape and not any(parts[0].start):
        return
    boxes = []
    for part in parts:
        ends = tuple(s + n for s, n in zip(part.start, part.view.shape, strict=False))
        if len(part.start) != len(shape) or any(e > n for e, n in zip(ends, shape, strict=True)):
            raise PlanError(
                "a stored part lies outside the tensor",
                file=part.view.file,
                expected=f"inside {list(shape)}",
                found=f"{list(part.view.shape)} at {list(part.start)}",
            )
        boxes.append((part.start, ends))
    covered = sum(prod(part.view.shape) for part in parts)
    if covered != prod(shape) or _any_overlap(boxes):
        raise PlanError(
            "its stored parts leave a gap or overlap",
            file=parts[0].view.file if parts else None,
            expected=f"{prod(shape)} elements of shape {list(shape)}, each once",
            found=f"{covered} elements in {len(parts)} parts",
        )


def _any_overlap(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    ordered = sorted(boxes)
    for index, (start, end) in enumerate(ordered):
        for other_start, other_end in islice(ordered, index + 1, None):
            if other_start and other_start[0] >= end[0]:
                break
            sides = zip(start, end, other_start, other_end, strict=True)
            if all(a < d and c < b for a, b, c, d in sides):
                return True
    return False


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
