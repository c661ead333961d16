"""Global tensors of distributed checkpoints brought to one tensor for each layer and expert.

Megatron-Core's sharded state dict has the same keys in every format that stores it: homogeneous
models stack all layers in one tensor, experts have an axis of their own, and a gated linear may
be two keys ``..._w`` and ``..._v`` (megatron/core/transformer/transformer_block.py,
moe/experts.py and mlp.py, ``sharded_state_dict``).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt.errors import SourceError
from ckpt.sources import names
from ckpt.tensors import Shard, SourceTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_STACKED = re.compile(r"^(decoder\.layers\.)(?!\d+\.)(.*)$")
_EXPERTS = re.compile(r"^(.*\.mlp\.experts\.)experts\.(?:(\d+)\.)?(linear_fc[12]\.\w+)$")
_HALVES = re.compile(r"^(.*\.linear_fc1\.(?:weight|bias)\d*)_(w|v)$")


def model_tensors(stored: Iterable[SourceTensor]) -> tuple[SourceTensor, ...]:
    """The model's tensors under canonical names, from global tensors under their stored keys.

    Every shard of a stored tensor must know its start. Raises SourceError for stacks that are
    not whole and for two keys of one tensor.
    """
    plain = (replace(tensor, name=names.strip_prefixes(tensor.name)) for tensor in stored)
    parts = [part for tensor in plain for part in _unstack(tensor)]
    return tuple(_merge_halves(parts))


def _unstack(tensor: SourceTensor) -> list[SourceTensor]:
    found = _STACKED.match(tensor.name)
    if found:
        prefix, rest = found[1], found[2]
        layers = _entries(tensor, lambda index: f"{prefix}{index}.{rest}")
        return [part for layer in layers for part in _unstack(layer)]
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


def _merge_halves(tensors: Iterable[SourceTensor]) -> list[SourceTensor]:
    """Canonical names; gate and up stored as two keys ``..._w`` and ``..._v`` become one tensor."""
    whole: dict[str, SourceTensor] = {}
    for tensor in tensors:
        found = _HALVES.match(tensor.name)
        name = names.canonical(found[1] if found else tensor.name)
        if not found and name in whole:
            raise SourceError("two keys are the same tensor", tensor=name)
        half = _half(replace(tensor, name=name), found[2]) if found else None
        whole[name] = _joined(whole.get(name), half) if half else replace(tensor, name=name)
    return list(whole.values())


def _half(tensor: SourceTensor, half: str) -> SourceTensor:
    """One half at its place in the whole: gate (w) first, up (v) behind it."""
    rows, *others = tensor.shape or (0,)
    shift = rows if half == "v" else 0
    shards = []
    for shard in tensor.shards:
        first, *rest = shard.start or (0,)
        shards.append(replace(shard, start=(first + shift, *rest)))
    return replace(tensor, shards=tuple(shards), shape=(2 * rows, *others))


def _joined(known: SourceTensor | None, half: SourceTensor) -> SourceTensor:
    if known is None:
        return half
    if known.dtype is not half.dtype or known.shape != half.shape:
        raise SourceError(
            "its two halves are not alike",
            tensor=half.name,
            expected=f"{known.dtype.name} {list(known.shape or ())}",
            found=f"{half.dtype.name} {list(half.shape or ())}",
        )
    return replace(half, shards=(*known.shards, *half.shards))
