"""Arguments of a Megatron-Bridge checkpoint: ``run_config.yaml`` in the iteration's directory.

Its section ``model`` holds the fields of a model provider: those of Megatron-Core's
TransformerConfig and of GPTModel's constructor (Megatron-Bridge, models/gpt_provider.py). Most
have the names of Megatron-LM's arguments; the few that differ are renamed here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.tensors import DType

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RUN_CONFIG = "run_config.yaml"
# Providers that build Megatron-Core's GPTModel, and add no code of their own to it or what their
# families' tables know: Gemma's norms, caps, windows and scaled embeddings, OLMoE's norms.
_PROVIDERS = re.compile(
    r"(Bridge)?(GPT|MLA|Llama(2|3|31|32)?|Qwen(2|25|3)(MoE)?|Mistral|Mixtral|DeepSeek(V2|V2Lite|V3)?"
    r"|Moonlight|KimiK2|Gemma(2|3)?|OlMoE)Model(Provider|Config)\w*"
)
_SPECS = {
    "default_layer_spec",
    "transformer_engine_layer_spec",
    "transformer_engine_full_layer_spec",
    "local_layer_spec",
    "get_gpt_decoder_block_spec",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "get_transformer_block_with_experimental_attention_variant_spec",
    "gemma2_layer_spec",
    "gemma3_layer_spec",
    "minimax_m2_layer_spec",
    "olmoe_layer_spec",
}
# What a provider's code does without a field that says it.
_IN_CODE = {"Gemma": {"apply_embedding_scaling": True}}
_RENAMED = {
    "num_moe_experts": "num_experts",
    "seq_length": "max_position_embeddings",
    "rope_scaling": "use_rope_scaling",
    # The argument's older name, which says nothing of Megatron-Core's version.
    "layernorm_epsilon": "norm_epsilon",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "bias_activation_fusion": "bias_gelu_fusion",
}
# Activation and whether it is gated, as Megatron-LM's switches.
_ACTIVATIONS = {
    ("silu", True): {"swiglu": True},
    ("gelu", True): {"geglu": True},
    ("quick_gelu", True): {"quick_geglu": True},
    ("fast_gelu", True): {"geglu": True, "openai_gelu": True},
    ("gelu", False): {},
    ("squared_relu", False): {"squared_relu": True},
}


def provider_args(file: Path) -> dict[str, Any]:
    """Megatron-LM's arguments that say the same as the provider in ``run_config.yaml``.

    Raises SourceError for a file that cannot be read, for providers of other models, and for
    fields that have no argument.
    """
    import yaml  # noqa: PLC0415 - only where there is such a file

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise SourceError(f"cannot read: {error}", file=file) from error
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or "num_layers" not in _flat(model):
        raise SourceError("holds no model section with num_layers", file=file)
    values = _flat(model)
    _check_code(values, file)
    args = {_RENAMED.get(name, name): value for name, value in values.items()
            if not name.startswith("_")}  # fmt: skip
    gated = bool(values.get("gated_linear_unit"))
    activation = _last(values.get("activation_func", "gelu"))
    switches = _ACTIVATIONS.get((activation, gated))
    if switches is None:
        kind = "gated" if gated else "not gated"
        raise SourceError("an unknown activation", file=file, found=f"{activation}, {kind}")
    shared = values.get("share_embeddings_and_output_weights", True)
    dtype = DType.from_torch_name(_last(values.get("params_dtype", "")))
    provider = _last(values.get("_target_", ""))
    added = [more for name, more in _IN_CODE.items() if provider.startswith(name)]
    return {
        **args,
        **switches,
        **(added[0] if added else {}),
        "untie_embeddings_and_output_weights": not shared,
        "params_dtype": dtype,
    }


def _flat(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with those of a nested transformer config among them (newer versions)."""
    inner = model.get("transformer")
    return {**model, **(inner if isinstance(inner, dict) else {})}


def _last(value: object) -> str:
    """The last part of what a serialised function, class or type is called."""
    name = value.get("_target_", "") if isinstance(value, dict) else value
    return str(name).rpartition(".")[2]


def _check_code(values: Mapping[str, Any], file: Path) -> None:
    """Raise SourceError where code of a model, and not its fields, says what it computes."""
    provider = _last(values.get("_target_", "GPTModelProvider"))
    if not _PROVIDERS.fullmatch(provider):
        raise SourceError(
            f"its provider {provider} builds a model of its own",
            file=file,
            hint="Export it with Megatron-Bridge: AutoBridge.export_ckpt",
        )
    spec = _last(values.get("transformer_layer_spec", "default_layer_spec"))
    if spec not in _SPECS:
        raise SourceError("an unknown transformer_layer_spec", file=file, found=spec)
    if "scale_factor" in values and "rope_scaling" not in values:
        raise SourceError(
            "rotary scaling that an older Megatron-Bridge applied in code",
            file=file,
            found=f"scale_factor {values['scale_factor']!r}",
            hint="Load and save it with a newer Megatron-Bridge, which stores rope_scaling",
        )
