"""What a plan would count and refuse, without a plan: tensors that are alike are planned once.

A model of experts has tens of thousands of tensors, but only as many kinds as a table has rows
times the ways in which ranks cut them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ckpt.convert.plan import Builder, match_tensors, writing_order
from ckpt.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from ckpt.arch.table import Architecture
    from ckpt.convert.plan import Match
    from ckpt.sources import Checkpoint
    from ckpt.tensors import Shard
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
    kinds: dict[Hashable, list[Match]] = {}
    for match in match_tensors(checkpoint.tensors, architecture, args):
        kinds.setdefault(_kind(match, args), []).append(match)
    builder = Builder(args, architecture, vocab_size, None)
    parameters = 0
    for first, *others in sorted(kinds.values(), key=lambda alike: writing_order(alike[0])):
        targets = builder.add(first)
        parameters += len(others) * sum(prod(target.spec.shape) for target in targets)
    plan = builder.plan()
    _check_names(builder, (match for alike in kinds.values() for match in alike))
    return Outline(plan.parameters + parameters, plan.padding_rows)


def _kind(match: Match, args: TrainingArgs) -> Hashable:
    """Equal for tensors that differ in nothing but their layer, their expert and their files."""
    tensor, rule = match.tensor, match.rule
    if "{expert}" in rule.source and not all("{expert}" in name for name in rule.targets):
        return tensor.name  # entries of one stacked tensor add up
    copies = tuple(_cuts(copy) for copy in tensor.copies)
    at_end = max(0, match.layer - args.layers + 1)  # layers that predict further tokens
    shape, shards = tensor.shape, _cuts(tensor.shards)
    return match.position, at_end, id(tensor.dtype), tensor.combine.value, shape, shards, copies


def _cuts(shards: Sequence[Shard]) -> Hashable:
    return tuple(
        (shard.rank, shard.start, shard.view.shape, id(shard.view.dtype)) for shard in shards
    )


def _check_names(builder: Builder, matches: Iterable[Match]) -> None:
    """Raise PlanError for two tensors that are written under one name."""
    rows: dict[str, int] = {}
    for match in matches:
        if builder.is_dropped(match):
            continue
        for pattern in match.rule.targets:
            name = builder.target_name(pattern, match.layer, match.expert)
            stacked = "{expert}" in match.rule.source and "{expert}" not in pattern
            if name in rows and not (stacked and rows[name] == match.position):
                raise PlanError(
                    "two training tensors claim the same place",
                    tensor=match.tensor.name,
                    expected="one",
                    found=name,
                )
            rows[name] = match.position
