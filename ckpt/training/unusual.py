"""Training arguments that change what the model computes and that most families do not have.

Each is refused unless the family's table says that it understands the argument: a setting
that is overlooked gives a model that loads and answers wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# The argument, the values that mean "not used", and what it does (transformer_config.py).
UNUSUAL: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("softmax_type", (None, "vanilla"), "a learned sink in each attention head"),
    ("softmax_scale", (None,), "a softmax scale of its own"),
    ("query_pre_attn_scalar", (None,), "a softmax scale of its own"),
    ("attn_logit_softcapping", (None, 0, 0.0), "capped attention scores"),
    ("final_logit_softcapping", (None, 0, 0.0), "capped logits"),
    ("apply_embedding_scaling", (None, False), "embeddings times the root of their size"),
    ("interleaved_attn_pattern", (None,), "sliding windows in some layers only"),
    ("window_attn_skip_freq", (None, 0), "sliding windows in some layers only"),
    ("no_rope_freq", (None, 0), "layers without rotary positions"),
    ("mrope_section", (None,), "rotary positions in sections"),
    ("qk_l2_norm", (None, False), "queries and keys scaled to length 1"),
    ("attention_output_gate", (None, False), "a gate on attention's output"),
    ("experimental_attention_variant", (None,), "another kind of attention"),
    ("dsa_indexer_topk_freq", (None, 1), "an indexer in some layers only"),
    ("dsa_indexer_scoring_relu", (None, True), "indexer scores of either sign"),
    ("linear_attention_type", (None,), "linear attention"),
    ("linear_attention_freq", (None, 0), "linear attention in some layers"),
    ("hybrid_layer_pattern", (None, ""), "layers of several kinds"),
    ("hybrid_override_pattern", (None, ""), "layers of several kinds"),
    ("hybrid_attention_ratio", (None, 0, 0.0), "layers of several kinds"),
    ("hybrid_mlp_ratio", (None, 0, 0.0), "layers of several kinds"),
    ("is_hybrid_model", (None, False), "layers of several kinds"),
    ("heterogeneous_block_specs", (None, False), "a size of its own for each layer"),
    ("heterogeneous_layers_config_path", (None, ""), "a size of its own for each layer"),
    ("heterogeneous_layers_config_encoded_json", (None, ""), "a size of its own for each layer"),
    ("enable_mhc_connections", (None, False), "several residual streams"),
    ("apply_residual_connection_post_layernorm", (None, False), "residuals taken after the norm"),
    ("gpt_j_residual", (None, False), "attention and MLP side by side on one residual"),
    ("use_mup", (None, False), "multipliers of maximal-update parametrisation"),
    ("enable_gpt_oss", (None, False), "ModelOpt's own rotary positions, which are not stored"),
    ("glu_linear_offset", (None, 0, 0.0), "an offset in the gated MLP"),
    ("activation_func_clamp_value", (None,), "a clamped activation"),
    ("moe_mlp_glu_interleave_size", (None, 0), "gate and up rows in turns"),
    ("moe_shared_expert_glu_interleave_size", (None, 0), "gate and up rows in turns"),
    ("moe_latent_size", (None, 0), "experts in a latent space"),
    ("moe_apply_probs_on_input", (None, False), "router weights on the experts' input"),
    ("moe_router_topk_limited_devices", (None, 0), "routing limited to some devices"),
    ("moe_router_force_load_balancing", (None, False), "random routing for benchmarks"),
    ("moe_router_force_biased", (None, False, 0, 0.0), "biased routing for benchmarks"),
    ("moe_extended_tp", (None, False), "experts cut over all tensor and expert ranks"),
    ("mtp_use_repeated_layer", (None, False), "one layer for several further tokens"),
    ("retro_add_retriever", (None, False), "a retriever in the model"),
    ("use_engram", (None, False), "n-gram memories"),
)
# Read elsewhere than through the fields of the architecture.
ALSO_READ = frozenset({
    "mla_softmax_mscale", "moe_router_load_balancing_type", "moe_expert_capacity_factor",
    "checkpoint_version",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size",
})  # fmt: skip
_SINKHORN = "moe_router_load_balancing_type"


def unusual_arguments(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """(argument, its value and meaning) for each one in use, in the order of the table."""
    found = [
        (name, f"{name}={values[name]!r:.40} ({meaning})")
        for name, plain, meaning in UNUSUAL
        if name in values and not any(_same(values[name], value) for value in plain)
    ]
    balancing = values.get(_SINKHORN)
    if balancing == "sinkhorn" or (isinstance(balancing, list) and "sinkhorn" in balancing):
        found.append((_SINKHORN, f"{_SINKHORN}='sinkhorn' (routing by Sinkhorn's algorithm)"))
    return tuple(found)


def _same(value: object, plain: object) -> bool:
    return value is plain or (type(value) is type(plain) and value == plain)


def warnings(values: Mapping[str, Any]) -> tuple[str, ...]:
    """What the converted model does otherwise than training, though its weights are the same."""
    factor = values.get("moe_expert_capacity_factor")
    if factor is None or not values.get("num_experts"):
        return ()
    line = f"training dropped tokens beyond an expert's capacity (factor {factor}); the converted "
    return (line + "model never drops one, so its answers differ where training did",)
