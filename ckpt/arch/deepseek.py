"""Multi-latent attention: DeepSeek V2, V2-Lite, V3 and V3.2, Moonlight, Kimi K2, GLM-5."""

from typing import Any

from ckpt.arch.llama import BASE_CONFIG, BASE_EXPECTS, DENSE_MLP, HEAD, H, L
from ckpt.arch.moe import MTP, ROUTED, ROUTER, SHARED
from ckpt.arch.table import Architecture, Const, Rule
from ckpt.layout import COLUMN, REPLICATED, ROW, VOCABULARY, Cut, Layout

A, HF_A = L + "self_attention.", H + "self_attn."
# TransformerEngine keeps the down projections whole on every rank, the local spec cuts them.
Q_DOWN = Layout(dim=0, rows="q_down_rows")
KV_DOWN = Layout(dim=0, rows="kv_down_rows")
# Fused (FusedMLASelfAttention): a rank holds its share of the one, then its share of the other.
BOTH_DOWN = Layout(dim=0, rows="down_rows", blocks=("q_down_rows", "kv_down_rows"), cut=Cut.BLOCKS)

LATENT_ATTENTION = (
    Rule(L + "input_layernorm.weight", REPLICATED, (H + "input_layernorm.weight",), norm=True),
    Rule(A + "linear_q_proj.weight", COLUMN, (HF_A + "q_proj.weight",), when="!q_lora_rank"),
    Rule(A + "linear_q_down_proj.weight", Q_DOWN, (HF_A + "q_a_proj.weight",),
         when="separate_q_down"),
    Rule(A + "q_layernorm.weight", REPLICATED, (HF_A + "q_a_layernorm.weight",),
         when="q_lora_rank", norm=True),
    Rule(A + "linear_q_up_proj.weight", COLUMN, (HF_A + "q_b_proj.weight",), when="q_lora_rank"),
    Rule(A + "linear_kv_down_proj.weight", KV_DOWN, (HF_A + "kv_a_proj_with_mqa.weight",),
         when="!fused_down"),
    Rule(A + "linear_qkv_down_proj.weight", BOTH_DOWN,
         (HF_A + "q_a_proj.weight", HF_A + "kv_a_proj_with_mqa.weight"), when="fused_down"),
    Rule(A + "kv_layernorm.weight", REPLICATED, (HF_A + "kv_a_layernorm.weight",), norm=True),
    Rule(A + "linear_kv_up_proj.weight", COLUMN, (HF_A + "kv_b_proj.weight",)),
    Rule(A + "linear_proj.weight", ROW, (HF_A + "o_proj.weight",)),
    Rule(L + "pre_mlp_layernorm.weight", REPLICATED, (H + "post_attention_layernorm.weight",),
         norm=True),
)  # fmt: skip
EMBEDDING = (
    Rule("embedding.word_embeddings.weight", VOCABULARY, ("model.embed_tokens.weight",),
         mtp_copies=(H + "embed_tokens.weight",)),
)  # fmt: skip
MTP_HEAD = (
    HEAD[0],
    Rule("output_layer.weight", VOCABULARY, ("lm_head.weight",), when="!tied",
         mtp_copies=(H + "shared_head.head.weight",)),
)  # fmt: skip

CONFIG: dict[str, str | Const] = {
    **{key: value for key, value in BASE_CONFIG.items() if key != "head_dim"},
    "num_key_value_heads": "heads",
    "moe_intermediate_size": "expert_ffn",
    "n_routed_experts": "experts",
    "n_shared_experts": "n_shared_experts",
    "num_experts_per_tok": "router_topk",
    "first_k_dense_replace": "first_dense",
    "moe_layer_freq": Const(1),
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_dim",
    "qk_rope_head_dim": "qk_rope_dim",
    "v_head_dim": "v_head_dim",
    "routed_scaling_factor": "routed_scaling_factor",
    "attention_bias": Const(value=False),
    "aux_loss_alpha": "aux_loss",
    "ep_size": Const(1),
}
EXPECTS: dict[str, tuple[Any, ...]] = {
    **{key: value for key, value in BASE_EXPECTS.items() if key != "rotary_interleaved"},
    "mla": (True,),
    "sliding_window": (None,),
    "qk_norm": (True,),
    "linear_bias": (False,),
    "qkv_bias": (False,),
    "is_moe": (True,),
    "moe_is_suffix": (True,),
    "shared_gate": (False,),
    "shared_divides": (True,),
    "mla_softmax_known": (True,),
    "mla_scales_plainly": (True,),
}

DEEPSEEK_V3 = Architecture(
    name="deepseek_v3",
    model_class="DeepseekV3ForCausalLM",
    proof="logits",
    expects={
        **EXPECTS,
        "router_score": ("sigmoid",),
        "router_bias": (True,),
        "experts_per_group_topk": (None, 2),
    },
    rules=(*EMBEDDING, *LATENT_ATTENTION, *DENSE_MLP, *ROUTER, *ROUTED, *SHARED, *MTP, *MTP_HEAD),
    config={
        **CONFIG,
        "model_type": Const("deepseek_v3"),
        "rope_interleave": Const(value=True),
        "n_group": "group_count",
        "topk_group": "group_topk",
        # transformers does not read these two; vLLM routes by them.
        "scoring_func": Const("sigmoid"),
        "topk_method": Const("noaux_tc"),
        "norm_topk_prob": "normalises_scores",
        "num_nextn_predict_layers": "mtp_kept",
    },
    aliases=("moonlight", "kimi_k2", "deepseek"),
)

_SOFTMAX = (
    "DeepSeek-V2's class in transformers before 5 leaves out YaRN's scale of the softmax; "
    "transformers 5 and vLLM have it"
)
_NORMALISED = (
    "training normalised the chosen experts' weights (norm_topk_prob); vLLM does so too, "
    "transformers 5's DeepSeek V2 does not and answers otherwise"
)
DEEPSEEK_V2 = Architecture(
    name="deepseek_v2",
    model_class="DeepseekV2ForCausalLM",
    expects={
        **EXPECTS,
        "router_score": ("softmax",),
        "router_bias": (False,),
        "experts_per_group_topk": (None, 1),
        "mtp_kept": (0,),
        "heads_divide_hidden": (True,),
    },
    rules=(*EMBEDDING, *LATENT_ATTENTION, *DENSE_MLP, *ROUTER, *ROUTED, *SHARED, *HEAD),
    config={
        **CONFIG,
        "model_type": Const("deepseek_v2"),
        "n_group": "group_count",
        "topk_group": "group_topk",
        "scoring_func": Const("softmax"),
        "topk_method": "v2_topk_method",
        # transformers 5's own class does not read this one; vLLM and DeepSeek's code do.
        "norm_topk_prob": "norm_topk_prob",
    },
    aliases=("deepseek_v2_lite",),
    proof="logits",
    cautions=(("normalises_topk", _NORMALISED), ("yarn_scales_softmax", _SOFTMAX)),
)

_I, _HF_I = A + "core_attention.indexer.", HF_A + "indexer."
INDEXER = (
    Rule(_I + "linear_wq_b.weight", REPLICATED, (_HF_I + "wq_b.weight",)),
    Rule(_I + "linear_wk.weight", REPLICATED, (_HF_I + "wk.weight",)),
    Rule(_I + "k_norm.weight", REPLICATED, (_HF_I + "k_norm.weight",), norm=True),
    Rule(_I + "k_norm.bias", REPLICATED, (_HF_I + "k_norm.bias",)),
    Rule(_I + "linear_weights_proj.weight", REPLICATED, (_HF_I + "weights_proj.weight",),
         keep_dtype=True),
)  # fmt: skip
_SPARSE_EXPECTS: dict[str, tuple[Any, ...]] = {
    **DEEPSEEK_V3.expects,
    "sparse_attention": (True,),
    "has_q_lora": (True,),
    "indexer_norm_eps": (1e-6,),
}
_SPARSE_CONFIG: dict[str, str | Const] = {
    **DEEPSEEK_V3.config,
    "index_n_heads": "indexer_heads",
    "index_head_dim": "indexer_head_dim",
    "index_topk": "indexer_topk",
}
_UNDERSTANDS = frozenset({"experimental_attention_variant"})

DEEPSEEK_V32 = Architecture(
    name="deepseek_v32",
    model_class="DeepseekV32ForCausalLM",
    proof="rebuilt",
    expects={**_SPARSE_EXPECTS, "indexer_interleaved": (False, None)},
    rules=(*DEEPSEEK_V3.rules, *INDEXER),
    config={
        **_SPARSE_CONFIG,
        "model_type": Const("deepseek_v32"),
        "indexer_rope_interleave": Const(value=False),
    },
    understands=_UNDERSTANDS,
    # Before Megatron-Core 0.19 the indexer turned other rows and saw queries before their norm.
    asks={
        "indexer_interleaved": "dsa_indexer_rope_interleaved=false (true for GLM-5), if Megatron-"
        "Core was 0.19 or newer; older ones computed what no Hugging Face class does"
    },
)

GLM_MOE_DSA = Architecture(
    name="glm_moe_dsa",
    model_class="GlmMoeDsaForCausalLM",
    proof="rebuilt",
    expects={**_SPARSE_EXPECTS, "indexer_interleaved": (True,)},
    rules=(*DEEPSEEK_V3.rules, *INDEXER),
    config={
        **_SPARSE_CONFIG,
        "model_type": Const("glm_moe_dsa"),
        "indexer_rope_interleave": Const(value=True),
        "index_topk_freq": Const(1),
    },
    understands=_UNDERSTANDS,
    aliases=("glm5",),
)
