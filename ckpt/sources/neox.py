"""GPT-NeoX (EleutherAI): its config names, and the rows that it orders in its own way.

The files are DeepSpeed's. The stored arguments are a dozen numbers; everything else is in
the YAML files that GPT-NeoX copies to ``configs/`` inside the iteration's directory
(megatron/checkpointing.py, save_ds_checkpoint). Defaults are those of
megatron/neox_arguments/neox_args.py.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.parts import Held, stack_rows
from ckpt.sources.checkpoint import count_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    ByRank = dict[int, Held]

# Config name -> (Megatron's name, default). Numbers and switches of one meaning in both.
_SAME: dict[str, tuple[str, Any]] = {
    "num_layers": ("num_layers", None),
    "hidden_size": ("hidden_size", None),
    "num_attention_heads": ("num_attention_heads", None),
    "max_position_embeddings": ("max_position_embeddings", None),
    "seq_length": ("seq_length", None),
    "rotary_emb_base": ("rotary_base", 10000),
    "rotary_pct": ("rotary_percent", 1.0),
    "no_weight_tying": ("untie_embeddings_and_output_weights", False),
    "gpt_j_residual": ("gpt_j_residual", False),
    "bias_gelu_fusion": ("bias_gelu_fusion", False),
    "model_parallel_size": ("tensor_model_parallel_size", 1),
    "pipe_parallel_size": ("pipeline_model_parallel_size", 0),
}
_POSITIONS = {
    "learned": "learned_absolute",
    "rotary": "rope",
    "alibi": "alibi",
    "none": "none",
}
# Norm -> (Megatron's name, the config name of its epsilon, that one's default).
_NORMS = {
    "layernorm": ("LayerNorm", "layernorm_epsilon", 1e-5),
    "te_layernorm": ("LayerNorm", "layernorm_epsilon", 1e-5),
    "rmsnorm": ("RMSNorm", "rms_norm_epsilon", 1e-8),
    "te_rmsnorm": ("RMSNorm", "rms_norm_epsilon", 1e-8),
}
# Activation -> Megatron's switch, for a plain MLP and for a gated one.
_PLAIN: dict[str, dict[str, bool]] = {"gelu": {}}
_GATED = {"swiglu": {"swiglu": True}, "geglu": {"geglu": True}}
_GATED_PAIR = {"silu": _GATED["swiglu"], "swish": _GATED["swiglu"], "gelu": _GATED["geglu"]}
_GATED_PAIR |= _GATED
# Config name -> (values that change nothing that is converted, why others cannot be).
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_qk_layernorm": ((False,), "queries and keys are normed over all heads of a rank"),
    "use_mup": ((False,), "logits and attention are scaled by the width"),
    "moe_num_experts": ((0, 1), "its routers have no Hugging Face class"),
    "opt_pos_emb_offset": ((0,), "positions are shifted"),
    "te_layernorm_mlp": ((False,), "TransformerEngine's fused MLP has other names"),
    "te_mha": ((False,), "TransformerEngine's attention has other names"),
    "te_fp8_mha": ((False,), "TransformerEngine's attention has other names"),
    "train_impl": (("normal", "dpo", "kto", "reinforce"), "it is no language model"),
    "sliding_window_width": ((None,), "attention is limited to a window"),
}
_LAYER = r"^(decoder\.layers\.\d+\.)"
_RENAMES = (
    (re.compile(_LAYER + r"(input_layernorm|pre_mlp_layernorm)\.scale$"), r"\1\2.weight"),
    (re.compile(_LAYER + r"mlp\.linear1\."), r"\1mlp.linear_fc1."),
    (re.compile(_LAYER + r"mlp\.(linear2|w2)\."), r"\1mlp.linear_fc2."),
)
_PAIR = re.compile(_LAYER + r"mlp\.w([13])\.weight$")


def is_neox(args: object) -> bool:
    """Whether stored arguments are GPT-NeoX's: a dictionary of a few numbers."""
    return isinstance(args, dict) and {"model_parallel_size", "tokenizer_type"} <= set(args)


def training_args(
    stored: Mapping[str, Any], directory: Path
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The run's arguments under Megatron's names, and notes for the report.

    Raises SourceError without the config files, where they contradict the stored arguments,
    and for settings that nothing can represent.
    """
    config = _read_config(directory)
    for name, value in stored.items():
        if name in _SAME and config.get(name, value) != value:
            raise SourceError(
                f"configs/ and the stored arguments disagree about {name}",
                file=directory / "configs",
                expected=value,
                found=config[name],
            )
    config = {**config, **stored}
    _check(config, directory)
    values = {name: config.get(key, default) for key, (name, default) in _SAME.items()}
    values = {name: value for name, value in values.items() if value is not None}
    values["pipeline_model_parallel_size"] = max(1, int(values["pipeline_model_parallel_size"]))
    values["padded_vocab_size"] = config.get("padded_vocab_size")
    values["checkpoint_version"] = 3.0  # rows of a head's query, key and value lie together
    values["position_embedding_type"] = _chosen(_POSITIONS, config, "pos_emb", "learned", directory)
    norm, epsilon, default = _chosen(_NORMS, config, "norm", "layernorm", directory)
    values |= {"normalization": norm, "layernorm_epsilon": config.get(epsilon, default)}
    values["activation"] = config.get("activation", "gelu")
    heads, groups = config["num_attention_heads"], config.get("num_kv_heads")
    if groups and groups != heads:
        values |= {"group_query_attention": True, "num_query_groups": groups}
    return values, ("arguments from GPT-NeoX's configs/",)


def _read_config(directory: Path) -> dict[str, Any]:
    """All files of ``configs/`` as one mapping with underscores in its names."""
    files = sorted(
        path
        for path in (directory / "configs").glob("*")
        if path.suffix in {".yml", ".yaml", ".json"}
    )
    if not files:
        raise SourceError(
            "GPT-NeoX's config is missing, and the checkpoint's own arguments do not say "
            "how the model is built",
            file=directory / "configs",
            expected="the .yml files of the run",
            hint="Copy them there",
        )
    config: dict[str, Any] = {}
    for file in files:
        for key, value in _load(file).items():
            name = str(key).replace("-", "_")
            if name in config and config[name] != value:
                raise SourceError(
                    f"two config files disagree about {name}",
                    file=file,
                    expected=config[name],
                    found=value,
                )
            config[name] = value
    return config


def _load(file: Path) -> dict[str, Any]:
    import yaml  # noqa: PLC0415 - only where there is such a file

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SourceError(f"cannot read: {error}", file=file) from error
    if not isinstance(content, dict):
        raise SourceError("no mapping of settings", file=file)
    return {key: _number(value) for key, value in content.items()}


def _number(value: object) -> object:
    """YAML 1.1 takes 1e-5 for text."""
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


def _check(config: Mapping[str, Any], directory: Path) -> None:
    for name, (allowed, reason) in _ALLOWED.items():
        if name in config and config[name] not in allowed:
            raise SourceError(
                f"GPT-NeoX setting {name}: {reason}",
                file=directory / "configs",
                found=config[name],
            )
    if config.get("gpt_j_residual") and config.get("gpt_j_tied"):
        raise SourceError(
            "GPT-NeoX setting gpt_j_tied: attention and MLP share one norm, which the "
            "Hugging Face class does not",
            file=directory / "configs",
        )
    for kind in _kinds(config.get("attention_config")):
        if kind not in {"global", "flash"}:
            raise SourceError(
                "GPT-NeoX setting attention_config: not full attention in every layer",
                file=directory / "configs",
                found=kind,
            )


def _kinds(config: object) -> list[str]:
    """The kinds of attention in ``[[["global"], 12], ...]`` or a list with one a layer."""
    if isinstance(config, str):
        return [config]
    if isinstance(config, list | tuple):
        return [kind for item in config for kind in _kinds(item)]
    return []


def _chosen(
    table: Mapping[str, Any], config: Mapping[str, Any], name: str, default: str, directory: Path
) -> Any:  # noqa: ANN401 - whatever the table holds
    value = config.get(name, default)
    if value not in table:
        raise SourceError(
            f"GPT-NeoX setting {name} cannot be converted",
            file=directory / "configs",
            expected=" or ".join(table),
            found=value,
        )
    return table[value]


def rearrange(named: Mapping[str, ByRank], args: dict[str, Any]) -> dict[str, ByRank]:
    """The tensors under Megatron's names with Megatron's rows; completes ``args`` from them.

    Gated MLPs are [up; gate] in ``linear1`` and two tensors in the older naming (``w1`` the
    gate, ``w3`` up); grouped queries are [q; k; v] on each rank. Raises SourceError for an
    activation that nothing has, and for rows that do not fit.
    """
    pairs = any(_PAIR.match(name) for name in named)
    activation = args.pop("activation")
    gated = pairs or activation in _GATED
    table = _GATED_PAIR if pairs else _GATED if gated else _PLAIN
    if activation not in table:
        raise SourceError(
            "GPT-NeoX setting activation cannot be converted",
            expected=" or ".join([*_PLAIN, *_GATED]),
            found=activation,
        )
    args |= table[activation]
    found: dict[str, ByRank] = {}
    for name, by_rank in named.items():
        if pair := _PAIR.match(name):
            if pair[2] == "1":
                other = named.get(f"{pair[1]}mlp.w3.weight", {})
                found[f"{pair[1]}mlp.linear_fc1.weight"] = _joined(name, by_rank, other)
            continue
        new = name
        change: Callable[[Held], Held] | None = None
        for pattern, replacement in _RENAMES:
            new = pattern.sub(replacement, new)
        if ".mlp.linear_fc1." in new and gated and not pairs:
            change = _gate_first
        if ".self_attention.linear_qkv." in new and args.get("num_query_groups"):
            change = _grouped(new, args, len(by_rank))
        found[new] = {r: change(held) for r, held in by_rank.items()} if change else by_rank
    _derive(found, args, gated=gated)
    return found


def _joined(name: str, gate: ByRank, up: ByRank) -> ByRank:
    if set(gate) != set(up):
        raise SourceError("the gate has no w3 beside it on every rank", tensor=name)
    return {rank: stack_rows([gate[rank], up[rank]]) for rank in gate}


def _gate_first(held: Held) -> Held:
    half = held.shape[0] // 2
    return stack_rows([held.narrow(0, half, held.shape[0] - half), held.narrow(0, 0, half)])


def _grouped(name: str, args: Mapping[str, Any], tp: int) -> Callable[[Held], Held]:
    """[q; k; v] of a rank -> for each group its queries, its key, its value."""
    heads, groups = count_in(args, "num_attention_heads"), count_in(args, "num_query_groups")
    size, each, local = count_in(args, "hidden_size") // heads, heads // groups, groups // tp

    def change(held: Held) -> Held:
        if held.shape[0] != local * (each + 2) * size:
            raise SourceError(
                "rows do not fit num_attention_heads and num_kv_heads",
                tensor=name,
                expected=f"{local * (each + 2) * size} rows on each of {tp} ranks",
                found=f"{held.shape[0]} rows",
            )
        key, value = local * each * size, local * (each + 1) * size
        pieces = []
        for group in range(local):
            pieces.append(held.narrow(0, group * each * size, each * size))
            pieces += [held.narrow(0, at + group * size, size) for at in (key, value)]
        return stack_rows(pieces)

    return change


def _derive(named: Mapping[str, ByRank], args: dict[str, Any], *, gated: bool) -> None:
    """Sizes and biases that the tensors decide: the config's MLP width has had two meanings."""
    fc1 = named.get("decoder.layers.0.mlp.linear_fc1.weight")
    if fc1:
        rows = sum(held.shape[0] for held in fc1.values())
        args["ffn_hidden_size"] = rows // 2 if gated else rows
    attention, mlp = (
        any(name.endswith(last) for name in named)
        for last in (".linear_proj.bias", ".linear_fc2.bias")
    )
    if attention != mlp:
        raise SourceError(
            "attention and MLP differ in having biases, which no family has",
            expected="use_bias_in_attn_linear = use_bias_in_mlp",
            found=f"{attention} and {mlp}",
        )
    args["add_bias_linear"] = attention
