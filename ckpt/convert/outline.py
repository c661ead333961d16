"""What a plan would count and refuse, without a plan: tensors that are alike are planned once.

A model of experts has tens of thousands of tensors, but only as many kinds as a table has rows
times the ways in which ranks cut them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ckpt.convert.match import match_tensors, writing_order
from ckpt.convert.plan import Builder
from ckpt.convert.sketch import is_stacked, kind_of
from ckpt.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from ckpt.arch.table import Architecture
    from ckpt.convert.match import Match
    from ckpt.sources import Checkpoint
    from ckpt.training import TrainingArgs


@dataclass(frozen=True)
class Outline:
    """Elements of all tensors that a conversion would write, and rows that it would leave out."""

    parameters: int
    padding_rows: int


def outline(
    checkpoint: Checkpoint, args: TrainingArgs, architecture: Architecture, *, vocab_size: int
) -> Outline:
    """The counts of the plan that :func:`ckpt.convert.plan.build_plan` makes.

    Raises what it raises: names, shapes, cuts and places of all tensors are checked.
    """
    matches = match_tensors(checkpoint.tensors, architecture, args)
    kinds: dict[Hashable, list[Match]] = {}
    for match in matches:
        # Entries of one stacked tensor add up.
        kind = match.tensor.name if is_stacked(match.rule) else kind_of(match)
        kinds.setdefault(kind, []).append(match)
    builder = Builder(args, architecture, vocab_size, None)
    parameters = 0
    for first, *others in sorted(kinds.values(), key=lambda alike: writing_order(alike[0])):
        targets = builder.add(first)
        parameters += len(others) * sum(prod(target.spec.shape) for target in targets)
    plan = builder.plan()
    _check_names(builder, {(match.position, match.layer): match for match in matches}.values())
    return Outline(plan.parameters + parameters, plan.padding_rows)


def _check_names(builder: Builder, matches: Iterable[Match]) -> None:
    """Raise PlanError for two tensors that are written under one name.

    ``matches`` hold one expert of each layer: a row writes each expert under a name of its own.
    """
    known: set[str] = set()
    for match in matches:
        if is_stacked(match.rule):  # the builder had all of these
            continue
        for pattern in match.rule.targets:
            name = builder.target_name(pattern, match.layer, match.expert)
            if name in known:
                raise PlanError(
                    "two training tensors claim the same place",
                    tensor=match.tensor.name,
                    expected="one",
                    found=name,
                )
            known.add(name)
