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
    if args.uses_yarn:
        return yarn_scaling(args)
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


def rope_parameters(args: TrainingArgs) -> dict[str, Any]:
    """Everything of rotary positions in one value, as transformers 5 spells it."""
    scaling = rope_scaling(args) or {"rope_type": "default"}
    turned = {"partial_rotary_factor": args.rotary_percent}
    return {"rope_theta": args.rotary_base, **turned, **scaling}


def yarn_scaling(args: TrainingArgs) -> dict[str, Any]:
    """YaRN's rotary scaling; its growth is yarn_scale(mscale) / yarn_scale(mscale_all_dim).

    transformers ignores both unless both are non-zero: then the result is said. For MLA vLLM
    computes it from the two as Megatron does, and reads no ``attention_factor``.
    """
    factor, mscale, all_dim = args.yarn_factor, args.yarn_mscale, args.yarn_mscale_all_dim
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": args.yarn_original_positions,
        "beta_fast": args.yarn_beta_fast,
        "beta_slow": args.yarn_beta_slow,
    }
    if not args.mla:
        scaling["truncate"] = args.yarn_truncates
        return scaling | (
            {"attention_factor": args.yarn_growth} if args.yarn_grows_unusually else {}
        )
    scaling |= {"mscale": mscale, "mscale_all_dim": all_dim}
    if not (mscale and all_dim) and args.yarn_grows_unusually:
        scaling["attention_factor"] = args.yarn_growth
    return scaling


def yarn_always(args: TrainingArgs) -> dict[str, Any]:
    """Rotary positions for a class that always has YaRN; a factor of 1 changes nothing."""
    none = {
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": args.max_positions,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    return {"rope_theta": args.rotary_base, **(yarn_scaling(args) if args.uses_yarn else none)}


def v2_topk_method(args: TrainingArgs) -> str:
    """DeepSeek V2's name for choosing experts with or without groups."""
    return "greedy" if args.experts_per_group_topk is None else "group_limited_greedy"


def window_layer_types(args: TrainingArgs) -> list[str]:
    """Hugging Face's name for each layer's attention, with a sliding window or without."""
    kinds = ("full_attention", "sliding_attention")
    return [kinds[local] for local in args.window_layers or (False,) * args.layers]


def window_pattern(args: TrainingArgs) -> int | None:
    """Every how many layers one has no window, as older transformers say it, else None."""
    local = args.window_layers or ()
    if all(local) or not any(local):
        return None
    size = local.index(False) + 1
    regular = all(kind == ((n + 1) % size != 0) for n, kind in enumerate(local))
    return size if regular else None


def yarn_max_positions(args: TrainingArgs) -> int:
    """Positions that the model can take: the stretched original ones under YaRN."""
    if args.uses_yarn and args.yarn_original_positions:
        return max(args.max_positions, int(args.yarn_original_positions * args.yarn_factor))
    return args.max_positions


def layer_types(args: TrainingArgs) -> list[str]:
    """Hugging Face's names of the kinds of attention, by layer."""
    mixers = args.mixers or ("attention",) * args.layers
    return [_LAYER_TYPES[mixer] for mixer in mixers]


_LAYER_TYPES = {"attention": "full_attention", "linear_attention": "linear_attention"}

# Facts that are not simply a field of TrainingArgs.
DERIVED: dict[str, Callable[[TrainingArgs], Any]] = {
    "rope_scaling": rope_scaling,
    "rope_parameters": rope_parameters,
    "yarn_always": yarn_always,
    # A class that must have a window: one that nothing reaches over stands for none.
    "window_or_all": lambda args: args.sliding_window or yarn_max_positions(args),
    "v2_topk_method": v2_topk_method,
    "yarn_max_positions": yarn_max_positions,
    "window_layer_types": window_layer_types,
    "window_pattern": window_pattern,
    "rotary_dim": lambda args: int(args.head_dim * args.rotary_percent),
    "normalises_scores": lambda args: args.normalises_scores,
    "query_scalar": lambda args: int(args.query_scalar or 0),
    "attention_cap": lambda args: args.attention_cap or None,
    "logit_cap": lambda args: args.logit_cap or None,
    "n_shared_experts": lambda args: (args.shared_ffn or 0) // args.expert_ffn,
    "routed_scaling_factor": lambda args: args.router_scale or 1.0,
    "group_count": lambda args: args.router_groups if args.limits_groups else 1,
    "group_topk": lambda args: args.router_group_topk if args.limits_groups else 1,
    "norm_topk_prob": lambda args: not args.router_pre_softmax,
    "mlp_layer_types": lambda args: ["sparse" if moe else "dense" for moe in args.moe_layers],
    "dense_layers": lambda args: [n for n, moe in enumerate(args.moe_layers) if not moe],
    "first_dense": lambda args: args.first_dense,
    "layer_types": layer_types,
    "shared_ffn_or_0": lambda args: args.shared_ffn or 0,
}


def fact(name: str, args: TrainingArgs) -> Any:  # noqa: ANN401 - JSON values of any kind
    """The fact that tables call ``name``: derived, or a field of the training arguments."""
    if name in DERIVED:
        return DERIVED[name](args)
    return getattr(args, name)


def known_facts() -> set[str]:
    """Every name that a table may use."""
    return {*DERIVED, *(field.name for field in fields(TrainingArgs))}
