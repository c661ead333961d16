"""Layers with linear attention of tiny models: a gated delta net, and attention with gates."""

from __future__ import annotations

import torch
from tiny_tensors import Tensor, plain

DELTA = "gated_delta_net"
PARTS = ("query", "key", "value", "z", "beta", "alpha")


def is_linear(values, layer: int) -> bool:
    """Whether layer ``layer`` has a delta net; a list says it, else every Nth has attention."""
    if values.experimental_attention_variant != DELTA or layer >= values.num_layers:
        return False
    frequency = values.linear_attention_freq
    return bool(frequency[layer] if isinstance(frequency, list) else (layer + 1) % frequency)


def delta_net(a, core: str, hf: str) -> list[Tensor]:
    """Megatron's in_proj holds [q; k; v; z; b; a], Hugging Face's two go by key head."""
    hf = hf.replace("self_attn.", "linear_attn.")
    keys, values = a.linear_num_key_heads, a.linear_num_value_heads
    key_rows, value_rows = keys * a.linear_key_head_dim, values * a.linear_value_head_dim
    blocks = (key_rows, key_rows, value_rows, value_rows, values, values)
    width, conv = a.linear_conv_kernel_dim, sum(blocks[:3])
    both = (
        (hf + "in_proj_qkvz.weight", (2 * (key_rows + value_rows), a.hidden_size)),
        (hf + "in_proj_ba.weight", (2 * values, a.hidden_size)),
    )
    conv1d = ((hf + "conv1d.weight", (conv, 1, width)),)
    return [
        Tensor(core + "in_proj.weight", "delta", both, blocks=blocks, block_names=PARTS),
        Tensor(core + "conv1d.weight", "blocks", conv1d, blocks=blocks[:3], block_names=PARTS[:3]),
        plain(core + "A_log", hf + "A_log", (values,), "column"),
        plain(core + "dt_bias", hf + "dt_bias", (values,), "column"),
        plain(core + "out_norm.weight", hf + "norm.weight", (a.linear_value_head_dim,)),
        plain(core + "out_proj.weight", hf + "out_proj.weight", (a.hidden_size, value_rows), "row"),
    ]


def whole_delta(a, parts: list[torch.Tensor]) -> torch.Tensor:
    """[q; k; v; z; b; a] from what each key head has of them."""
    ratio = a.linear_num_value_heads // a.linear_num_key_heads
    key, value = a.linear_key_head_dim, ratio * a.linear_value_head_dim
    big = [head.split([key, key, value, value]) for head in parts[0].chunk(a.linear_num_key_heads)]
    small = [head.split([ratio, ratio]) for head in parts[1].chunk(a.linear_num_key_heads)]
    kinds = [*zip(*big, strict=True), *zip(*small, strict=True)]
    return torch.cat([torch.cat(kind) for kind in kinds])


def whole_gated(a, parts: list[torch.Tensor]) -> torch.Tensor:
    """Of each group all queries, then all gates, the key, the value; a head is [query; gate]."""
    heads = parts[0].view(a.num_attention_heads, 2, a.kv_channels, -1)
    keys, values = (part.view(a.num_query_groups, a.kv_channels, -1) for part in parts[1:])
    per_group = a.num_attention_heads // a.num_query_groups
    rows: list[torch.Tensor] = []
    for group in range(a.num_query_groups):
        inside = range(group * per_group, (group + 1) * per_group)
        rows += [heads[head, kind] for kind in (0, 1) for head in inside]
        rows += [keys[group], values[group]]
    return torch.cat(rows)
