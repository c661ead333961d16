"""GLM-4 (dense): Llama's block with norms behind each part too, gate and up in one tensor.

slime keeps the two further norms as ``post_self_attn_layernorm`` and ``post_mlp_layernorm``
(slime_plugins/mbridge/glm4.py), which are also Hugging Face's names.
"""

from ckpt.arch.llama import (
    BASE_CONFIG,
    BASE_EXPECTS,
    DENSE_MLP,
    EMBEDDING,
    HEAD,
    NO_TOKEN_IDS,
    NORMS,
    SELF_ATTENTION,
    H,
    L,
)
from ckpt.arch.table import Architecture, Const, Rule
from ckpt.layout import REPLICATED, Layout

GATE_UP_ROWS = Layout(dim=0, parts=2)  # [gate; up] on each rank and in the one target
GLM4 = Architecture(
    name="glm4",
    model_class="Glm4ForCausalLM",
    proof="rebuilt",
    expects={
        **{key: value for key, value in BASE_EXPECTS.items() if key != "rotary_percent"},
        "rotary_interleaved": (True,),
        "post_norms": (True,),
        "experts": (0,),
        "qk_norm": (False,),
        "linear_bias": (False,),
        "sliding_window": (None,),
        "mtp_kept": (0,),
    },
    rules=(
        *EMBEDDING, *NORMS, *SELF_ATTENTION,
        Rule(L + "post_self_attn_layernorm.weight", REPLICATED,
             (H + "post_self_attn_layernorm.weight",), norm=True),
        Rule(L + "post_mlp_layernorm.weight", REPLICATED, (H + "post_mlp_layernorm.weight",),
             norm=True),
        Rule(L + "mlp.linear_fc1.weight", GATE_UP_ROWS, (H + "mlp.gate_up_proj.weight",)),
        DENSE_MLP[1],
        *HEAD,
    ),
    config={
        **BASE_CONFIG,
        **NO_TOKEN_IDS,
        "model_type": Const("glm4"),
        "attention_bias": "qkv_bias",
        "partial_rotary_factor": "rotary_percent",
    },
)  # fmt: skip
