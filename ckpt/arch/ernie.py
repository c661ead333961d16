"""ERNIE 4.5 (dense): Llama's tensors, but rotary positions turn neighbouring pairs."""

from ckpt.arch.llama import (
    BASE_CONFIG,
    BASE_EXPECTS,
    DENSE_MLP,
    EMBEDDING,
    HEAD,
    MLP_BIAS,
    NO_TOKEN_IDS,
    NORMS,
    OUTPUT_BIAS,
    SELF_ATTENTION,
)
from ckpt.arch.table import Architecture, Const

ERNIE45 = Architecture(
    name="ernie4_5",
    model_class="Ernie4_5ForCausalLM",
    proof="logits",
    expects={
        **BASE_EXPECTS,
        "rotary_interleaved": (True,),
        "experts": (0,),
        "qk_norm": (False,),
        "qkv_bias_alone": (False,),
        "sliding_window": (None,),
        "mtp_kept": (0,),
    },
    rules=(
        *EMBEDDING, *NORMS, *SELF_ATTENTION, *OUTPUT_BIAS, *DENSE_MLP, *MLP_BIAS, *HEAD,
    ),
    config={
        **BASE_CONFIG,
        **NO_TOKEN_IDS,
        "model_type": Const("ernie4_5"),
        "use_bias": "linear_bias",
    },
    aliases=("ernie",),
)  # fmt: skip
