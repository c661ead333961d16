"""Nemotron-4 and Minitron; Nemotron-H and Nemotron-3, whose layers are one block each.

Their MLPs have a squared ReLU and no gate. Nemotron-4's norms are LayerNorms with gains stored as
distance from 1. Nemotron-H's layers are Mamba-2, attention without positions, MLP or experts, each
with one norm; Hugging Face's names of it on disk begin with ``backbone.``.
"""

from ckpt.arch.llama import ATTENTION, BASE_CONFIG, EMBEDDING, HEAD, NORMS, H, L
from ckpt.arch.llama import SELF_ATTENTION as LLAMA_ATTENTION
from ckpt.arch.table import Architecture, Const, Rule
from ckpt.layout import COLUMN, QKV, REPLICATED, ROW, VOCABULARY, Layout

_H = "backbone.layers.{layer}."
_X = _H + "mixer."
_NORM = (_H + "norm.weight",)
# megatron/core/ssm/mamba_mixer.py: a rank holds its heads and groups of [z; x; B; C; dt].
_IN_PROJ = Layout(
    dim=0,
    blocks=("mamba_rows", "mamba_rows", "mamba_group_rows", "mamba_group_rows", "mamba_heads"),
)
_CONV = Layout(dim=0, blocks=("mamba_rows", "mamba_group_rows", "mamba_group_rows"))

_M = L + "mixer."
MAMBA = (
    Rule(L + "norm.weight", REPLICATED, _NORM, layers="mamba", norm=True),
    Rule(_M + "in_proj.weight", _IN_PROJ, (_X + "in_proj.weight",), layers="mamba"),
    Rule(_M + "conv1d.weight", _CONV, (_X + "conv1d.weight",), layers="mamba"),
    Rule(_M + "conv1d.bias", _CONV, (_X + "conv1d.bias",), layers="mamba"),
    Rule(_M + "A_log", COLUMN, (_X + "A_log",), layers="mamba", keep_dtype=True),
    Rule(_M + "D", COLUMN, (_X + "D",), layers="mamba", keep_dtype=True),
    Rule(_M + "dt_bias", COLUMN, (_X + "dt_bias",), layers="mamba", keep_dtype=True),
    # Not one of Megatron's norms, so its gain is never stored as distance from 1.
    Rule(_M + "norm.weight", COLUMN, (_X + "norm.weight",), layers="mamba"),
    Rule(_M + "out_proj.weight", ROW, (_X + "out_proj.weight",), layers="mamba"),
)
SELF_ATTENTION = (
    Rule(L + "input_layernorm.weight", REPLICATED, _NORM, layers="attention", norm=True),
    Rule(ATTENTION + "linear_qkv.weight", QKV,
         tuple(_X + f"{part}_proj.weight" for part in "qkv"), layers="attention"),
    Rule(ATTENTION + "linear_proj.weight", ROW, (_X + "o_proj.weight",), layers="attention"),
)  # fmt: skip
MLP = (
    Rule(L + "pre_mlp_layernorm.weight", REPLICATED, _NORM, layers="dense", norm=True),
    Rule(L + "mlp.linear_fc1.weight", COLUMN, (_X + "up_proj.weight",), layers="dense"),
    Rule(L + "mlp.linear_fc2.weight", ROW, (_X + "down_proj.weight",), layers="dense"),
)
_S, _E = L + "mlp.shared_experts.", L + "mlp.experts.{expert}."
EXPERTS = (
    Rule(L + "pre_mlp_layernorm.weight", REPLICATED, _NORM, layers="moe", norm=True),
    Rule(L + "mlp.router.weight", REPLICATED, (_X + "gate.weight",), layers="moe",
         keep_dtype=True),
    Rule(L + "mlp.router.expert_bias", REPLICATED, (_X + "gate.e_score_correction_bias",),
         layers="moe", keep_dtype=True),
    Rule(L + "mlp.fc1_latent_proj.weight", REPLICATED, (_X + "fc1_latent_proj.weight",),
         when="moe_latent", layers="moe"),
    Rule(L + "mlp.fc2_latent_proj.weight", REPLICATED, (_X + "fc2_latent_proj.weight",),
         when="moe_latent", layers="moe"),
    Rule(_E + "linear_fc1.weight", COLUMN, (_X + "experts.{expert}.up_proj.weight",),
         layers="moe"),
    Rule(_E + "linear_fc2.weight", ROW, (_X + "experts.{expert}.down_proj.weight",),
         layers="moe"),
    Rule(_S + "linear_fc1.weight", COLUMN, (_X + "shared_experts.up_proj.weight",), layers="moe"),
    Rule(_S + "linear_fc2.weight", ROW, (_X + "shared_experts.down_proj.weight",), layers="moe"),
)  # fmt: skip

NEMOTRON_H = Architecture(
    name="nemotron_h",
    model_class="NemotronHForCausalLM",
    expects={
        "is_hybrid": (True,),
        "has_mamba": (True,),
        "normalization": ("RMSNorm",),
        # The gated norm of Mamba has 1e-5 in Megatron, and the class has one epsilon for all.
        "norm_eps": (1e-5,),
        "gated": (False,),
        "activation": ("relu2",),
        "positions": ("none",),
        "mla": (False,),
        "qk_norm": (False,),
        "qkv_bias": (False,),
        "linear_bias": (False,),
        "sliding_window": (None,),
        "tied": (False,),
        "experts_are_known": (True,),
        "shared_gate": (False,),
        "experts_per_group_topk": (None, 2),
        "mtp_kept": (0,),
    },
    rules=(
        Rule("embedding.word_embeddings.weight", VOCABULARY, ("backbone.embeddings.weight",)),
        *MAMBA, *SELF_ATTENTION, *MLP, *EXPERTS,
        Rule("decoder.final_layernorm.weight", REPLICATED, ("backbone.norm_f.weight",), norm=True),
        Rule("output_layer.weight", VOCABULARY, ("lm_head.weight",)),
    ),
    config={
        "model_type": Const("nemotron_h"),
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_hidden_layers": "layers",
        "hybrid_override_pattern": "hybrid_pattern",
        "num_attention_heads": "heads",
        "num_key_value_heads": "groups",
        "head_dim": "head_dim",
        "max_position_embeddings": "max_positions",
        "layer_norm_epsilon": "norm_eps",
        "mlp_hidden_act": Const("relu2"),
        "attention_bias": Const(value=False),
        "mlp_bias": Const(value=False),
        "use_bias": Const(value=False),
        "tie_word_embeddings": "tied",
        "mamba_num_heads": "mamba_heads",
        "mamba_head_dim": "mamba_head_dim",
        "mamba_hidden_act": Const("silu"),
        "n_groups": "mamba_groups",
        "ssm_state_size": "mamba_state",
        "conv_kernel": Const(4),
        "use_conv_bias": Const(value=True),
        "expand": Const(2),
        "chunk_size": Const(128),
        # transformers clamps the time step to at least this; Megatron does not clamp.
        "time_step_min": Const(1e-30),
        "residual_in_fp32": Const(value=False),
        "n_routed_experts": "experts",
        "n_shared_experts": Const(1),
        "moe_intermediate_size": "expert_ffn",
        "moe_shared_expert_intermediate_size": "shared_ffn_or_0",
        "moe_latent_size": "moe_latent",
        "num_experts_per_tok": "router_topk",
        "routed_scaling_factor": "routed_scaling_factor",
        "norm_topk_prob": "normalises_scores",
        "n_group": "group_count",
        "topk_group": "group_topk",
        "num_nextn_predict_layers": Const(0),
        "attention_dropout": Const(0.0),
        "initializer_range": Const(0.02),
        "use_cache": Const(value=True),
    },
    understands=frozenset({
        "hybrid_layer_pattern", "hybrid_override_pattern", "hybrid_attention_ratio",
        "hybrid_mlp_ratio", "is_hybrid_model", "moe_latent_size",
        "mtp_use_repeated_layer",  # no layer that predicts a further token is written
    }),
    aliases=("nemotron_3", "nemotron3"),
    proof="rebuilt",
)  # fmt: skip

NEMOTRON = Architecture(
    name="nemotron",
    model_class="NemotronForCausalLM",
    expects={
        "normalization": ("LayerNorm",),
        "gated": (False,),
        "activation": ("relu2",),
        "positions": ("rope",),
        "rotary_interleaved": (False,),
        "rope_is_scaled": (False,),
        "experts": (0,),
        "mla": (False,),
        "qk_norm": (False,),
        "qkv_bias": (False,),
        "linear_bias": (False,),
        "sliding_window": (None,),
    },
    rules=(
        *EMBEDDING, *NORMS, *LLAMA_ATTENTION,
        Rule(L + "input_layernorm.bias", REPLICATED, (H + "input_layernorm.bias",)),
        Rule(L + "pre_mlp_layernorm.bias", REPLICATED, (H + "post_attention_layernorm.bias",)),
        Rule(L + "mlp.linear_fc1.weight", COLUMN, (H + "mlp.up_proj.weight",)),
        Rule(L + "mlp.linear_fc2.weight", ROW, (H + "mlp.down_proj.weight",)),
        Rule("decoder.final_layernorm.bias", REPLICATED, ("model.norm.bias",)),
        *HEAD,
    ),
    config={
        **{key: value for key, value in BASE_CONFIG.items() if key != "rms_norm_eps"},
        "model_type": Const("nemotron"),
        "norm_eps": "norm_eps",
        "partial_rotary_factor": "rotary_percent",
        "attention_bias": Const(value=False),
        "mlp_bias": Const(value=False),
    },
    norm_adds_one=True,
    aliases=("nemotron_4", "nemotron4", "minitron"),
    proof="logits",
)  # fmt: skip
