"""Source plus architecture: a plan of copies, complete or refused.

A plan is decided from names and shapes alone. It can be printed, compared and run; what
cannot be planned stops here, before the first byte is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from ckpt.convert.match import dropped_names, match_tensors, writing_order
from ckpt.convert.sketch import Sketcher, kind_of, moved, moved_view, places_of
from ckpt.convert.steps import Combined, Step, result_dtype
from ckpt.errors import CkptError, PlanError
from ckpt.shards import TensorSpec
from ckpt.tensors import Combine

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ckpt.arch.table import Architecture
    from ckpt.convert.match import Match
    from ckpt.convert.sketch import Part, Places, Sketch
    from ckpt.rectangles import Copy
    from ckpt.sources import Checkpoint
    from ckpt.tensors import DType, View
    from ckpt.training import TrainingArgs

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
        self._layers, self._experts = args.layers, args.experts
        self._further_block = architecture.mtp_block
        self._sketcher = Sketcher(args, architecture, vocab_size, dtype)
        self._sketches: dict[Hashable, Sketch] = {}
        self._names: dict[tuple[str, int], str] = {}
        self._targets: dict[str, Target] = {}
        self._entries: dict[str, list[Copy]] = {}  # of tensors that hold all experts
        self._checks: list[Check] = []
        self._padding_rows = 0
        self._parameters = 0

    def add(self, match: Match) -> list[Target]:
        """Plan one source tensor, give its new targets; adds its name to whatever goes wrong."""
        kind = kind_of(match)
        try:
            sketch = self._sketches.get(kind)
            if sketch is None:
                sketch = self._sketches[kind] = self._sketcher.draw(match)
            return self._add(match, sketch)
        except CkptError as error:
            error.tensor = error.tensor or match.tensor.name
            raise

    def _add(self, match: Match, sketch: Sketch) -> list[Target]:
        tensor, places = match.tensor, places_of(match.tensor)
        self._parameters += sketch.elements
        if sketch.padding_rows is not None:
            self._padding_rows = sketch.padding_rows
        for first, other, copy, may_drift in sketch.pairs:
            name = "" if copy is None else tensor.copy_names[copy]
            views = moved_view(first, places), moved_view(other, places)
            self._checks.append(Check(tensor.name, *views, name, may_drift))
        return [
            target
            for part in sketch.parts
            if (target := self._add_part(match, part, places)) is not None
        ]

    def _add_part(self, match: Match, part: Part, places: Places) -> Target | None:
        """The target of a part; None for one more entry of a known target."""
        layer = match.layer if part.layer is None else part.layer
        name = self.target_name(part.pattern, layer, match.expert)
        known = self._targets.get(name)
        if known is not None and (not part.stacked or known.stored is not part.stored):
            raise PlanError("two training tensors claim the same place", expected="one", found=name)
        shape, by = part.shape, 0
        if part.stacked:
            by = match.expert * prod(shape) * part.stored.itemsize
            shape = (self._experts, *shape)
        copies = moved(part.copies, places, by)
        if part.stacked:
            self._entries.setdefault(name, []).extend(copies)
        if known is not None:
            return None
        further = tuple([moved(layer, places, by) for layer in part.further])
        spec = TensorSpec(name, result_dtype(part.stored, part.steps), shape)
        target = self._targets[name] = Target(spec, part.stored, copies, part.steps, further)
        return target

    def target_name(self, pattern: str, layer: int, expert: int) -> str:
        """The name that a row's pattern gives in a layer and for an expert."""
        name = self._names.get((pattern, layer))
        if name is None:
            further, block, name = layer - self._layers, self._further_block, pattern
            if further >= 0 and block:
                name = name.replace(LAYER_BLOCK, block)
            name = name.replace("{mtp}", str(further)).replace("{layer}", str(layer))
            self._names[pattern, layer] = name
        return name.replace("{expert}", str(expert)) if "{" in name else name

    def plan(self) -> Plan:
        """The finished plan; raises PlanError when a target is not covered exactly."""
        for name, copies in self._entries.items():
            self._targets[name] = replace(self._targets[name], copies=tuple(copies))
        for name, target in self._targets.items():
            moved_bytes = sum([copy.rows * copy.width for copy in target.copies])
            if moved_bytes != target.stored_bytes:
                raise PlanError(
                    "the stored parts do not cover the tensor that is to be written",
                    tensor=name,
                    expected=f"{target.stored_bytes} bytes",
                    found=f"{moved_bytes} bytes",
                )
        return Plan(
            tuple(self._targets.values()),
            tuple(self._checks),
            self._padding_rows,
            self._parameters,
        )
