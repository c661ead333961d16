"""Qwen 2, 2.5 and 3: Llama's block with a QKV bias, or with norms on queries and keys."""

from typing import Any

from ckpt.arch.llama import (
    BASE_CONFIG,
    BASE_EXPECTS,
    DENSE_MLP,
    EMBEDDING,
    HEAD,
    NORMS,
    QK_NORM,
    SELF_ATTENTION,
    H,
    L,
)
from ckpt.arch.moe import ROUTED, ROUTER, shared_experts
from ckpt.arch.table import Architecture, Const, Rule
from ckpt.layout import REPLICATED

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
        "experts": (0,),
        "qk_norm": (False,),
        "qkv_bias": (True,),
        "linear_bias": (False,),
        "sliding_window": (None,),
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
        "experts": (0,),
        "qk_norm": (True,),
        "linear_bias": (False,),
        "sliding_window": (None,),
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
    "mtp_layers": (0,),
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
        **_MOE_EXPECTS,
        "qk_norm": (False,),
        "qkv_bias": (True,),
        "has_shared_expert": (True,),
        "shared_gate": (True,),
    },
    rules=(
        *EMBEDDING, *NORMS, *SELF_ATTENTION, *DENSE_MLP, ROUTER[0], *ROUTED,
        *shared_experts("shared_expert"),
        Rule(L + "mlp.shared_experts.gate_weight", REPLICATED,
             (H + "mlp.shared_expert_gate.weight",), layers="moe", keep_dtype=True),
        *HEAD,
    ),
    config={
        **BASE_CONFIG,
        **_SLIDING,
        **_MOE_CONFIG,
        "model_type": Const("qwen2_moe"),
        "shared_expert_intermediate_size": "shared_ffn",
        "qkv_bias": Const(value=True),
    },
)  # fmt: skip

QWEN3_MOE = Architecture(
    name="qwen3_moe",
    model_class="Qwen3MoeForCausalLM",
    proof="logits",
    expects={
        **BASE_EXPECTS,
        **_MOE_EXPECTS,
        "qk_norm": (True,),
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
