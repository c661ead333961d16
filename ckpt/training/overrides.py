"""Training arguments that the user gives by hand."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckpt.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Mapping

# What must be known of a model whose checkpoint says nothing: each of these changes the numbers,
# and no tensor shows its value. The second column is the argument that makes it matter.
_DECISIVE: tuple[tuple[str, str | None], ...] = (
    ("num_layers", None),
    ("hidden_size", None),
    ("ffn_hidden_size", None),
    ("num_attention_heads", None),
    ("num_query_groups", None),
    ("vocab_size", None),
    ("max_position_embeddings", None),
    ("position_embedding_type", None),
    ("rotary_base", None),
    ("rotary_percent", None),
    ("rotary_interleaved", None),
    ("use_rope_scaling", None),
    ("rope_scaling_factor", "use_rope_scaling"),
    ("normalization", None),
    ("layernorm_epsilon", None),
    ("layernorm_zero_centered_gamma", None),
    ("swiglu", None),
    ("add_bias_linear", None),
    ("add_qkv_bias", None),
    ("qk_layernorm", None),
    ("untie_embeddings_and_output_weights", None),
    ("window_size", None),
    ("multi_latent_attention", None),
    ("q_lora_rank", "multi_latent_attention"),
    ("kv_lora_rank", "multi_latent_attention"),
    ("qk_head_dim", "multi_latent_attention"),
    ("qk_pos_emb_head_dim", "multi_latent_attention"),
    ("v_head_dim", "multi_latent_attention"),
    ("rope_type", "multi_latent_attention"),
    ("rotary_scaling_factor", "multi_latent_attention"),
    ("mscale", "multi_latent_attention"),
    ("mscale_all_dim", "multi_latent_attention"),
    ("original_max_position_embeddings", "multi_latent_attention"),
    ("beta_fast", "multi_latent_attention"),
    ("beta_slow", "multi_latent_attention"),
    ("num_experts", None),
    ("moe_layer_freq", "num_experts"),
    ("moe_ffn_hidden_size", "num_experts"),
    ("moe_router_topk", "num_experts"),
    ("moe_router_score_function", "num_experts"),
    ("moe_router_pre_softmax", "num_experts"),
    ("moe_router_enable_expert_bias", "num_experts"),
    ("moe_router_num_groups", "num_experts"),
    ("moe_router_group_topk", "num_experts"),
    ("moe_router_topk_scaling_factor", "num_experts"),
    ("moe_shared_expert_intermediate_size", "num_experts"),
)


def parse_overrides(texts: tuple[str, ...]) -> dict[str, Any]:
    """Training arguments given as ``NAME=VALUE``; the value is read as YAML.

    Raises OptionsError for a text without ``=``.
    """
    values = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise OptionsError("--set needs NAME=VALUE", found=text)
        values[name] = _plain_value(text, value)
    return values


def lacking_arguments(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Arguments that must be given where a checkpoint stores none, and that ``values`` lacks."""
    return tuple(
        name
        for name, only_with in _DECISIVE
        if name not in values and (only_with is None or values.get(only_with))
    )


def _plain_value(text: str, value: str) -> object:
    import yaml  # noqa: PLC0415 - only where an argument is given by hand

    try:
        found: object = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise OptionsError("--set needs NAME=VALUE with a value in YAML", found=text) from error
    if isinstance(found, str):
        with suppress(ValueError):  # YAML 1.1 takes 1e6 for text
            return float(found)
    return found
