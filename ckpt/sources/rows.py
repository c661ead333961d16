"""Row orders of fused QKV in checkpoints older than version 2.

Version 0 stores [3, heads, head_dim] rows on each rank, version 1 [heads, head_dim, 3],
version 2 and newer [heads, 3, head_dim], which is what the layout rules expect
(megatron/training/checkpointing.py, fix_query_key_value_ordering).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.sources.checkpoint import count_in
from ckpt.tensors import Shard, SourceTensor, View

if TYPE_CHECKING:
    from collections.abc import Mapping

_MODERN = 2.0


def reorder_qkv(tensor: SourceTensor, args: Mapping[str, Any]) -> SourceTensor:
    """The tensor with its parts placed in the modern order; others come back as they are.

    Raises SourceError for grouped queries, which versions before 2 did not have.
    """
    stored = args.get("checkpoint_version") or 0
    version = stored if isinstance(stored, int | float) else _MODERN
    if version >= _MODERN or ".linear_qkv." not in tensor.name:
        return tensor
    if any(shard.rank is not None and shard.start is not None for shard in tensor.shards):
        raise SourceError(
            f"checkpoint version {version} in parts smaller than a rank is not known",
            tensor=tensor.name,
        )
    heads = count_in(args, "num_attention_heads")
    if not heads or heads % len(tensor.shards):
        raise SourceError(
            "num_attention_heads does not fit the ranks", tensor=tensor.name, found=heads
        )
    local = heads // len(tensor.shards)
    rows = tensor.shards[0].view.shape[0]
    if rows % (3 * local):
        raise SourceError(
            f"checkpoint version {version} has no grouped queries, but this tensor does",
            tensor=tensor.name,
            expected=f"a multiple of {3 * local} rows",
            found=f"{rows} rows",
        )
    head_dim = rows // (3 * local)
    parts, at = [], 0
    for shard in tensor.shards:
        for head in range(local):
            for kind in range(3):
                view = _rows(shard.view, version, (head, kind, local, head_dim))
                parts.append(Shard(view, start=(at, *(0,) * (len(view.shape) - 1))))
                at += head_dim
    shape = (at, *tensor.shards[0].view.shape[1:])
    return replace(tensor, shards=tuple(parts), shape=shape, copies=(), copy_names=())


def _rows(view: View, version: float, place: tuple[int, int, int, int]) -> View:
    head, kind, heads, head_dim = place
    if version == 0:
        return view.narrow(0, (kind * heads + head) * head_dim, head_dim)
    first = view.narrow(0, head * head_dim * 3 + kind, 1)
    return replace(
        first,
        shape=(head_dim, *view.shape[1:]),
        strides=(3 * view.strides[0], *view.strides[1:]),
    )
