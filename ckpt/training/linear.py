"""Linear attention in some layers: which layers, and the sizes of a gated delta net."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.errors import FamilyError

if TYPE_CHECKING:
    from ckpt.training.fields import Fields

# experimental_attention_variant, and linear_attention_type before it; newer versions say gdn.
_DELTA = {"gated_delta_net": "gated_delta_net", "gdn": "gated_delta_net"}
_SIZES = {
    "delta_key_heads": "linear_num_key_heads",
    "delta_value_heads": "linear_num_value_heads",
    "delta_key_dim": "linear_key_head_dim",
    "delta_value_dim": "linear_value_head_dim",
    "delta_conv_kernel": "linear_conv_kernel_dim",
}


def linear_attention(fields: Fields, layers: int) -> dict[str, Any]:
    """Gates on attention and gated delta nets, as fields of ``TrainingArgs``.

    Raises FamilyError for a frequency that does not fit the number of layers, and for sizes
    that are absent or no whole numbers.
    """
    gate = bool(fields.get("attention_output_gate", default=False))
    kind = fields.value("experimental_attention_variant", "linear_attention_type", default=None)
    if kind not in _DELTA:
        return {"attention_gate": gate}
    sizes = {name: fields.count(theirs) for name, theirs in _SIZES.items()}
    if sizes["delta_value_heads"] % sizes["delta_key_heads"]:
        raise FamilyError(
            "linear_num_value_heads is no multiple of linear_num_key_heads",
            expected=f"a multiple of {sizes['delta_key_heads']}",
            found=sizes["delta_value_heads"],
        )
    linear = _pattern(fields.get("linear_attention_freq"), layers)
    return {
        "attention_gate": gate,
        "linear_attention": _DELTA[kind],
        "mixers": tuple("linear_attention" if item else "attention" for item in linear),
        **sizes,
    }


def _pattern(freq: object, layers: int) -> tuple[bool, ...]:
    """Which layers have linear attention; an int N gives attention to every Nth layer.

    megatron/core/models/gpt/experimental_attention_variant_module_specs.py,
    ``get_linear_attention_pattern``.
    """
    if type(freq) is int and freq > 0:
        return tuple((index + 1) % freq != 0 for index in range(layers))
    if isinstance(freq, list | tuple) and len(freq) == layers and set(freq) <= {0, 1}:
        return tuple(bool(item) for item in freq)
    raise FamilyError(
        "linear_attention_freq does not fit the number of layers",
        expected=f"a number, or {layers} times 0 or 1",
        found=repr(freq)[:60],
    )
