"""GLM 4.5 and 4.6, and GLM 4.7 Flash, which is DeepSeek V3's network under another name."""

from typing import Any

from ckpt.arch.deepseek import DEEPSEEK_V3, EMBEDDING, MTP_HEAD
from ckpt.arch.llama import BASE_CONFIG, BASE_EXPECTS, DENSE_MLP, NORMS, QK_NORM, SELF_ATTENTION
from ckpt.arch.moe import MTP, ROUTED, ROUTER, SHARED
from ckpt.arch.table import Architecture, Const

_EXPECTS: dict[str, tuple[Any, ...]] = {
    **{key: value for key, value in BASE_EXPECTS.items() if key != "rotary_percent"},
    "linear_bias": (False,),
    "sliding_window": (None,),
    "is_moe": (True,),
    "moe_is_suffix": (True,),
    "shared_gate": (False,),
    "shared_divides": (True,),
    "router_score": ("sigmoid",),
    "router_bias": (True,),
    "experts_per_group_topk": (None, 2),
}

GLM4_MOE = Architecture(
    name="glm4_moe",
    model_class="Glm4MoeForCausalLM",
    expects=_EXPECTS,
    rules=(
        *EMBEDDING, *NORMS, *SELF_ATTENTION, *QK_NORM, *DENSE_MLP, *ROUTER, *ROUTED, *SHARED, *MTP,
        *MTP_HEAD,
    ),
    config={
        **BASE_CONFIG,
        "model_type": Const("glm4_moe"),
        "rope_parameters": "rope_parameters",
        "partial_rotary_factor": "rotary_percent",
        "attention_bias": "qkv_bias",
        "use_qk_norm": "qk_norm",
        "moe_intermediate_size": "expert_ffn",
        "n_routed_experts": "experts",
        "n_shared_experts": "n_shared_experts",
        "num_experts_per_tok": "router_topk",
        "first_k_dense_replace": "first_dense",
        "n_group": "group_count",
        "topk_group": "group_topk",
        "routed_scaling_factor": "routed_scaling_factor",
        "norm_topk_prob": "normalises_scores",
        "num_nextn_predict_layers": "mtp_kept",
    },
    aliases=("glm4.5", "glm4.6", "glm4.7"),
    proof="logits",
)  # fmt: skip

GLM4_MOE_LITE = Architecture(
    name="glm4_moe_lite",
    model_class="Glm4MoeLiteForCausalLM",
    expects=DEEPSEEK_V3.expects,
    rules=DEEPSEEK_V3.rules,
    config={
        **DEEPSEEK_V3.config,
        "model_type": Const("glm4_moe_lite"),
        # transformers reads the first, vLLM first_k_dense_replace.
        "mlp_layer_types": "mlp_layer_types",
    },
    aliases=("glm4.7_flash",),
    proof="logits",
)
