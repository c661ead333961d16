"""Llama 2 and 3 and Mistral: RMSNorm, rotary positions, grouped queries, gated MLP."""

from typing import Any

from ckpt.arch.table import Architecture, Const, Rule
from ckpt.layout import GATE_UP, QKV, REPLICATED, ROW, VOCABULARY, Layout

L, H = "decoder.layers.{layer}.", "model.layers.{layer}."
ATTENTION, HF_ATTENTION = L + "self_attention.", H + "self_attn."
QKV_WEIGHTS = tuple(HF_ATTENTION + f"{part}_proj.weight" for part in "qkv")
QKV_BIASES = tuple(HF_ATTENTION + f"{part}_proj.bias" for part in "qkv")
GATE_UP_WEIGHTS = (H + "mlp.gate_proj.weight", H + "mlp.up_proj.weight")
GATE_UP_BIASES = (H + "mlp.gate_proj.bias", H + "mlp.up_proj.bias")

EMBEDDING = (Rule("embedding.word_embeddings.weight", VOCABULARY, ("model.embed_tokens.weight",)),)
NORMS = (
    Rule(L + "input_layernorm.weight", REPLICATED, (H + "input_layernorm.weight",), norm=True),
    Rule(
        L + "pre_mlp_layernorm.weight",
        REPLICATED,
        (H + "post_attention_layernorm.weight",),
        norm=True,
    ),
)
SELF_ATTENTION = (
    Rule(ATTENTION + "linear_qkv.weight", QKV, QKV_WEIGHTS),
    Rule(ATTENTION + "linear_qkv.bias", QKV, QKV_BIASES, when="qkv_bias"),
    Rule(ATTENTION + "linear_proj.weight", ROW, (HF_ATTENTION + "o_proj.weight",)),
)
OUTPUT_BIAS = (
    Rule(ATTENTION + "linear_proj.bias", REPLICATED, (HF_ATTENTION + "o_proj.bias",),
         when="linear_bias"),
)  # fmt: skip
ONE_HEAD = Layout(total="head_dim")
QK_NORM = (
    Rule(ATTENTION + "q_layernorm.weight", ONE_HEAD, (HF_ATTENTION + "q_norm.weight",),
         when="qk_norm", norm=True),
    Rule(ATTENTION + "k_layernorm.weight", ONE_HEAD, (HF_ATTENTION + "k_norm.weight",),
         when="qk_norm", norm=True),
)  # fmt: skip
DENSE_MLP = (
    Rule(L + "mlp.linear_fc1.weight", GATE_UP, GATE_UP_WEIGHTS, layers="dense"),
    Rule(L + "mlp.linear_fc2.weight", ROW, (H + "mlp.down_proj.weight",), layers="dense"),
)
MLP_BIAS = (
    Rule(L + "mlp.linear_fc1.bias", GATE_UP, GATE_UP_BIASES, when="linear_bias", layers="dense"),
    Rule(L + "mlp.linear_fc2.bias", REPLICATED, (H + "mlp.down_proj.bias",), when="linear_bias",
         layers="dense"),
)  # fmt: skip
HEAD = (
    Rule("decoder.final_layernorm.weight", REPLICATED, ("model.norm.weight",), norm=True),
    Rule("output_layer.weight", VOCABULARY, ("lm_head.weight",), when="!tied"),
)

BASE_CONFIG: dict[str, str | Const] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "groups",
    "head_dim": "head_dim",
    "hidden_act": "activation",
    "max_position_embeddings": "yarn_max_positions",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rotary_base",
    "rope_scaling": "rope_scaling",
    "tie_word_embeddings": "tied",
    "attention_dropout": Const(0.0),
    "initializer_range": Const(0.02),
    "use_cache": Const(value=True),
}
# Where the class assumes ids of its first tokenizer; a tokenizer that is given replaces these.
NO_TOKEN_IDS: dict[str, str | Const] = {
    "bos_token_id": Const(None),
    "eos_token_id": Const(None),
    "pad_token_id": Const(None),
}
BASE_EXPECTS: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "gated": (True,),
    "activation": ("silu",),
    "positions": ("rope",),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "mla": (False,),
    "post_norms": (False,),
}
# Megatron's YaRN turns whole heads, as do the classes of these families.
ROPE_OR_YARN: dict[str, tuple[Any, ...]] = {"positions": ("rope", "yarn")}

LLAMA = Architecture(
    name="llama",
    model_class="LlamaForCausalLM",
    proof="logits",
    expects={
        **BASE_EXPECTS,
        **ROPE_OR_YARN,
        "experts": (0,),
        "qk_norm": (False,),
        "qkv_bias_alone": (False,),
        "fits_llama_class": (True,),
        "mtp_kept": (0,),
        "sliding_window": (None,),
    },
    rules=(
        *EMBEDDING, *NORMS, *SELF_ATTENTION, *OUTPUT_BIAS, *DENSE_MLP, *MLP_BIAS, *HEAD,
    ),
    config={
        **BASE_CONFIG,
        "model_type": Const("llama"),
        "attention_bias": "linear_bias",
        "mlp_bias": "linear_bias",
    },
    aliases=("llama2", "llama3"),
)  # fmt: skip

MISTRAL = Architecture(
    name="mistral",
    model_class="MistralForCausalLM",
    proof="logits",
    expects={
        **BASE_EXPECTS,
        **ROPE_OR_YARN,
        "experts": (0,),
        "qk_norm": (False,),
        "qkv_bias": (False,),
        "linear_bias": (False,),
        "mtp_kept": (0,),
    },
    rules=(*EMBEDDING, *NORMS, *SELF_ATTENTION, *DENSE_MLP, *HEAD),
    config={
        **BASE_CONFIG,
        "model_type": Const("mistral"),
        "sliding_window": "sliding_window",
    },
)

_X, _HF_X = L + "mlp.experts.{expert}.", H + "block_sparse_moe.experts.{expert}."
BLOCK_SPARSE = (
    Rule(L + "mlp.router.weight", REPLICATED, (H + "block_sparse_moe.gate.weight",),
         layers="moe", keep_dtype=True),
    Rule(_X + "linear_fc1.weight", GATE_UP, (_HF_X + "w1.weight", _HF_X + "w3.weight"),
         layers="moe"),
    Rule(_X + "linear_fc2.weight", ROW, (_HF_X + "w2.weight",), layers="moe"),
)  # fmt: skip
MIXTRAL = Architecture(
    name="mixtral",
    model_class="MixtralForCausalLM",
    proof="logits",
    expects={
        **BASE_EXPECTS,
        **ROPE_OR_YARN,
        "all_moe": (True,),
        "qk_norm": (False,),
        "qkv_bias": (False,),
        "linear_bias": (False,),
        "router_score": ("softmax",),
        "router_pre_softmax": (False,),
        "router_bias": (False,),
        "router_scale": (None, 1.0),
        "router_groups": (None,),
        "shared_ffn": (None,),
        "mtp_kept": (0,),
    },
    rules=(
        *EMBEDDING, *NORMS, *SELF_ATTENTION, *BLOCK_SPARSE, *HEAD,
    ),
    config={
        **BASE_CONFIG,
        "model_type": Const("mixtral"),
        "intermediate_size": "expert_ffn",
        "num_local_experts": "experts",
        "num_experts_per_tok": "router_topk",
        "router_aux_loss_coef": "aux_loss",
        "sliding_window": "sliding_window",
    },
)  # fmt: skip
