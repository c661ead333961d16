"""MiniMax-M2: every layer with experts, a sigmoid router, norms over all queries and all keys.

Megatron-Bridge cuts those norms as it cuts the heads (minimax_m2_provider.py), so a rank holds
its heads' part. The bias of the router lies beside Hugging Face's gate, not in it.
"""

from ckpt.arch.llama import (
    ATTENTION,
    BASE_CONFIG,
    BASE_EXPECTS,
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
from ckpt.layout import GATE_UP, REPLICATED, ROW, Layout

ALL_QUERIES = Layout(dim=0, rows="query_rows", total="query_rows")
ALL_KEYS = Layout(dim=0, rows="key_rows", total="key_rows")
_X, _HF = L + "mlp.experts.{expert}.", H + "block_sparse_moe."
_HF_X = _HF + "experts.{expert}."

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
        *EMBEDDING, *NORMS, *SELF_ATTENTION,
        Rule(ATTENTION + "q_layernorm.weight", ALL_QUERIES, (HF_ATTENTION + "q_norm.weight",),
             norm=True),
        Rule(ATTENTION + "k_layernorm.weight", ALL_KEYS, (HF_ATTENTION + "k_norm.weight",),
             norm=True),
        Rule(L + "mlp.router.weight", REPLICATED, (_HF + "gate.weight",), layers="moe",
             keep_dtype=True),
        Rule(L + "mlp.router.expert_bias", REPLICATED, (_HF + "e_score_correction_bias",),
             layers="moe", keep_dtype=True),
        Rule(_X + "linear_fc1.weight", GATE_UP, (_HF_X + "w1.weight", _HF_X + "w3.weight"),
             layers="moe"),
        Rule(_X + "linear_fc2.weight", ROW, (_HF_X + "w2.weight",), layers="moe"),
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
