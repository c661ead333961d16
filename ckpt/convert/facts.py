"""Values of config.json that follow from the training arguments, by the names that tables use."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ckpt.training import TrainingArgs

if TYPE_CHECKING:
    from collections.abc import Callable

# megatron/core/models/common/embeddings/rotary_pos_embedding.py, _apply_scaling: fixed there.
LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ORIGINAL_POSITIONS = 8192


def rope_scaling(args: TrainingArgs) -> dict[str, Any] | None:
    """The rotary scaling in the form that transformers 4 and 5 and vLLM read, or None."""
    if args.llama3_scaling:
        return {
            "rope_type": "llama3",
            "factor": args.llama3_factor,
            **LLAMA3_FIXED,
            "original_max_position_embeddings": LLAMA3_ORIGINAL_POSITIONS,
        }
    if args.rotary_linear_factor is not None:
        return {"rope_type": "linear", "factor": args.rotary_linear_factor}
    return None


# Facts that are not simply a field of TrainingArgs.
DERIVED: dict[str, Callable[[TrainingArgs], Any]] = {
    "rope_scaling": rope_scaling,
}


def fact(name: str, args: TrainingArgs) -> Any:  # noqa: ANN401 - JSON values of any kind
    """The fact that tables call ``name``: derived, or a field of the training arguments."""
    if name in DERIVED:
        return DERIVED[name](args)
    return getattr(args, name)


def known_facts() -> set[str]:
    """Every name that a table may use."""
    return {*DERIVED, *(field.name for field in fields(TrainingArgs))}
