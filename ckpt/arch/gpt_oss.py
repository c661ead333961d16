"""gpt-oss: sinks, windows in every second layer, and stacked experts with biases."""

from ckpt.arch.llama import (
    ATTENTION,
    BASE_CONFIG,
    BASE_EXPECTS,
    EMBEDDING,
    HEAD,
    HF_ATTENTION,
    NORMS,
    OUTPUT_BIAS,
    ROPE_OR_YARN,
    SELF_ATTENTION,
    H,
    L,
)
from ckpt.arch.table import Architecture, Const, Rule
from ckpt.layout import COLUMN, REPLICATED, Cut, Layout

E, HF_E = L + "mlp.experts.{expert}.", H + "mlp.experts."
# Stored as [in, out]; gate and up in turns.
GATE_UP_T = Layout(dim=0, parts=2, cut=Cut.INTERLEAVED_GATE_UP, transposed=True)
GATE_UP_BIAS = Layout(dim=0, parts=2, cut=Cut.INTERLEAVED_GATE_UP)
ROW_T = Layout(dim=1, transposed=True)

_GROWTH = (
    "YaRN's mscale and mscale_all_dim are not the usual ones; vLLM 0.32 ignores "
    "attention_factor for gpt-oss and answers otherwise, transformers does not"
)

GPT_OSS = Architecture(
    name="gpt_oss",
    model_class="GptOssForCausalLM",
    expects={
        **BASE_EXPECTS,
        **ROPE_OR_YARN,
        "rope_is_scaled": (False,),
        "activation": ("quick_gelu",),
        "glu_offset": (1.0,),
        # transformers before 5 and vLLM have this number in their code.
        "glu_clamp": (7.0,),
        "sinks": (True,),
        "windows_alternate": (True,),
        "linear_bias": (True,),
        "qk_norm": (False,),
        "all_moe": (True,),
        "router_score": ("softmax",),
        "router_pre_softmax": (False,),
        "router_bias": (False,),
        "router_scale": (None, 1.0),
        "router_groups": (None,),
        "shared_ffn": (None,),
        "mtp_kept": (0,),
    },
    rules=(
        *EMBEDDING, *NORMS, *SELF_ATTENTION, *OUTPUT_BIAS,
        Rule(ATTENTION + "core_attention.softmax_offset", COLUMN, (HF_ATTENTION + "sinks",)),
        Rule(L + "mlp.router.weight", REPLICATED, (H + "mlp.router.weight",), keep_dtype=True),
        Rule(L + "mlp.router.bias", REPLICATED, (H + "mlp.router.bias",), keep_dtype=True),
        Rule(E + "linear_fc1.weight", GATE_UP_T, (HF_E + "gate_up_proj",)),
        Rule(E + "linear_fc1.bias", GATE_UP_BIAS, (HF_E + "gate_up_proj_bias",)),
        Rule(E + "linear_fc2.weight", ROW_T, (HF_E + "down_proj",)),
        Rule(E + "linear_fc2.bias", REPLICATED, (HF_E + "down_proj_bias",)),
        *HEAD,
    ),
    config={
        **{key: value for key, value in BASE_CONFIG.items() if key != "rope_scaling"},
        "model_type": Const("gpt_oss"),
        "intermediate_size": "expert_ffn",
        "rope_parameters": "yarn_always",
        # transformers 4 reads this one; the key of its base is rope_theta.
        "rope_scaling": "yarn_always",
        "hidden_act": Const("silu"),
        "num_local_experts": "experts",
        "num_experts_per_tok": "router_topk",
        "router_aux_loss_coef": "aux_loss",
        "sliding_window": "window_or_all",
        "layer_types": "window_layer_types",
        "swiglu_alpha": Const(1.702),
        "swiglu_limit": "glu_clamp",
        "attention_bias": Const(value=True),
    },
    aliases=("gptoss", "gpt-oss"),
    understands=frozenset(
        {"softmax_type", "window_attn_skip_freq", "glu_linear_offset",
         "activation_func_clamp_value"}
    ),
    proof="logits",
    cautions=(("yarn_grows_unusually", _GROWTH),),
)  # fmt: skip
