"""Layout rules: which box of a shard belongs where in the tensors that are written.

Everything here is integers. A rule has two halves. :func:`place` lays the shards of the
ranks end to end along one dimension, which gives the whole training tensor; that is also
the order in which ``torch_dist`` stores it. :func:`cut` takes the whole apart along its
first dimension into the tensors of the Hugging Face model. Both are permutations of rows,
so they can be read in either direction.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING

from ckpt.errors import PlanError
from ckpt.parts import Placed, check_cover, held_by_ranks
from ckpt.rectangles import rectangles
from ckpt.tensors import contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt.parts import Held
    from ckpt.rectangles import Copy
    from ckpt.tensors import Shard


class Cut(Enum):
    """How the rows of a whole training tensor make the rows of Hugging Face tensors."""

    WHOLE = "whole"  # one tensor, rows as they are
    VOCABULARY = "vocabulary"  # one tensor, padding rows at the end left out
    GROUPED_QKV = "grouped qkv"  # per group: its queries, one key, one value -> q, k, v
    FLAT_QKV = "flat qkv"  # the same rows -> one tensor [all q; all k; all v]
    GATE_UP = "gate, up"  # first half, second half
    BLOCKS = "blocks"  # one tensor for each of the blocks that the layout names
    INTERLEAVED_GATE_UP = "gate and up in turns"  # one tensor: gate 0, up 0, gate 1, ...
    GATED_QKV = "grouped qkv with gates"  # a group's queries, gates, key, value -> [q; gate], k, v
    DELTA = "delta net"  # [q; k; v; z; b; a] -> per key head [q; k; v; z] and [b; a]


@dataclass(frozen=True)
class Layout:
    """How ranks hold a tensor, and how the whole one is cut.

    ``dim`` is the sharded dimension, None for a tensor that every rank holds. ``parts``
    is how many equal blocks a rank's shard has along ``dim``; the whole tensor holds
    block 0 of all ranks, then block 1 of all ranks. With ``rows`` (the name of a size in
    the training arguments) a shard that already has so many rows is whole on every rank.
    ``blocks`` names the sizes of unequal blocks of the whole tensor; a rank holds its share of
    each, one after another. ``total`` names the number of rows that the whole tensor must have.
    """

    dim: int | None = None
    parts: int = 1
    cut: Cut = Cut.WHOLE
    rows: str | None = None
    transposed: bool = False
    blocks: tuple[str, ...] = ()
    total: str | None = None


REPLICATED = Layout()
COLUMN = Layout(dim=0)
ROW = Layout(dim=1)
VOCABULARY = Layout(dim=0, cut=Cut.VOCABULARY)
QKV = Layout(dim=0, cut=Cut.GROUPED_QKV)
GATE_UP = Layout(dim=0, parts=2, cut=Cut.GATE_UP)


@dataclass(frozen=True)
class Sizes:
    """The integers that a cut needs."""

    heads: int
    groups: int
    head_dim: int
    vocab_size: int
    blocks: tuple[int, ...] = ()
    delta_heads: tuple[int, int] = (0, 0)  # key and value heads of a gated delta net
    delta_dims: tuple[int, int] = (0, 0)  # their widths


@dataclass(frozen=True)
class Whole:
    """A whole training tensor: its shape, the parts that cover it, and further ranks' copies."""

    shape: tuple[int, ...]
    parts: tuple[Placed, ...]
    replicas: tuple[tuple[Placed, ...], ...] = ()


@dataclass(frozen=True)
class Segment:
    """``length`` rows from row ``source`` of the whole to row ``target`` of a target."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class CutTarget:
    """One tensor that a cut gives: its number of rows and where each comes from."""

    rows: int
    segments: tuple[Segment, ...]


def place(
    shards: Sequence[Shard],
    layout: Layout,
    shape: tuple[int, ...] | None,
    rows: int,
    blocks: Sequence[int] = (),
) -> Whole:
    """The whole tensor that the shards make.

    ``shape`` is given where the format stores it; then every shard knows its start and
    the shards must cover the shape exactly once. ``rows`` is the number that
    ``layout.rows`` names (else 0), ``blocks`` those that ``layout.blocks`` names. Raises
    PlanError for shards that do not fit together.
    """
    if shape is not None:
        parts = tuple(Placed(shard.view, shard.start or ()) for shard in shards)
        check_cover(shape, parts)
        return Whole(shape, parts)
    held = held_by_ranks(shards)
    first = held[0]
    whole_on_every_rank = layout.dim is None or (layout.rows and first.shape[0] == rows)
    if whole_on_every_rank:
        _check_same_shape(held)
        return Whole(first.shape, first.parts, tuple(other.parts for other in held[1:]))
    return _concatenate(held, layout, blocks)


def _concatenate(held: Sequence[Held], layout: Layout, blocks: Sequence[int]) -> Whole:
    dim = layout.dim if layout.dim is not None else 0
    first = held[0].shape
    for one in held:
        shape, file = one.shape, one.parts[0].view.file
        if len(shape) <= dim or shape[dim] % layout.parts:
            raise PlanError(
                f"cannot be split into {layout.parts} parts along dimension {dim}",
                file=file,
                found=f"shape {list(shape)}",
            )
        others, expected = (*shape[:dim], *shape[dim + 1 :]), (*first[:dim], *first[dim + 1 :])
        if others != expected:
            raise PlanError(
                "ranks hold shards that do not fit together",
                file=file,
                expected=f"{list(expected)} beside dimension {dim}",
                found=f"{list(others)}",
            )
    shares = [_shares(one, layout, blocks, len(held)) for one in held]
    placed: list[Placed] = []
    at = 0
    for part in range(len(shares[0])):
        for one, own in zip(held, shares, strict=True):
            start, length = own[part]
            placed += one.narrow(dim, start, length).moved(dim, at)
            at += length
    return Whole((*first[:dim], at, *first[dim + 1 :]), tuple(placed))


def _shares(one: Held, layout: Layout, blocks: Sequence[int], ranks: int) -> list[tuple[int, int]]:
    """(start, length) along the sharded dimension of each block within one rank's shard."""
    held = one.shape[layout.dim if layout.dim is not None else 0]
    if not blocks:
        length = held // layout.parts
        return [(part * length, length) for part in range(layout.parts)]
    if any(block % ranks for block in blocks) or sum(blocks) != held * ranks:
        raise PlanError(
            f"cannot be split into the blocks {' + '.join(layout.blocks)}",
            file=one.parts[0].view.file,
            expected=f"{' + '.join(map(str, blocks))} rows over {ranks} rank(s)",
            found=f"{held} rows on each",
        )
    shares, start = [], 0
    for block in blocks:
        shares.append((start, block // ranks))
        start += block // ranks
    return shares


def _check_same_shape(held: Sequence[Held]) -> None:
    for other in held[1:]:
        if other.shape != held[0].shape:
            raise PlanError(
                "ranks hold copies of different shapes",
                file=other.parts[0].view.file,
                expected=list(held[0].shape),
                found=list(other.shape),
            )


def cut(rows: int, kind: Cut, sizes: Sizes) -> tuple[CutTarget, ...]:
    """The targets that ``rows`` rows of a whole tensor give.

    Grouped QKV as in megatron/core/transformer/attention.py: for each of ``groups`` query
    groups ``heads / groups`` query heads, one key head, one value head of ``head_dim`` rows.
    Raises PlanError when the number of rows does not fit the sizes.
    """
    match kind:
        case Cut.WHOLE:
            return (CutTarget(rows, (Segment(0, 0, rows),)),)
        case Cut.VOCABULARY:
            _expect(rows >= sizes.vocab_size, f"at least {sizes.vocab_size} rows", rows)
            return (CutTarget(sizes.vocab_size, (Segment(0, 0, sizes.vocab_size),)),)
        case Cut.BLOCKS:
            _expect(rows == sum(sizes.blocks), f"{sum(sizes.blocks)} rows", rows)
            starts = [sum(sizes.blocks[:number]) for number in range(len(sizes.blocks))]
            return tuple(
                CutTarget(block, (Segment(start, 0, block),))
                for start, block in zip(starts, sizes.blocks, strict=True)
            )
        case Cut.GATE_UP | Cut.INTERLEAVED_GATE_UP:
            _expect(rows % 2 == 0, "an even number of rows", rows)
            return _cut_gate_up(rows // 2, interleaved=kind is Cut.INTERLEAVED_GATE_UP)
        case Cut.GROUPED_QKV | Cut.FLAT_QKV:
            needed = (sizes.heads + 2 * sizes.groups) * sizes.head_dim
            _expect(rows == needed, f"{needed} rows of queries, keys and values", rows)
            parts = _cut_qkv(sizes)
            return parts if kind is Cut.GROUPED_QKV else (_stack(*parts),)
        case Cut.GATED_QKV | Cut.DELTA:
            return _cut_gated(rows, kind, sizes)


def _expect(holds: bool, expected: str, rows: int) -> None:  # noqa: FBT001 - an assertion
    if not holds:
        raise PlanError("the number of rows does not fit", expected=expected, found=f"{rows} rows")


def _cut_gate_up(half: int, *, interleaved: bool) -> tuple[CutTarget, ...]:
    if not interleaved:
        starts = (0, half)
        return tuple(CutTarget(half, (Segment(start, 0, half),)) for start in starts)
    segments = [Segment(side * half + i, 2 * i + side, 1) for i in range(half) for side in (0, 1)]
    return (CutTarget(2 * half, tuple(segments)),)


def _cut_qkv(sizes: Sizes) -> tuple[CutTarget, CutTarget, CutTarget]:
    head, per_group = sizes.head_dim, sizes.heads // sizes.groups
    step = (per_group + 2) * head
    wide = per_group * head
    query = [Segment(g * step, g * wide, wide) for g in range(sizes.groups)]
    key = [Segment(g * step + wide, g * head, head) for g in range(sizes.groups)]
    value = [Segment(g * step + wide + head, g * head, head) for g in range(sizes.groups)]
    return (
        CutTarget(sizes.heads * head, tuple(query)),
        CutTarget(sizes.groups * head, tuple(key)),
        CutTarget(sizes.groups * head, tuple(value)),
    )


def _cut_gated(rows: int, kind: Cut, sizes: Sizes) -> tuple[CutTarget, ...]:
    if kind is Cut.GATED_QKV:
        needed = 2 * (sizes.heads + sizes.groups) * sizes.head_dim
        _expect(rows == needed, f"{needed} rows of queries, gates, keys and values", rows)
        return _cut_gated_qkv(sizes)
    (keys, values), (key_dim, value_dim) = sizes.delta_heads, sizes.delta_dims
    needed = 2 * (keys * key_dim + values * value_dim + values)
    _expect(rows == needed, f"{needed} rows of q, k, v, z, b, a", rows)
    ratio = values // keys
    wide = (key_dim, key_dim, ratio * value_dim, ratio * value_dim)
    return (_by_head(0, keys, wide), _by_head(keys * sum(wide), keys, (ratio, ratio)))


def _cut_gated_qkv(sizes: Sizes) -> tuple[CutTarget, CutTarget, CutTarget]:
    """Of each group all queries, all gates, key, value; Hugging Face has a gate behind each query.

    megatron/core/transformer/attention.py, ``get_query_key_value_tensors``.
    """
    head, per_group = sizes.head_dim, sizes.heads // sizes.groups
    wide = per_group * head
    step = 2 * (wide + head)
    query = [
        Segment(g * step + part * wide + i * head, ((g * per_group + i) * 2 + part) * head, head)
        for g in range(sizes.groups)
        for i in range(per_group)
        for part in (0, 1)
    ]
    sides = [
        tuple(Segment(g * step + 2 * wide + at, g * head, head) for g in range(sizes.groups))
        for at in (0, head)
    ]
    key, value = (CutTarget(sizes.groups * head, side) for side in sides)
    return (CutTarget(2 * sizes.heads * head, tuple(query)), key, value)


def _by_head(start: int, heads: int, widths: tuple[int, ...]) -> CutTarget:
    """Blocks from row ``start`` on, each of ``heads`` pieces: all pieces of one head together."""
    segments, source = [], start
    for index, width in enumerate(widths):
        before = sum(widths[:index])
        segments += [
            Segment(source + head * width, head * sum(widths) + before, width)
            for head in range(heads)
        ]
        source += heads * width
    return CutTarget(heads * sum(widths), tuple(segments))


def _stack(*targets: CutTarget) -> CutTarget:
    segments, at = [], 0
    for target in targets:
        segments += [Segment(s.source, s.target + at, s.length) for s in target.segments]
        at += target.rows
    return CutTarget(at, tuple(segments))


def copies_for(whole: Whole, target: CutTarget, *, transposed: bool, base: int) -> Iterator[Copy]:
    """The rectangles that fill one target of a cut.

    ``base`` is the byte of the target file's tensor where this piece begins (not 0 for an
    entry of a stacked tensor). A ``transposed`` target has its two dimensions swapped.
    """
    shape = (target.rows, *whole.shape[1:])
    strides = contiguous_strides(shape)
    if transposed:
        strides = (1, shape[0])
    parts = sorted(whole.parts, key=lambda part: part.start)
    starts = [part.start[0] for part in parts]
    # The last row of all parts up to each one; parts before the first that reaches a segment
    # end above it.
    reach = list(accumulate((part.start[0] + part.view.shape[0] for part in parts), max))
    for segment in target.segments:
        last = bisect_left(starts, segment.source + segment.length)
        for part in parts[bisect_right(reach, segment.source) : last]:
            first = max(segment.source, part.start[0])
            end = min(segment.source + segment.length, part.start[0] + part.view.shape[0])
            if first >= end:
                continue
            view = part.view.narrow(0, first - part.start[0], end - first)
            start = (segment.target + first - segment.source, *part.start[1:])
            offset = sum(a * s for a, s in zip(start, strides, strict=True))
            yield from rectangles(view, strides, base + offset * view.dtype.itemsize)
