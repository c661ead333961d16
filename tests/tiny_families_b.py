"""Tensors of a layer, and of what lies around the layers, for further families.

``LAYERS[family](model, core, layer)`` gives one layer's tensors as ``tiny_megatron.tensors`` does,
``NORMS`` the training names that TransformerEngine's spec spells otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiny_megatron import TinyModel
    from tiny_tensors import Tensor

# Megatron-Bridge keeps these two norms inside the linears before them.
POST_NORMS = {
    ".post_self_attn_layernorm.": ".self_attention.linear_proj.post_layernorm.",
    ".post_mlp_layernorm.": ".mlp.linear_fc2.post_layernorm.",
}


def four_norms(model: TinyModel, core: str, layer: int) -> list[Tensor]:
    """A Gemma 2 or 3 layer."""
    from tiny_megatron import _attention, _mlp
    from tiny_tensors import plain as _plain

    a, hf = model.values, f"model.layers.{layer}."
    size = (a.hidden_size,)
    return [
        _plain(core + "input_layernorm.weight", hf + "input_layernorm.weight", size),
        *_attention(a, core + "self_attention.", hf + "self_attn."),
        _plain(core + "post_self_attn_layernorm.weight", hf + "post_attention_layernorm.weight",
               size),
        _plain(core + "pre_mlp_layernorm.weight", hf + "pre_feedforward_layernorm.weight", size),
        *_mlp(a, core + "mlp.", hf + "mlp.", a.ffn_hidden_size),
        _plain(core + "post_mlp_layernorm.weight", hf + "post_feedforward_layernorm.weight", size),
    ]  # fmt: skip


def glm4(model: TinyModel, core: str, layer: int) -> list[Tensor]:
    """A GLM-4 layer: gate and up are one tensor on both sides."""
    from tiny_megatron import _attention
    from tiny_tensors import Tensor
    from tiny_tensors import plain as _plain

    a, hf = model.values, f"model.layers.{layer}."
    size = (a.hidden_size,)
    norms = {
        "input_layernorm": "input_layernorm",
        "post_self_attn_layernorm": "post_self_attn_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_mlp_layernorm",
    }
    both = ((hf + "mlp.gate_up_proj.weight", (2 * a.ffn_hidden_size, a.hidden_size)),)
    shape = (a.hidden_size, a.ffn_hidden_size)
    return [
        *(_plain(f"{core}{o}.weight", f"{hf}{t}.weight", size) for o, t in norms.items()),
        *_attention(a, core + "self_attention.", hf + "self_attn."),
        Tensor(core + "mlp.linear_fc1.weight", "gate_up", both),
        _plain(core + "mlp.linear_fc2.weight", hf + "mlp.down_proj.weight", shape, "row"),
    ]


def olmoe(model: TinyModel, core: str, layer: int) -> list[Tensor]:
    """An OLMoE layer: norms over all heads, whole on every rank."""
    from tiny_megatron import _attention, _experts
    from tiny_tensors import plain as _plain

    a, hf = model.values, f"model.layers.{layer}."
    size = (a.hidden_size,)
    widths = {"q": a.num_attention_heads, "k": a.num_query_groups}
    return [
        _plain(core + "input_layernorm.weight", hf + "input_layernorm.weight", size),
        *(item for item in _attention(a, core + "self_attention.", hf + "self_attn.")
          if "_layernorm" not in item.name),
        *(_plain(f"{core}self_attention.{part}_layernorm.weight",
                 f"{hf}self_attn.{part}_norm.weight", (heads * a.kv_channels,))
          for part, heads in widths.items()),
        _plain(core + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", size),
        *_experts(model, core + "mlp.", hf),
    ]  # fmt: skip


def minimax(model: TinyModel, core: str, layer: int) -> list[Tensor]:
    """A MiniMax-M2 layer: norms over all heads, cut like them; a bias beside the gate."""
    from dataclasses import replace

    from tiny_megatron import _attention, _experts
    from tiny_tensors import Tensor
    from tiny_tensors import plain as _plain

    a, hf = model.values, f"model.layers.{layer}."
    size = (a.hidden_size,)
    bias = ((hf + "block_sparse_moe.e_score_correction_bias", (a.num_experts,)),)
    plain = replace(model, args={**model.args, "moe_router_enable_expert_bias": False})
    widths = {"q": a.num_attention_heads, "k": a.num_query_groups}
    return [
        _plain(core + "input_layernorm.weight", hf + "input_layernorm.weight", size),
        *(item for item in _attention(a, core + "self_attention.", hf + "self_attn.")
          if "_layernorm" not in item.name),
        *(_plain(f"{core}self_attention.{part}_layernorm.weight",
                 f"{hf}self_attn.{part}_norm.weight", (heads * a.kv_channels,), "column")
          for part, heads in widths.items()),
        _plain(core + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", size),
        *_experts(plain, core + "mlp.", hf),
        Tensor(core + "mlp.router.expert_bias", "copy", bias, fp32=True),
    ]  # fmt: skip


def indexer_rows(a) -> list[tuple[str, str, tuple[int, ...], str]]:
    """What DeepSeek's sparse attention adds, on every rank; ``k_norm`` has a bias as well."""
    heads, width, hidden = a.dsa_indexer_n_heads, a.dsa_indexer_head_dim, a.hidden_size
    core, hf = "core_attention.indexer.", "indexer."
    return [
        (core + "linear_wq_b", hf + "wq_b", (heads * width, a.q_lora_rank), "copy"),
        (core + "linear_wk", hf + "wk", (width, hidden), "copy"),
        (core + "k_norm", hf + "k_norm", (width,), "copy"),
        (core + "linear_weights_proj", hf + "weights_proj", (heads, hidden), "copy"),
    ]


LAYERS: dict[str, Callable[[TinyModel, str, int], list[Tensor]]] = {
    "gemma2": four_norms,
    "gemma3": four_norms,
    "glm4": glm4,
    "minimax": minimax,
    "olmoe": olmoe,
}
