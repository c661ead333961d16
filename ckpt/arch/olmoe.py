"""OLMoE: every layer with experts, norms over all queries and all keys.

Megatron-Bridge keeps those norms whole on every rank (olmoe_provider.py).
"""

from ckpt.arch.llama import (
    BASE_CONFIG,
    BASE_EXPECTS,
    EMBEDDING,
    HEAD,
    NO_TOKEN_IDS,
    NORMS,
    SELF_ATTENTION,
)
from ckpt.arch.minimax import WHOLE_NORMS
from ckpt.arch.moe import ROUTED, ROUTER
from ckpt.arch.table import Architecture, Const

OLMOE = Architecture(
    name="olmoe",
    model_class="OlmoeForCausalLM",
    proof="rebuilt",
    expects={
        **BASE_EXPECTS,
        "all_moe": (True,),
        "qk_norm": (True,),
        "full_qk_norm": (True, None),
        "plain_head_dim": (True,),
        "qkv_bias": (False,),
        "linear_bias": (False,),
        "sliding_window": (None,),
        "router_score": ("softmax",),
        "router_bias": (False,),
        "router_scale": (None, 1.0),
        "router_groups": (None,),
        "has_shared_expert": (False,),
        "mtp_kept": (0,),
    },
    rules=(
        *EMBEDDING, *NORMS, *SELF_ATTENTION, *WHOLE_NORMS, ROUTER[0], *ROUTED, *HEAD,
    ),
    config={
        **{key: value for key, value in BASE_CONFIG.items() if key != "head_dim"},
        **NO_TOKEN_IDS,
        "model_type": Const("olmoe"),
        "intermediate_size": "expert_ffn",
        "num_experts": "experts",
        "num_experts_per_tok": "router_topk",
        "norm_topk_prob": "norm_topk_prob",
        "router_aux_loss_coef": "aux_loss",
        "clip_qkv": Const(None),
        "attention_bias": Const(value=False),
    },
)  # fmt: skip
