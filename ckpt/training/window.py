"""Attention that sees a window of positions; learned sinks; offset and clamp of gated units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.errors import FamilyError

if TYPE_CHECKING:
    from ckpt.training.fields import Fields


def windowed_attention(fields: Fields) -> dict[str, Any]:
    """Windows, sinks and the units' offset and clamp, as fields of ``TrainingArgs``."""
    clamp = fields.get("activation_func_clamp_value", default=None)
    return {
        "sliding_window": _window(fields),
        "sinks": fields.get("softmax_type", default=None) == "learnable",
        "glu_offset": float(fields.value("glu_linear_offset", default=0.0)),
        "glu_clamp": None if clamp is None else float(clamp),
    }


def _window(fields: Fields) -> int | None:
    """How many positions a query sees, its own included; Megatron counts those before it.

    -1 means all of them (transformer_config.py).
    """
    window = fields.get("window_size", default=None)
    if not isinstance(window, list | tuple):
        return None
    if len(window) != 2 or not all(type(size) is int for size in window):  # noqa: PLR2004
        raise FamilyError("window_size is no pair", expected="(N, 0)", found=repr(window)[:40])
    if window[0] == -1:
        return None
    if window[1] not in {0, -1}:
        raise FamilyError(
            "a window that reaches into the future", expected="(N, 0)", found=repr(window)[:40]
        )
    return int(window[0]) + 1
