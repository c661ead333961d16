"""Qwen 2, 2.5 and 3: Llama's block with a QKV bias, or with norms on queries and keys."""

from dataclasses import replace
from typing import Any

from ckpt.arch.llama import (
    BASE_CONFIG,
    BASE_EXPECTS,
    DENSE_MLP,
    EMBEDDING,
    HEAD,
    NORMS,
    QK_NORM,
    QKV_WEIGHTS,
    ROPE_OR_YARN,
    SELF_ATTENTION,
    H,
    L,
)
from ckpt.arch.moe import ROUTED, ROUTER, shared_experts
from ckpt.arch.table import Architecture, Const, Rule
from ckpt.layout import COLUMN, REPLICATED, ROW, Cut, Layout

_GATE = Rule(L + "mlp.shared_experts.gate_weight", REPLICATED,
             (H + "mlp.shared_expert_gate.weight",), layers="moe", keep_dtype=True)  # fmt: skip
_SLIDING: dict[str, str | Const] = {
    "use_sliding_window": Const(value=False),
    "sliding_window": Const(None),
}

QWEN2 = Architecture(
    name="qwen2",
    model_class="Qwen2ForCausalLM",
    proof="logits",
    expects={
        **BASE_EXPECTS,
        **ROPE_OR_YARN,
        "experts": (0,),
        "qk_norm": (False,),
        "qkv_bias": (True,),
        "linear_bias": (False,),
        "sliding_window": (None,),
        "mtp_kept": (0,),
    },
    rules=(*EMBEDDING, *NORMS, *SELF_ATTENTION, *DENSE_MLP, *HEAD),
    config={**BASE_CONFIG, **_SLIDING, "model_type": Const("qwen2")},
    aliases=("qwen2.5",),
)

QWEN3 = Architecture(
    name="qwen3",
    model_class="Qwen3ForCausalLM",
    proof="logits",
    expects={
        **BASE_EXPECTS,
        **ROPE_OR_YARN,
        "experts": (0,),
        "qk_norm": (True,),
        "full_qk_norm": (False, None),
        "linear_bias": (False,),
        "sliding_window": (None,),
        "mtp_kept": (0,),
        "qkv_bias": (False,),
    },
    rules=(*EMBEDDING, *NORMS, *SELF_ATTENTION, *QK_NORM, *DENSE_MLP, *HEAD),
    config={
        **BASE_CONFIG,
        **_SLIDING,
        "model_type": Const("qwen3"),
        "attention_bias": Const(value=False),
    },
)

_MOE_EXPECTS: dict[str, tuple[Any, ...]] = {
    "is_moe": (True,),
    "router_score": ("softmax",),
    "router_bias": (False,),
    "router_scale": (None, 1.0),
    "router_groups": (None,),
    "linear_bias": (False,),
    "sliding_window": (None,),
    "mtp_kept": (0,),
}
_MOE_CONFIG: dict[str, str | Const] = {
    "moe_intermediate_size": "expert_ffn",
    "num_experts": "experts",
    "num_experts_per_tok": "router_topk",
    "norm_topk_prob": "norm_topk_prob",
    "decoder_sparse_step": Const(1),
    "mlp_only_layers": "dense_layers",
    "router_aux_loss_coef": "aux_loss",
}

QWEN2_MOE = Architecture(
    name="qwen2_moe",
    model_class="Qwen2MoeForCausalLM",
    expects={
        **BASE_EXPECTS,
        **ROPE_OR_YARN,
        **_MOE_EXPECTS,
        "qk_norm": (False,),
        "qkv_bias": (True,),
        "has_shared_expert": (True,),
        "shared_gate": (True,),
    },
    rules=(
        *EMBEDDING, *NORMS, *SELF_ATTENTION, *DENSE_MLP, ROUTER[0], *ROUTED,
        *shared_experts("shared_expert"), _GATE, *HEAD,
    ),
    config={
        **BASE_CONFIG,
        **_SLIDING,
        **_MOE_CONFIG,
        "model_type": Const("qwen2_moe"),
        "shared_expert_intermediate_size": "shared_ffn",
        "qkv_bias": Const(value=True),
    },
    proof="logits",
)  # fmt: skip

QWEN3_MOE = Architecture(
    name="qwen3_moe",
    model_class="Qwen3MoeForCausalLM",
    proof="logits",
    expects={
        **BASE_EXPECTS,
        **ROPE_OR_YARN,
        **_MOE_EXPECTS,
        "qk_norm": (True,),
        "full_qk_norm": (False, None),
        "qkv_bias": (False,),
        "has_shared_expert": (False,),
    },
    rules=(
        *EMBEDDING, *NORMS, *SELF_ATTENTION, *QK_NORM, *DENSE_MLP, ROUTER[0], *ROUTED, *HEAD,
    ),
    config={
        **BASE_CONFIG,
        **_SLIDING,
        **_MOE_CONFIG,
        "model_type": Const("qwen3_moe"),
        "attention_bias": Const(value=False),
    },
)  # fmt: skip

# megatron/core/ssm/gated_delta_net.py: a rank holds its heads of [q; k; v; z; b; a].
_A, _HF_A, _HF_D = L + "self_attention.", H + "self_attn.", H + "linear_attn."
_IN_PROJ = Layout(
    dim=0,
    cut=Cut.DELTA,
    blocks=(
        "delta_key_rows", "delta_key_rows", "delta_value_rows", "delta_value_rows",
        "delta_value_heads", "delta_value_heads",
    ),
)  # fmt: skip
_CONV = Layout(dim=0, blocks=("delta_key_rows", "delta_key_rows", "delta_value_rows"))
_GATED_ATTENTION = (
    Rule(_A + "linear_qkv.weight", Layout(dim=0, cut=Cut.GATED_QKV), QKV_WEIGHTS,
         layers="attention"),
    Rule(_A + "linear_proj.weight", ROW, (_HF_A + "o_proj.weight",), layers="attention"),
    *(replace(rule, layers="attention") for rule in QK_NORM),
)  # fmt: skip
_DELTA_NET = (
    Rule(_A + "in_proj.weight", _IN_PROJ,
         (_HF_D + "in_proj_qkvz.weight", _HF_D + "in_proj_ba.weight"), layers="linear_attention"),
    Rule(_A + "conv1d.weight", _CONV, (_HF_D + "conv1d.weight",), layers="linear_attention"),
    Rule(_A + "A_log", COLUMN, (_HF_D + "A_log",), layers="linear_attention", keep_dtype=True),
    Rule(_A + "dt_bias", COLUMN, (_HF_D + "dt_bias",), layers="linear_attention",
         keep_dtype=True),
    Rule(_A + "out_norm.weight", REPLICATED, (_HF_D + "norm.weight",), layers="linear_attention",
         norm=True, plain=True),
    Rule(_A + "out_proj.weight", ROW, (_HF_D + "out_proj.weight",), layers="linear_attention"),
)  # fmt: skip
_M = "mtp.layers.{mtp}."
_NEXT_MTP = (
    Rule(_M + "enorm.weight", REPLICATED, ("mtp.pre_fc_norm_embedding.weight",), norm=True),
    Rule(_M + "hnorm.weight", REPLICATED, ("mtp.pre_fc_norm_hidden.weight",), norm=True),
    Rule(_M + "eh_proj.weight", COLUMN, ("mtp.fc.weight",)),
    Rule(_M + "final_layernorm.weight", REPLICATED, ("mtp.norm.weight",), norm=True),
)

QWEN3_NEXT = Architecture(
    name="qwen3_next",
    model_class="Qwen3NextForCausalLM",
    expects={
        **{key: value for key, value in BASE_EXPECTS.items() if key != "rotary_percent"},
        **_MOE_EXPECTS,
        "attention_gate": (True,),
        "linear_attention": ("gated_delta_net",),
        "qk_norm": (True,),
        "full_qk_norm": (False, None),
        "qkv_bias": (False,),
        "has_shared_expert": (True,),
        "shared_gate": (True,),
        "rope_is_scaled": (False,),
        # The class has one layer that predicts the token after the next, with attention.
        "mtp_kept": (0, 1),
        "further_layers_attend": (True,),
    },
    rules=(
        *EMBEDDING, *NORMS, *_GATED_ATTENTION, *_DELTA_NET, *DENSE_MLP, ROUTER[0], *ROUTED,
        *shared_experts("shared_expert"), _GATE, *_NEXT_MTP, *HEAD,
    ),
    config={
        **BASE_CONFIG,
        **_MOE_CONFIG,
        "model_type": Const("qwen3_next"),
        "attention_bias": Const(value=False),
        "partial_rotary_factor": "rotary_percent",
        "shared_expert_intermediate_size": "shared_ffn",
        "layer_types": "layer_types",
        "linear_conv_kernel_dim": "delta_conv_kernel",
        "linear_key_head_dim": "delta_key_dim",
        "linear_value_head_dim": "delta_value_dim",
        "linear_num_key_heads": "delta_key_heads",
        "linear_num_value_heads": "delta_value_heads",
        # vLLM's drafter reads it (model_executor/models/qwen3_next_mtp.py).
        "num_nextn_predict_layers": "mtp_kept",
    },
    norm_adds_one=True,
    understands=frozenset({
        "attention_output_gate", "experimental_attention_variant", "linear_attention_type",
        "linear_attention_freq",
    }),
    mtp_block="mtp.layers.{mtp}.",
    proof="logits",
)  # fmt: skip
