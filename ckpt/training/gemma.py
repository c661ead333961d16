"""What the Gemma models add: norms behind each block, capped scores, windows in some layers.

Megatron-LM has no options for these. Megatron-Bridge does (gemma2_provider.py, gemma3_provider.py)
and its names are used here; what neither the arguments nor the tensors' names say stays None, and
a family that depends on it asks.
"""

from __future__ import annotations

from math import isclose
from typing import TYPE_CHECKING, Any

from ckpt.errors import FamilyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.training.fields import Fields

_POST_NORM = "decoder.layers.0.post_self_attn_layernorm.weight"


def gemma(fields: Fields, parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The Gemmas' own fields of ``TrainingArgs``, and those that Megatron-Bridge spells otherwise.

    ``parsed`` holds the fields that are known already.
    """
    post_norms = any(name.endswith(_POST_NORM.partition("0")[2]) for name in fields.shapes)
    found = {
        "post_norms": post_norms,
        "query_scalar": _query_scalar(fields, parsed["head_dim"]),
        "attention_cap": _number(fields.get("attn_logit_softcapping", default=...)),
        "logit_cap": _number(fields.get("final_logit_softcapping", default=...)),
        "scales_embedding": _scales(fields, parsed["activation"], post_norms=post_norms),
        "local_rotary_base": None,
        "window_layers": window_layers(fields, parsed["layers"]),
    }
    window = fields.get("window_size", default=None)
    if type(window) is int:  # the window itself, where Megatron stores what lies before a token
        found["sliding_window"] = window
    bases = fields.get("rotary_base", default=None)
    if isinstance(bases, list | tuple) and len(bases) == 2:  # noqa: PLR2004 - local and global
        factor = float(fields.assume("rope_scaling_factor", 1.0))
        if parsed["rotary_linear_factor"] is not None:
            raise FamilyError(
                "rotary positions are scaled twice, which no Hugging Face class does",
                expected="no rotary_seq_len_interpolation_factor beside two rotary bases",
                found=parsed["rotary_linear_factor"],
            )
        found["local_rotary_base"], found["rotary_base"] = bases
        found["rotary_linear_factor"] = None if factor == 1 else factor
    return found


def _number(value: object) -> float | None:
    """A cap: 0 for an argument that says none, None for one that is not there."""
    if value is ...:
        return None
    return float(value) if isinstance(value, int | float) else 0.0


def _query_scalar(fields: Fields, head_dim: int) -> float | None:
    """The number whose root divides attention's scores, None where nothing says it."""
    scalar = fields.get("query_pre_attn_scalar", default=None)
    if scalar is not None:
        return float(scalar)
    scale = fields.get("softmax_scale", default=...)
    if scale is ...:
        return None
    if not scale:  # Megatron-Core's default
        return float(head_dim)
    scalar = 1 / scale**2
    return float(round(scalar)) if isclose(scalar, round(scalar), rel_tol=1e-9) else scalar


def _scales(fields: Fields, activation: str, *, post_norms: bool) -> bool | None:
    """Whether embeddings are multiplied by the root of their size, None where nothing says it."""
    said = fields.get("apply_embedding_scaling", default=None)
    if said is not None:
        return bool(said)
    if activation != "gelu_pytorch_tanh":
        return False
    if post_norms:
        fields.notes.append("assumed that embeddings are multiplied by the root of hidden_size")
        return True
    return None


def window_layers(fields: Fields, layers: int) -> tuple[bool, ...] | None:
    """Which layers attend through a sliding window; None where a window has no known layers.

    Megatron counts layers from 1 (``is_layer_window_attention``); the first numbers of
    Megatron-Bridge's ``interleaved_attn_pattern`` are local layers in a row, then global ones.
    Its Gemma 2 takes no pattern: every other layer is local, the first one too.
    """
    if fields.get("window_size", default=...) is ...:
        return None
    if not fields.get("window_size"):
        return (False,) * layers
    pattern = fields.get("interleaved_attn_pattern", default=None)
    skipped = fields.get("window_attn_skip_freq", default=None)
    kinds = _from_pattern(pattern, layers) or _from_skipped(skipped, layers)
    if not kinds and fields.get("attn_logit_softcapping", default=None):
        fields.notes.append("assumed sliding windows in every other layer, as in Gemma 2")
        kinds = tuple(layer % 2 == 0 for layer in range(layers))
    return kinds if len(kinds) == layers else None


def _from_pattern(pattern: object, layers: int) -> tuple[bool, ...]:
    if not isinstance(pattern, list | tuple) or not pattern:
        return ()
    if isinstance(pattern[0], str):
        return tuple(kind == "sliding_attention" for kind in pattern)
    local, every = pattern[0], sum(pattern)
    return tuple(layer % every < local for layer in range(layers))


def _from_skipped(every: object, layers: int) -> tuple[bool, ...]:
    if isinstance(every, list | tuple):
        return tuple(bool(kind) for kind in every)
    if isinstance(every, int) and every:
        return tuple((layer + 1) % every != 0 for layer in range(layers))
    return ()
