"""GPT-2, GPT-NeoX and BLOOM: LayerNorm with biases, one key and value for each query head."""

from typing import Any

from ckpt.arch.llama import L
from ckpt.arch.table import Architecture, Const, Rule
from ckpt.layout import COLUMN, REPLICATED, ROW, VOCABULARY, Cut, Layout

A = L + "self_attention."
# Hugging Face's Conv1D stores [in, out]; its fused projection is all queries, keys, values.
FLAT_QKV = Layout(dim=0, cut=Cut.FLAT_QKV, transposed=True)
FLAT_QKV_BIAS = Layout(dim=0, cut=Cut.FLAT_QKV)
COLUMN_T = Layout(dim=0, transposed=True)
ROW_T = Layout(dim=1, transposed=True)

_EXPECTS: dict[str, tuple[Any, ...]] = {
    "normalization": ("LayerNorm",),
    "gated": (False,),
    "linear_bias": (True,),
    "experts": (0,),
    "mla": (False,),
    "qk_norm": (False,),
    "multi_head": (True,),
    "plain_head_dim": (True,),
    "sliding_window": (None,),
}
_SIZES: dict[str, str | Const] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "tie_word_embeddings": "tied",
}

_G = "transformer.h.{layer}."
GPT2 = Architecture(
    name="gpt2",
    model_class="GPT2LMHeadModel",
    proof="logits",
    expects={
        **_EXPECTS,
        "activation": ("gelu", "gelu_new"),
        "positions": ("learned_absolute",),
    },
    rules=(
        Rule("embedding.word_embeddings.weight", VOCABULARY, ("transformer.wte.weight",)),
        Rule("embedding.position_embeddings.weight", REPLICATED, ("transformer.wpe.weight",)),
        Rule(L + "input_layernorm.weight", REPLICATED, (_G + "ln_1.weight",), norm=True),
        Rule(L + "input_layernorm.bias", REPLICATED, (_G + "ln_1.bias",)),
        Rule(A + "linear_qkv.weight", FLAT_QKV, (_G + "attn.c_attn.weight",)),
        Rule(A + "linear_qkv.bias", FLAT_QKV_BIAS, (_G + "attn.c_attn.bias",)),
        Rule(A + "linear_proj.weight", ROW_T, (_G + "attn.c_proj.weight",)),
        Rule(A + "linear_proj.bias", REPLICATED, (_G + "attn.c_proj.bias",)),
        Rule(L + "pre_mlp_layernorm.weight", REPLICATED, (_G + "ln_2.weight",), norm=True),
        Rule(L + "pre_mlp_layernorm.bias", REPLICATED, (_G + "ln_2.bias",)),
        Rule(L + "mlp.linear_fc1.weight", COLUMN_T, (_G + "mlp.c_fc.weight",)),
        Rule(L + "mlp.linear_fc1.bias", COLUMN, (_G + "mlp.c_fc.bias",)),
        Rule(L + "mlp.linear_fc2.weight", ROW_T, (_G + "mlp.c_proj.weight",)),
        Rule(L + "mlp.linear_fc2.bias", REPLICATED, (_G + "mlp.c_proj.bias",)),
        Rule("decoder.final_layernorm.weight", REPLICATED, ("transformer.ln_f.weight",), norm=True),
        Rule("decoder.final_layernorm.bias", REPLICATED, ("transformer.ln_f.bias",)),
        Rule("output_layer.weight", VOCABULARY, ("lm_head.weight",), when="!tied"),
    ),
    config={
        "vocab_size": "vocab_size",
        "tie_word_embeddings": "tied",
        "model_type": Const("gpt2"),
        "n_embd": "hidden_size",
        "n_layer": "layers",
        "n_head": "heads",
        "n_inner": "ffn_hidden_size",
        "n_positions": "max_positions",
        "activation_function": "activation",
        "layer_norm_epsilon": "norm_eps",
        "embd_pdrop": Const(0.0),
        "attn_pdrop": Const(0.0),
        "resid_pdrop": Const(0.0),
    },
    aliases=("gpt",),
)

_N = "gpt_neox.layers.{layer}."
GPT_NEOX = Architecture(
    name="gpt_neox",
    model_class="GPTNeoXForCausalLM",
    expects={
        **_EXPECTS,
        "activation": ("gelu", "gelu_new"),
        "positions": ("rope",),
        "rotary_interleaved": (False,),
    },
    understands=frozenset({"gpt_j_residual"}),
    rules=(
        Rule("embedding.word_embeddings.weight", VOCABULARY, ("gpt_neox.embed_in.weight",)),
        Rule(L + "input_layernorm.weight", REPLICATED, (_N + "input_layernorm.weight",), norm=True),
        Rule(L + "input_layernorm.bias", REPLICATED, (_N + "input_layernorm.bias",)),
        Rule(A + "linear_qkv.weight", COLUMN, (_N + "attention.query_key_value.weight",)),
        Rule(A + "linear_qkv.bias", COLUMN, (_N + "attention.query_key_value.bias",)),
        Rule(A + "linear_proj.weight", ROW, (_N + "attention.dense.weight",)),
        Rule(A + "linear_proj.bias", REPLICATED, (_N + "attention.dense.bias",)),
        Rule(L + "pre_mlp_layernorm.weight", REPLICATED, (_N + "post_attention_layernorm.weight",),
             norm=True),
        Rule(L + "pre_mlp_layernorm.bias", REPLICATED, (_N + "post_attention_layernorm.bias",)),
        Rule(L + "mlp.linear_fc1.weight", COLUMN, (_N + "mlp.dense_h_to_4h.weight",)),
        Rule(L + "mlp.linear_fc1.bias", COLUMN, (_N + "mlp.dense_h_to_4h.bias",)),
        Rule(L + "mlp.linear_fc2.weight", ROW, (_N + "mlp.dense_4h_to_h.weight",)),
        Rule(L + "mlp.linear_fc2.bias", REPLICATED, (_N + "mlp.dense_4h_to_h.bias",)),
        Rule("decoder.final_layernorm.weight", REPLICATED, ("gpt_neox.final_layer_norm.weight",),
             norm=True),
        Rule("decoder.final_layernorm.bias", REPLICATED, ("gpt_neox.final_layer_norm.bias",)),
        Rule("output_layer.weight", VOCABULARY, ("embed_out.weight",), when="!tied"),
    ),
    config={
        **_SIZES,
        "model_type": Const("gpt_neox"),
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
        "max_position_embeddings": "max_positions",
        "layer_norm_eps": "norm_eps",
        "rotary_pct": "rotary_percent",
        "rotary_emb_base": "rotary_base",
        "rope_theta": "rotary_base",
        "rope_scaling": "rope_scaling",
        "partial_rotary_factor": "rotary_percent",
        "use_parallel_residual": "parallel_residual",
        "attention_bias": Const(value=True),
    },
    aliases=("neox", "pythia"),
    proof="logits",
)  # fmt: skip

_B = "transformer.h.{layer}."
BLOOM = Architecture(
    name="bloom",
    model_class="BloomForCausalLM",
    expects={
        **_EXPECTS,
        "activation": ("gelu_new",),
        "positions": ("alibi",),
        "four_times_ffn": (True,),
        "embedding_norm": (True,),
    },
    rules=(
        Rule("embedding.word_embeddings.weight", VOCABULARY,
             ("transformer.word_embeddings.weight",)),
        Rule("embedding.word_embeddings.norm.weight", REPLICATED,
             ("transformer.word_embeddings_layernorm.weight",), norm=True),
        Rule("embedding.word_embeddings.norm.bias", REPLICATED,
             ("transformer.word_embeddings_layernorm.bias",)),
        Rule(L + "input_layernorm.weight", REPLICATED, (_B + "input_layernorm.weight",), norm=True),
        Rule(L + "input_layernorm.bias", REPLICATED, (_B + "input_layernorm.bias",)),
        Rule(A + "linear_qkv.weight", COLUMN, (_B + "self_attention.query_key_value.weight",)),
        Rule(A + "linear_qkv.bias", COLUMN, (_B + "self_attention.query_key_value.bias",)),
        Rule(A + "linear_proj.weight", ROW, (_B + "self_attention.dense.weight",)),
        Rule(A + "linear_proj.bias", REPLICATED, (_B + "self_attention.dense.bias",)),
        Rule(L + "pre_mlp_layernorm.weight", REPLICATED, (_B + "post_attention_layernorm.weight",),
             norm=True),
        Rule(L + "pre_mlp_layernorm.bias", REPLICATED, (_B + "post_attention_layernorm.bias",)),
        Rule(L + "mlp.linear_fc1.weight", COLUMN, (_B + "mlp.dense_h_to_4h.weight",)),
        Rule(L + "mlp.linear_fc1.bias", COLUMN, (_B + "mlp.dense_h_to_4h.bias",)),
        Rule(L + "mlp.linear_fc2.weight", ROW, (_B + "mlp.dense_4h_to_h.weight",)),
        Rule(L + "mlp.linear_fc2.bias", REPLICATED, (_B + "mlp.dense_4h_to_h.bias",)),
        Rule("decoder.final_layernorm.weight", REPLICATED, ("transformer.ln_f.weight",), norm=True),
        Rule("decoder.final_layernorm.bias", REPLICATED, ("transformer.ln_f.bias",)),
        Rule("output_layer.weight", VOCABULARY, ("lm_head.weight",), when="!tied"),
    ),
    config={
        **_SIZES,
        "model_type": Const("bloom"),
        "n_layer": "layers",
        "n_head": "heads",
        "layer_norm_epsilon": "norm_eps",
        "apply_residual_connection_post_layernorm": "residual_post_norm",
        "hidden_dropout": Const(0.0),
        "attention_dropout": Const(0.0),
    },
    understands=frozenset({"apply_residual_connection_post_layernorm"}),
    proof="rebuilt",
)  # fmt: skip
