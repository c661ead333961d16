"""Source plus architecture: a plan of copies, complete or refused.

A plan is decided from names and shapes alone. It can be printed, compared and run; what
cannot be planned stops here, before the first byte is written.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ckpt.convert.maps import AddOne, Cast, Combined, Step, result_dtype
from ckpt.errors import CkptError, PlanError
from ckpt.layout import Cut, CutTarget, Sizes, Whole, copies_for, cut, place
from ckpt.shards import TensorSpec
from ckpt.tensors import Combine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt.arch.table import Architecture, Rule
    from ckpt.layout import Layout
    from ckpt.parts import Placed
    from ckpt.rectangles import Copy
    from ckpt.sources import Checkpoint
    from ckpt.tensors import DType, Shard, SourceTensor, View
    from ckpt.training import TrainingArgs

_SHOWN = 8
_ROOM = 100_000  # names beyond twice those that are there: a damaged argument, not a lost file
_FURTHER = "mtp."
LAYER_BLOCK = "model.layers.{layer}."


@dataclass(frozen=True)
class Target:
    """One tensor to write: the rectangles that fill it, then the steps that change it.

    ``further`` are the rectangles of other ranks' copies, which the first step combines.
    """

    spec: TensorSpec
    stored: DType
    copies: tuple[Copy, ...]
    steps: tuple[Step, ...] = ()
    further: tuple[tuple[Copy, ...], ...] = ()

    @property
    def stored_bytes(self) -> int:
        """Bytes before the steps."""
        return prod(self.spec.shape) * self.stored.itemsize


@dataclass(frozen=True)
class Check:
    """Two stored copies of one tensor that must be equal byte for byte.

    ``other_name`` is set where the second one is stored under another name. Copies that
    ``may_drift`` are measured instead and must be close.
    """

    name: str
    first: View
    other: View
    other_name: str = ""
    may_drift: bool = False


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion will do: targets in order of writing, and checks before."""

    targets: tuple[Target, ...]
    checks: tuple[Check, ...]
    padding_rows: int
    source_parameters: int
    dropped: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are written."""
        return sum(target.spec.nbytes for target in self.targets)

    @property
    def summed(self) -> int:
        """How many tensors are the sum of several ranks' parts."""
        steps = [step for target in self.targets for step in target.steps]
        return sum(isinstance(step, Combined) and step.how is Combine.SUM for step in steps)

    @property
    def parameters(self) -> int:
        """Elements of all tensors that are written."""
        return sum(prod(target.spec.shape) for target in self.targets)


class Match(NamedTuple):
    """A source tensor and the row that takes it."""

    tensor: SourceTensor
    rule: Rule
    position: int
    layer: int
    expert: int


def build_plan(
    checkpoint: Checkpoint,
    args: TrainingArgs,
    architecture: Architecture,
    *,
    vocab_size: int,
    dtype: DType | None,
) -> Plan:
    """The plan that turns a checkpoint into the tensors of ``architecture``.

    ``dtype`` None keeps every tensor's own. Raises PlanError that lists every tensor that no row
    takes and every row that no tensor fills, and for shards that do not fit.
    """
    matches = match_tensors(checkpoint.tensors, architecture, args)
    builder = Builder(args, architecture, vocab_size, dtype)
    for match in sorted(matches, key=writing_order):
        builder.add(match)
    return replace(builder.plan(), dropped=dropped_names(checkpoint.tensors, args))


def writing_order(match: Match) -> tuple[int, int, int, int]:
    """What to sort matches by: parts of the model, layers, rows of the table, experts."""
    return (_part(match), match.layer, match.position, match.expert)


def _part(match: Match) -> int:
    """Embeddings before the layers, norm and head behind them."""
    if match.layer >= 0:
        return 1
    return 0 if match.rule.source.startswith("embedding.") else 2


def match_tensors(
    tensors: Sequence[SourceTensor], architecture: Architecture, args: TrainingArgs
) -> list[Match]:
    """Every tensor with its row; PlanError lists tensors without a row and rows without one.

    Tensors of layers for further tokens that are left out on purpose are passed over.
    """
    if dropped := set(dropped_names(tensors, args)):
        tensors = [tensor for tensor in tensors if tensor.name not in dropped]
        args = replace(args, mtp_layers=0)
    known = {tensor.name for tensor in tensors}
    limit = 2 * len(known) + _ROOM
    expected = dict(islice(_expected(architecture, args), limit))
    if len(expected) == limit:
        raise PlanError(
            "the training arguments ask for far more tensors than there are",
            expected=f"at least {limit:,} for {args.layers:,} layers",
            found=f"{len(known):,}",
            hint=_HINT,
        )
    unknown = [tensor for tensor in tensors if tensor.name not in expected]
    missing = [name for name in expected if name not in known]
    if unknown or missing:
        raise PlanError(_describe(unknown, missing, architecture), hint=_HINT)
    return [Match(tensor, *expected[tensor.name]) for tensor in tensors]


def dropped_names(tensors: Sequence[SourceTensor], args: TrainingArgs) -> tuple[str, ...]:
    """Tensors of the layers for further tokens, where the user leaves these out.

    Whether the family has such layers or not; the arguments must say that the model has them.
    """
    if args.mtp_kept or not args.mtp_layers:
        return ()
    return tuple(tensor.name for tensor in tensors if tensor.name.startswith(_FURTHER))


_HINT = "Nothing was written. Another --family may fit, or the checkpoint is not what it says"


def _expected(
    architecture: Architecture, args: TrainingArgs
) -> Iterator[tuple[str, tuple[Rule, int, int, int]]]:
    """Every source name that the table asks for, with its row, position, layer and expert."""
    for position, rule in enumerate(architecture.rules):
        if not rule.applies(args):
            continue
        for name, layer in _layer_names(rule, args):
            if "{expert}" not in name:
                yield name, (rule, position, layer, 0)
                continue
            for expert in range(args.experts):
                yield name.replace("{expert}", str(expert)), (rule, position, layer, expert)


def _layer_names(rule: Rule, args: TrainingArgs) -> Iterator[tuple[str, int]]:
    """The row's names with layers filled in, and each one's number in Hugging Face's counting.

    Layers that predict further tokens hold a whole decoder layer of their own.
    """
    further = range(args.layers, args.layers + args.mtp_layers)
    if "{mtp}" in rule.source:
        for layer in further:
            yield rule.source.replace("{mtp}", str(layer - args.layers)), layer
    elif "{layer}" in rule.source:
        for layer in range(args.layers):
            if rule.has_layer(args, layer):
                yield rule.source.replace("{layer}", str(layer)), layer
        for layer in further:
            if rule.has_layer(args, layer):
                inner = f"mtp.layers.{layer - args.layers}.transformer_layer."
                yield rule.source.replace("decoder.layers.{layer}.", inner), layer
    else:
        yield rule.source, -1


def _describe(
    unknown: Sequence[SourceTensor], missing: Sequence[str], architecture: Architecture
) -> str:
    parts = []
    if unknown:
        listed = [_with_nearest(tensor, missing) for tensor in unknown[:_SHOWN]]
        parts.append(
            f"{len(unknown)} tensors have no place in family {architecture.name}: "
            + ", ".join(listed) + _more(len(unknown))
        )  # fmt: skip
    if missing:
        parts.append(
            f"{len(missing)} tensors are missing: " + ", ".join(missing[:_SHOWN])
            + _more(len(missing))
        )  # fmt: skip
    return "; ".join(parts)


def _with_nearest(tensor: SourceTensor, missing: Sequence[str]) -> str:
    near = difflib.get_close_matches(tensor.name, missing, n=1, cutoff=0.8)
    file = f" in {tensor.shards[0].view.file}" if tensor.shards else ""
    return f"{tensor.name}{file}" + (f" (nearest: {near[0]})" if near else "")


def _more(count: int) -> str:
    return f" and {count - _SHOWN} more" if count > _SHOWN else ""


class Builder:
    """Turns matches into targets, one after another."""

    def __init__(
        self,
        args: TrainingArgs,
        architecture: Architecture,
        vocab_size: int,
        dtype: DType | None,
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
        self._targets: dict[str, Target] = {}
        self._checks: list[Check] = []
        self._padding_rows = 0
        self._parameters = 0

    def add(self, match: Match) -> list[Target]:
        """Plan one source tensor, give its new targets; adds its name to whatever goes wrong."""
        known = len(self._targets)
        try:
            self._add(match)
        except CkptError as error:
            error.tensor = error.tensor or match.tensor.name
            raise
        return list(islice(self._targets.values(), known, None))

    def _add(self, match: Match) -> None:
        rule, tensor = match.rule, match.tensor
        if not tensor.dtype.is_float:
            raise PlanError("a weight of whole numbers", expected="floats", found=tensor.dtype.name)
        whole = self._place(tensor.shards, rule.layout, tensor.shape)
        self._parameters += prod(whole.shape)
        self._add_checks(tensor, whole, rule.layout)
        sizes, blocks = self._sizes, self._blocks(rule.layout)
        sizes = replace(sizes, blocks=blocks) if blocks else sizes
        pieces = cut(whole.shape[0], rule.layout.cut, sizes)
        if rule.layout.cut is Cut.VOCABULARY:
            self._padding_rows = whole.shape[0] - pieces[0].rows
        for name, piece in zip(rule.targets, pieces, strict=True):
            self._add_target(match, whole, piece, name)
        for pattern in rule.mtp_copies:
            for layer in range(self._args.layers, self._args.layers + self._args.mtp_kept):
                self._add_target(match._replace(layer=layer), whole, pieces[0], pattern)

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

    def _add_checks(self, tensor: SourceTensor, whole: Whole, layout: Layout) -> None:
        for replica in whole.replicas if tensor.combine is not Combine.SUM else ():
            drifts = tensor.combine is Combine.MEAN
            pairs = _same_boxes(whole.parts, replica)
            self._checks += [Check(tensor.name, a, b, may_drift=drifts) for a, b in pairs]
        for copy, name in zip(tensor.copies, tensor.copy_names, strict=True):
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
                self._checks += [Check(tensor.name, a, b, name) for a, b in pairs]

    def _add_target(self, match: Match, whole: Whole, piece: CutTarget, pattern: str) -> None:
        layer, expert, rule = match.layer, match.expert, match.rule
        name = self.target_name(pattern, layer, expert)
        stored = match.tensor.dtype
        shape: tuple[int, ...] = (piece.rows, *whole.shape[1:])
        if rule.layout.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        stacked = "{expert}" in rule.source and "{expert}" not in pattern
        base = expert * prod(shape) * stored.itemsize if stacked else 0
        copies, *further = (
            tuple(copies_for(held, piece, transposed=rule.layout.transposed, base=base))
            for held in _layers(match.tensor, whole)
        )
        if stacked:
            shape = (self._args.experts, *shape)
        if name in self._targets:
            self._extend(name, copies, stored, stacked=stacked)
            return
        steps = self._steps(rule, stored)
        if further:
            steps = (Combined(match.tensor.combine, len(further) + 1), *steps)
        spec = TensorSpec(name, result_dtype(stored, steps), shape)
        self._targets[name] = Target(spec, stored, copies, steps, tuple(further))

    def target_name(self, pattern: str, layer: int, expert: int) -> str:
        """The name that a row's pattern gives in a layer and for an expert."""
        further, block = layer - self._args.layers, self._architecture.mtp_block
        if further >= 0 and block:
            pattern = pattern.replace(LAYER_BLOCK, block)
        pattern = pattern.replace("{mtp}", str(further)).replace("{layer}", str(layer))
        return pattern.replace("{expert}", str(expert))

    def _extend(self, name: str, copies: tuple[Copy, ...], stored: DType, *, stacked: bool) -> None:
        known = self._targets[name]
        if not stacked or known.stored is not stored:
            raise PlanError("two training tensors claim the same place", expected="one", found=name)
        self._targets[name] = replace(known, copies=(*known.copies, *copies))

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

    def plan(self) -> Plan:
        """The finished plan; raises PlanError when a target is not covered exactly."""
        for name, target in self._targets.items():
            moved = sum(copy.nbytes for copy in target.copies)
            if moved != target.stored_bytes:
                raise PlanError(
                    "the stored parts do not cover the tensor that is to be written",
                    tensor=name,
                    expected=f"{target.stored_bytes} bytes",
                    found=f"{moved} bytes",
                )
        return Plan(
            tuple(self._targets.values()),
            tuple(self._checks),
            self._padding_rows,
            self._parameters,
        )


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
