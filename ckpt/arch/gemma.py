"""Gemma 1, 2 and 3 (text): norms that add one, scaled embeddings, gated tanh GELU, tied head.

Gemma 2 and 3 have a norm behind attention and behind the MLP as well; Gemma 2 caps scores and
logits, Gemma 3 norms queries and keys and has a rotary base of its own for local layers.
"""

from typing import Any

from ckpt.arch.llama import (
    BASE_CONFIG,
    BASE_EXPECTS,
    DENSE_MLP,
    EMBEDDING,
    HEAD,
    NO_TOKEN_IDS,
    NORMS,
    QK_NORM,
    SELF_ATTENTION,
    H,
    L,
)
from ckpt.arch.table import Architecture, Const, Rule
from ckpt.layout import REPLICATED

_EXPECTS: dict[str, tuple[Any, ...]] = {
    **BASE_EXPECTS,
    "activation": ("gelu_pytorch_tanh",),
    "scales_embedding": (True, None),
    "experts": (0,),
    "qkv_bias": (False,),
    "linear_bias": (False,),
    "tied": (True,),
    "heads_divide_hidden": (True,),
    "mtp_kept": (0,),
}
_SCALED = {"scales_embedding": "apply_embedding_scaling=true"}
_WINDOWS = {
    "window_layers": "window_size=[W-1,0] and --set interleaved_attn_pattern=[LOCAL,GLOBAL]"
}
_QUERY = {"query_scalar": "query_pre_attn_scalar=NUMBER"}

GEMMA = Architecture(
    name="gemma",
    model_class="GemmaForCausalLM",
    proof="rebuilt",
    expects={**_EXPECTS, "qk_norm": (False,), "sliding_window": (None,)},
    rules=(*EMBEDDING, *NORMS, *SELF_ATTENTION, *DENSE_MLP, *HEAD),
    config={
        **BASE_CONFIG,
        **NO_TOKEN_IDS,
        "model_type": Const("gemma"),
        "hidden_activation": "activation",
        "attention_bias": Const(value=False),
    },
    norm_adds_one=True,
    understands=frozenset({"apply_embedding_scaling"}),
    asks=_SCALED,
)

_FOUR_NORMS = tuple(
    Rule(L + source, REPLICATED, (H + target,), norm=True)
    for source, target in (
        ("input_layernorm.weight", "input_layernorm.weight"),
        ("post_self_attn_layernorm.weight", "post_attention_layernorm.weight"),
        ("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"),
        ("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight"),
    )
)
_UNDERSTANDS = frozenset(
    {
        "apply_embedding_scaling",
        "query_pre_attn_scalar",
        "softmax_scale",
        "window_attn_skip_freq",
        "interleaved_attn_pattern",
    }
)
_CONFIG: dict[str, str | Const] = {
    **{key: value for key, value in BASE_CONFIG.items() if key != "hidden_act"},
    **NO_TOKEN_IDS,
    "hidden_activation": "activation",
    "attention_bias": Const(value=False),
    "query_pre_attn_scalar": "query_scalar",
    "sliding_window": "sliding_window",
    "layer_types": "window_layer_types",
}

GEMMA2 = Architecture(
    name="gemma2",
    model_class="Gemma2ForCausalLM",
    proof="rebuilt",
    expects={
        **_EXPECTS,
        "post_norms": (True,),
        "qk_norm": (False,),
        "query_scalar_is_whole": (True,),
    },
    rules=(*EMBEDDING, *_FOUR_NORMS, *SELF_ATTENTION, *DENSE_MLP, *HEAD),
    config={
        **_CONFIG,
        "model_type": Const("gemma2"),
        "attn_logit_softcapping": "attention_cap",
        "final_logit_softcapping": "logit_cap",
    },
    norm_adds_one=True,
    understands=_UNDERSTANDS | {"attn_logit_softcapping", "final_logit_softcapping"},
    asks={
        **_SCALED,
        **_QUERY,
        "attention_cap": "attn_logit_softcapping=NUMBER (0 for none)",
        "logit_cap": "final_logit_softcapping=NUMBER (0 for none)",
        **_WINDOWS,
    },
)

GEMMA3 = Architecture(
    name="gemma3_text",
    model_class="Gemma3ForCausalLM",
    proof="rebuilt",
    expects={
        **_EXPECTS,
        "post_norms": (True,),
        "qk_norm": (True,),
        "query_scalar_is_whole": (True,),
        "llama3_scaling": (False,),
    },
    rules=(*EMBEDDING, *_FOUR_NORMS, *SELF_ATTENTION, *QK_NORM, *DENSE_MLP, *HEAD),
    config={
        **_CONFIG,
        "model_type": Const("gemma3_text"),
        "rope_local_base_freq": "local_rotary_base",
        "sliding_window_pattern": "window_pattern",
        "attn_logit_softcapping": Const(None),
        "final_logit_softcapping": Const(None),
    },
    norm_adds_one=True,
    understands=_UNDERSTANDS,
    asks={
        **_SCALED,
        **_QUERY,
        "local_rotary_base": "rotary_base=[LOCAL,GLOBAL]",
        **_WINDOWS,
    },
    aliases=("gemma3",),
)
