"""Which row of a table takes each tensor of a checkpoint; any left over stops the run."""

from __future__ import annotations

import difflib
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ckpt.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt.arch.table import Architecture, Rule
    from ckpt.tensors import SourceTensor
    from ckpt.training import TrainingArgs

_SHOWN = 8
_ROOM = 100_000  # names beyond twice those that are there: a damaged argument, not a lost file
_FURTHER = "mtp."


class Match(NamedTuple):
    """A source tensor and the row that takes it."""

    tensor: SourceTensor
    rule: Rule
    position: int
    layer: int
    expert: int


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
