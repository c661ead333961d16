"""Qwen 2, 2.5 and 3, dense: Llama's block with a QKV bias, or with norms on queries and keys."""

from ckpt.arch.llama import (
    BASE_CONFIG,
    BASE_EXPECTS,
    DENSE_MLP,
    EMBEDDING,
    HEAD,
    NORMS,
    QK_NORM,
    SELF_ATTENTION,
)
from ckpt.arch.table import Architecture, Const

_SLIDING = {"use_sliding_window": Const(value=False), "sliding_window": Const(None)}

QWEN2 = Architecture(
    name="qwen2",
    model_class="Qwen2ForCausalLM",
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
