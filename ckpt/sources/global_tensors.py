"""Global tensors of distributed checkpoints brought to one tensor for each layer and expert.

Megatron-Core's sharded state dict has the same keys in every format that stores it: homogeneous
models stack all layers in one tensor, experts have an axis of their own, and a gated linear may
be two keys ``..._w`` and ``..._v`` (megatron/core/transformer/transformer_block.py,
moe/experts.py and mlp.py, ``sharded_state_dict``). The fused projections of state-space layers
and gated delta nets are a key for each of their parts.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from ckpt.errors import SourceError
from ckpt.sources import names
from ckpt.tensors import Shard, SourceTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_STACKED = re.compile(r"^(decoder\.layers\.)(?!\d+\.)(.*)$")
_EXPERTS = re.compile(r"^(.*\.mlp\.experts\.)experts\.(?:(\d+)\.)?(linear_fc[12]\.\w+)$")
_PART = re.compile(
    r"^(.*\.linear_fc1\.(?:weight|bias)\d*)_(w|v)$"
    r"|^(.*\.(?:in_proj|conv1d)\.(?:weight|bias))\.(\w+)$"
)
# In order of rows (mlp.py and moe/experts.py; ssm/gated_delta_net.py; ssm/mamba_mixer.py).
_HALVES = ("w", "v")
_PART_ORDERS = (
    _HALVES,
    ("query", "key", "value", "z", "beta", "alpha"),
    ("query", "key", "value"),
    ("z", "x", "B", "C", "dt"),
    ("x", "B", "C"),
)


def model_tensors(stored: Iterable[SourceTensor]) -> tuple[SourceTensor, ...]:
    """The model's tensors under canonical names, from global tensors under their stored keys.

    Every shard of a stored tensor must know its start. Raises SourceError for stacks that are
    not whole and for two keys of one tensor.
    """
    plain = (_named(tensor, names.strip_prefixes(tensor.name)) for tensor in stored)
    parts = list(chain.from_iterable(map(_unstack, plain)))
    return tuple(_merge_parts(parts))


def _named(tensor: SourceTensor, name: str) -> SourceTensor:
    return tensor if tensor.name == name else replace(tensor, name=name)


def _unstack(tensor: SourceTensor) -> list[SourceTensor]:
    found = _STACKED.match(tensor.name)
    if found:
        prefix, rest = found[1], found[2]
        layers = _entries(tensor, lambda index: f"{prefix}{index}.{rest}")
        if _EXPERTS.match(tensor.name):
            return list(chain.from_iterable(map(_unstack, layers)))
        return layers
    found = _EXPERTS.match(tensor.name)
    if not found:
        return [tensor]
    prefix, number, rest = found[1], found[2], found[3]
    if number is not None:
        return [replace(tensor, name=f"{prefix}{number}.{rest}")]
    return _entries(tensor, lambda index: f"{prefix}{index}.{rest}")


def _entries(tensor: SourceTensor, name: Callable[[int], str]) -> list[SourceTensor]:
    """The entries along the first axis, each a tensor of its own."""
    shape = tensor.shape or (0,)
    shards: dict[int, list[Shard]] = {}
    for shard in tensor.shards if tensor.shape else ():
        start = shard.start or ()
        for index in range(shard.view.shape[0]):
            part = Shard(shard.view.select(0, index), start=start[1:])
            shards.setdefault(start[0] + index, []).append(part)
    if not shards or len(shards) != shape[0] or max(shards) >= shape[0]:
        raise SourceError(
            "its stored parts leave out entries of its first axis",
            tensor=tensor.name,
            expected=f"shape {list(shape)}",
            found=f"{len(shards)} entries",
        )
    return [
        SourceTensor(name(index), tensor.dtype, tuple(parts), shape[1:])
        for index, parts in sorted(shards.items())
    ]


def _merge_parts(tensors: Iterable[SourceTensor]) -> list[SourceTensor]:
    """Canonical names; blocks of rows stored under keys of their own become one tensor again."""
    parts: dict[str, dict[str, SourceTensor]] = {}
    for tensor in tensors:
        found = _PART.match(tensor.name)
        name = names.canonical((found[1] or found[3]) if found else tensor.name)
        part = (found[2] or found[4]) if found else ""
        held = parts.setdefault(name, {})
        if part in held or (held and "" in {*held, part}):
            raise SourceError("two keys are the same tensor", tensor=name)
        held[part] = _named(tensor, name)
    return [held.get("") or _join_parts(name, held) for name, held in parts.items()]


def _join_parts(name: str, held: dict[str, SourceTensor]) -> SourceTensor:
    """The whole of which ``held`` are blocks of rows."""
    order = next((order for order in _PART_ORDERS if set(order) == set(held)), None)
    if order is None:
        raise SourceError(
            "its parts are not all stored, or are unknown",
            tensor=name,
            expected=" or ".join(", ".join(order) for order in _PART_ORDERS),
            found=", ".join(held),
        )
    shards: list[Shard] = []
    first, rows = held[order[0]], 0
    for part in (held[part] for part in order):
        _check_alike(first, part, halves=order == _HALVES)
        for shard in part.shards:
            start, *rest = shard.start or (0,)
            shards.append(replace(shard, start=(start + rows, *rest)))
        rows += (part.shape or (0,))[0]
    shape = (rows, *(first.shape or (0,))[1:])
    return replace(first, shards=tuple(shards), shape=shape)


def _check_alike(first: SourceTensor, other: SourceTensor, *, halves: bool) -> None:
    beside = 0 if halves else 1
    sides = [(item.dtype, (item.shape or ())[beside:]) for item in (first, other)]
    if sides[0] != sides[1]:
        raise SourceError(
            "its two halves are not alike" if halves else "its parts are not alike",
            tensor=first.name,
            expected=f"{first.dtype.name} {list(first.shape or ())}",
            found=f"{other.dtype.name} {list(other.shape or ())}",
        )
