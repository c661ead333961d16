"""MiniMax-M2: every layer with experts, a sigmoid router, norms over all queries and all keys.

Megatron-Bridge cuts those norms as it cuts the heads (minimax_m2_provider.py), so a rank holds
its heads' part. The bias of the router lies beside Hugging Face's gate, not in it.
"""

from ckpt.arch.llama import (
    ATTENTION,
    BASE_CONFIG,
    BASE_EXPECTS,
    BLOCK_SPARSE,
    EMBEDDING,
    HEAD,
    HF_ATTENTION,
    NO_TOKEN_IDS,
    NORMS,
    SELF_ATTENTION,
    H,
    L,
)
from ckpt.arch.table import Architecture, Const, Rule
from ckpt.layout import REPLICATED, Layout

ALL_QUERIES = Layout(dim=0, rows="query_rows", total="query_rows")
ALL_KEYS = Layout(dim=0, rows="key_rows", total="key_rows")
# Norms over the queries, and the keys, of all heads together.
WHOLE_NORMS = (
    Rule(ATTENTION + "q_layernorm.weight", ALL_QUERIES, (HF_ATTENTION + "q_norm.weight",),
         norm=True),
    Rule(ATTENTION + "k_layernorm.weight", ALL_KEYS, (HF_ATTENTION + "k_norm.weight",),
         norm=True),
)  # fmt: skip

MINIMAX_M2 = Architecture(
    name="minimax_m2",
    model_class="MiniMaxM2ForCausalLM",
    proof="rebuilt",
    expects={
        **{key: value for key, value in BASE_EXPECTS.items() if key != "rotary_percent"},
        "all_moe": (True,),
        "qk_norm": (True,),
        "full_qk_norm": (True, None),
        "qkv_bias": (False,),
        "linear_bias": (False,),
        "sliding_window": (None,),
        "router_score": ("sigmoid",),
        "router_bias": (True,),
        "router_scale": (None, 1.0),
        "router_groups": (None, 1),
        "normalises_scores": (True,),
        "has_shared_expert": (False,),
        "mtp_kept": (0,),
    },
    rules=(
        *EMBEDDING, *NORMS, *SELF_ATTENTION, *WHOLE_NORMS,
        BLOCK_SPARSE[0],
        Rule(L + "mlp.router.expert_bias", REPLICATED,
             (H + "block_sparse_moe.e_score_correction_bias",), layers="moe", keep_dtype=True),
        *BLOCK_SPARSE[1:],
        *HEAD,
    ),
    config={
        **BASE_CONFIG,
        **NO_TOKEN_IDS,
        "model_type": Const("minimax_m2"),
        "intermediate_size": "expert_ffn",
        "num_local_experts": "experts",
        "num_experts_per_tok": "router_topk",
        "router_aux_loss_coef": "aux_loss",
        "rotary_dim": "rotary_dim",
        "partial_rotary_factor": "rotary_percent",
        # transformers does not read these; vLLM and the release's own code do.
        "scoring_func": Const("sigmoid"),
        "use_routing_bias": Const(value=True),
        "use_qk_norm": Const(value=True),
        "qk_norm_type": Const("per_layer"),
        "attention_bias": Const(value=False),
        "num_mtp_modules": Const(0),
    },
    aliases=("minimax", "minimax_m2.5"),
)  # fmt: skip
