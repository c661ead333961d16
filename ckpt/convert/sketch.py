"""What tensors of one kind become, planned once: only names, files and offsets differ.

A model of experts has tens of thousands of tensors, but only as many kinds as a table has rows
times the ways in which ranks cut them. Of each kind the first is planned on paper: its shards are
files called 0, 1, 2, ... that begin with their first element. The others are that plan with their
own files and offsets in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ckpt.convert.steps import AddOne, Cast, Combined, Step, result_dtype
from ckpt.errors import CkptError, PlanError
from ckpt.layout import Cut, CutTarget, Sizes, Whole, copies_for, cut, place
from ckpt.rectangles import Copy
from ckpt.tensors import Combine, Shard, View

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from ckpt.arch.table import Architecture, Rule
    from ckpt.convert.match import Match
    from ckpt.layout import Layout
    from ckpt.parts import Placed
    from ckpt.tensors import DType, SourceTensor
    from ckpt.training import TrainingArgs

    Copies = tuple[Copy, ...]
    Places = dict[str, tuple[str, int]]  # a file and an offset for each file on paper


class Part(NamedTuple):
    """One tensor to write: the pattern of its name, and all that tensors of a kind share.

    ``layer`` is set for the copy that a layer for a further token keeps. A ``stacked`` part is
    one expert's entry of a tensor that holds all experts.
    """

    pattern: str
    layer: int | None
    stacked: bool
    shape: tuple[int, ...]
    stored: DType
    steps: tuple[Step, ...]
    copies: Copies
    further: tuple[Copies, ...]


class Pair(NamedTuple):
    """Two views that must be equal, or close if they ``may_drift``.

    ``copy`` counts the tensor's further stored copies, of which the second is one, or is None.
    """

    first: View
    other: View
    copy: int | None
    may_drift: bool


@dataclass(frozen=True)
class Sketch:
    """What every tensor of a kind becomes; ``padding_rows`` only of an embedding."""

    elements: int
    padding_rows: int | None
    parts: tuple[Part, ...]
    pairs: tuple[Pair, ...]


def kind_of(match: Match) -> Hashable:
    """Equal for tensors that differ in nothing but their layer, their expert and their files."""
    tensor = match.tensor
    copies = tuple([_cuts(copy) for copy in tensor.copies]) if tensor.copies else ()
    kept = id(tensor.dtype), id(tensor.combine), tensor.shape
    return match.position, kept, _cuts(tensor.shards), copies


def _cuts(shards: Sequence[Shard]) -> Hashable:
    cuts = []
    for shard in shards:
        view = shard.view
        cuts.append((shard.rank, shard.start, view.shape, view.strides, id(view.dtype)))
    return tuple(cuts)


@lru_cache
def is_stacked(rule: Rule) -> bool:
    """Whether the row's tensors are entries of one tensor that holds all experts."""
    return "{expert}" in rule.source and not all("{expert}" in name for name in rule.targets)


def places_of(tensor: SourceTensor) -> Places:
    """Where the shards of a tensor and of its copies are, by their names on paper."""
    views = [shard.view for shards in (tensor.shards, *tensor.copies) for shard in shards]
    return {str(number): (view.file, view.offset) for number, view in enumerate(views)}


def moved(copies: Copies, places: Places, by: int) -> Copies:
    """The rectangles of a sketch with files of their own, ``by`` bytes further in the target."""
    found = []
    for name, source, pitch, target, target_pitch, rows, width, item, turned in copies:
        file, start = places[name]
        at, to = start + source, target + by
        found.append(Copy(file, at, pitch, to, target_pitch, rows, width, item, turned))
    return tuple(found)


def moved_view(view: View, places: Places) -> View:
    """A view of a sketch with a file of its own."""
    file, start = places[view.file]
    return View(file, start + view.offset, view.dtype, view.shape, view.strides)


def _on_paper(tensor: SourceTensor) -> SourceTensor:
    """The tensor with every shard in a file of its own, called by its number, from byte 0 on."""
    groups, count = [], 0
    for shards in (tensor.shards, *tensor.copies):
        paper = []
        for shard in shards:
            paper.append(replace(shard, view=replace(shard.view, file=str(count), offset=0)))
            count += 1
        groups.append(tuple(paper))
    return replace(tensor, shards=groups[0], copies=tuple(groups[1:]))


class Sketcher:
    """Plans tensors on paper, for one table and one set of training arguments."""

    def __init__(
        self, args: TrainingArgs, architecture: Architecture, vocab_size: int, dtype: DType | None
    ) -> None:
        """``vocab_size`` rows of the embedding are kept, in ``dtype`` or each one's own."""
        self._args, self._architecture, self._dtype = args, architecture, dtype
        self._sizes = Sizes(
            args.heads,
            args.groups,
            args.head_dim,
            vocab_size,
            delta_heads=(args.delta_key_heads, args.delta_value_heads),
            delta_dims=(args.delta_key_dim, args.delta_value_dim),
        )

    def draw(self, match: Match) -> Sketch:
        """What a tensor becomes, as every other of its kind; PlanError for one that does not fit.

        The error names the tensor's own file.
        """
        try:
            return self._draw(match.rule, _on_paper(match.tensor))
        except CkptError as error:
            if error.file is not None:
                error.file = places_of(match.tensor)[error.file][0]
            raise

    def _draw(self, rule: Rule, tensor: SourceTensor) -> Sketch:
        if not tensor.dtype.is_float:
            raise PlanError("a weight of whole numbers", expected="floats", found=tensor.dtype.name)
        whole = self._place(tensor.shards, rule.layout, tensor.shape)
        pairs = tuple(self._pairs(tensor, whole, rule.layout))
        sizes, blocks = self._sizes, self._blocks(rule.layout)
        sizes = replace(sizes, blocks=blocks) if blocks else sizes
        pieces = cut(whole.shape[0], rule.layout.cut, sizes)
        embeds = rule.layout.cut is Cut.VOCABULARY
        padding_rows = whole.shape[0] - pieces[0].rows if embeds else None
        layers = list(_layers(tensor, whole))
        parts = [
            self._part(rule, tensor, layers, piece)._replace(pattern=pattern)
            for pattern, piece in zip(rule.targets, pieces, strict=True)
        ]
        for pattern in rule.mtp_copies:
            for layer in range(self._args.layers, self._args.layers + self._args.mtp_kept):
                parts.append(parts[0]._replace(pattern=pattern, layer=layer))
        parts = [part._replace(stacked=_is_entry(rule, part.pattern)) for part in parts]
        return Sketch(prod(whole.shape), padding_rows, tuple(parts), pairs)

    def _part(
        self, rule: Rule, tensor: SourceTensor, layers: Sequence[Whole], piece: CutTarget
    ) -> Part:
        turned, shape = rule.layout.transposed, (piece.rows, *layers[0].shape[1:])
        if turned:
            shape = (*shape[:-2], shape[-1], shape[-2])
        copies, *further = (
            tuple(copies_for(held, piece, transposed=turned, base=0)) for held in layers
        )
        steps = self._steps(rule, tensor.dtype)
        if further:
            steps = (Combined(tensor.combine, len(further) + 1), *steps)
        return Part(
            "", None, False, shape, tensor.dtype, steps, copies, tuple(further)  # noqa: FBT003
        )  # fmt: skip

    def _blocks(self, layout: Layout) -> tuple[int, ...]:
        return tuple(getattr(self._args, name) for name in layout.blocks)

    def _place(
        self, shards: Sequence[Shard], layout: Layout, shape: tuple[int, ...] | None
    ) -> Whole:
        rows = getattr(self._args, layout.rows) if layout.rows else 0
        whole = place(shards, layout, shape, rows, self._blocks(layout))
        total = getattr(self._args, layout.total) if layout.total else whole.shape[0]
        if whole.shape[0] != total:
            raise PlanError(
                "the number of rows does not fit",
                file=shards[0].view.file,
                expected=f"{total} ({layout.total})",
                found=f"{whole.shape[0]} on {len(shards)} rank(s)",
                hint="Another --family may fit",
            )
        return whole

    def _pairs(self, tensor: SourceTensor, whole: Whole, layout: Layout) -> Iterator[Pair]:
        drifts = tensor.combine is Combine.MEAN
        for replica in whole.replicas if tensor.combine is not Combine.SUM else ():
            yield from (Pair(a, b, None, drifts) for a, b in _same_boxes(whole.parts, replica))
        for number, copy in enumerate(tensor.copies):
            other = self._place(copy, layout, tensor.shape)
            if other.shape != whole.shape:
                raise PlanError(
                    "a second stored copy has another shape",
                    file=copy[0].view.file,
                    expected=list(whole.shape),
                    found=list(other.shape),
                )
            for parts in (other.parts, *(other.replicas if whole.replicas else ())):
                pairs = _same_boxes(whole.parts, parts)
                yield from (Pair(a, b, number, may_drift=False) for a, b in pairs)

    def _steps(self, rule: Rule, stored: DType) -> tuple[Step, ...]:
        steps: list[Step] = []
        adds_one = self._architecture.norm_adds_one and not rule.plain
        if rule.norm and self._args.zero_centered_norm != adds_one:
            steps.append(AddOne(-1 if adds_one else 1))
        current = result_dtype(stored, tuple(steps))
        casts = self._dtype is not None and not rule.keep_dtype and stored.is_float
        if self._dtype is not None and casts and current is not self._dtype:
            steps.append(Cast(self._dtype))
        return tuple(steps)


def _is_entry(rule: Rule, pattern: str) -> bool:
    return "{expert}" in rule.source and "{expert}" not in pattern


def _same_boxes(parts: Sequence[Placed], others: Sequence[Placed]) -> Iterator[tuple[View, View]]:
    """The parts of two copies that belong at the same places."""
    known = {(part.start, part.view.shape): part.view for part in others}
    for part in parts:
        other = known.get((part.start, part.view.shape))
        if other is None or len(known) != len(parts):
            raise PlanError("two stored copies are cut into different parts", file=part.view.file)
        yield part.view, other


def _layers(tensor: SourceTensor, whole: Whole) -> Iterator[Whole]:
    """The whole tensor; and each further rank's copy where the copies are combined."""
    yield replace(whole, replicas=()) if whole.replicas else whole
    for replica in whole.replicas if tensor.combine is not Combine.EQUAL else ():
        yield Whole(whole.shape, replica)
