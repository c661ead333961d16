"""Tensors of gpt-oss layers: sinks, biases everywhere, and experts that Hugging Face stacks.

A name with ``#`` is a part of the Hugging Face tensor before it: an expert's, and of that its gate
or its up half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiny_megatron import TinyModel
    from tiny_tensors import Tensor


def gpt_oss(model: TinyModel, core: str, layer: int) -> list[Tensor]:
    """A gpt-oss layer."""
    from tiny_megatron import _attention
    from tiny_tensors import plain as _plain

    a, hf = model.values, f"model.layers.{layer}."
    hidden, heads = a.hidden_size, a.num_attention_heads
    found = [
        _plain(core + "input_layernorm.weight", hf + "input_layernorm.weight", (hidden,)),
        *_attention(a, core + "self_attention.", hf + "self_attn."),
        _plain(core + "self_attention.linear_proj.bias", hf + "self_attn.o_proj.bias", (hidden,)),
        _plain(core + "self_attention.core_attention.softmax_offset", hf + "self_attn.sinks",
               (heads,), "column"),
        _plain(core + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight",
               (hidden,)),
        _plain(core + "mlp.router.weight", hf + "mlp.router.weight", (a.num_experts, hidden)),
        _plain(core + "mlp.router.bias", hf + "mlp.router.bias", (a.num_experts,)),
    ]  # fmt: skip
    for expert in range(a.num_experts):
        at, to = f"{core}mlp.experts.local_experts.{expert}.", hf + "mlp.experts."
        found += _expert(at, to, f"#{expert:03d}", (hidden, a.moe_ffn_hidden_size))
    return found


def _expert(core: str, hf: str, part: str, sizes: tuple[int, int]) -> list[Tensor]:
    from tiny_tensors import Tensor
    from tiny_tensors import plain as _plain

    hidden, ffn = sizes
    found = []
    for what, suffix, beside in (("weight", "", (hidden,)), ("bias", "_bias", ())):
        halves = tuple(
            (f"{hf}gate_up_proj{suffix}{part}.{half}", (ffn, *beside)) for half in ("gate", "up")
        )
        found.append(Tensor(f"{core}linear_fc1.{what}", "gate_up", halves))
    down = f"{hf}down_proj{part}"
    bias = f"{hf}down_proj_bias{part}"
    return [
        *found,
        _plain(core + "linear_fc2.weight", down, (hidden, ffn), "row"),
        _plain(core + "linear_fc2.bias", bias, (hidden,)),
    ]


def stacked(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face's tensors: each expert's turned around, gate and up in turns, all on a pile."""
    whole: dict[str, torch.Tensor] = {}
    piles: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, value in found.items():
        base, _, part = name.partition("#")
        if not part:
            whole[name] = value
            continue
        piles.setdefault(base, {}).setdefault(part.partition(".")[0], []).append(value)
    for base, experts in piles.items():
        rows = [
            torch.stack(halves, dim=1).reshape(-1, *halves[0].shape[1:])
            for _, halves in sorted(experts.items())
        ]
        whole[base] = torch.stack([value.t() if value.dim() > 1 else value for value in rows])
    return whole


LAYERS: dict[str, Callable[[TinyModel, str, int], list[Tensor]]] = {"gptoss": gpt_oss}
