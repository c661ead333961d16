"""A Hugging Face model of the same kind, held beside what a conversion will write.

The checkpoint says what the network is; the reference may add only what does not change it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt.arch.table import Const
from ckpt.convert.facts import fact
from ckpt.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ckpt.arch import Architecture
    from ckpt.training import TrainingArgs

_SHOWN = 8
# Other spellings of a key, on either side.
_SPELLINGS = {
    "torch_dtype": "dtype",
    "num_local_experts": "num_experts",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}
# What tensors decide: two values are two models.
_SIZES = frozenset({
    "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head",
    "num_key_value_heads", "head_dim", "intermediate_size", "n_inner", "moe_intermediate_size",
    "shared_expert_intermediate_size", "num_experts", "n_routed_experts", "n_shared_experts",
    "first_k_dense_replace", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "qkv_bias", "num_nextn_predict_layers", "layer_types",
})  # fmt: skip
# None means "not said" for these; for a rank of queries it means that there is none.
_DEFAULTED = _SIZES - {"q_lora_rank"}
# Taken over from the reference: they change neither the network nor how it is loaded.
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_HARMLESS = frozenset({
    *_TOKEN_IDS, "sep_token_id", "initializer_range", "use_cache", "attention_dropout",
    "hidden_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop", "max_window_layers",
    "do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "max_length",
    "output_router_logits", "pretraining_tp",
})  # fmt: skip
# Of the reference's own making; what is written says these for itself.
_OWN = frozenset({
    "architectures", "model_type", "dtype", "transformers_version", "_name_or_path",
    "_attn_implementation", "auto_map",
})  # fmt: skip
# The training argument that changes a fact of the tables, for the advice.
_ARGUMENTS = {
    "rotary_base": "rotary_base",
    "norm_eps": "layernorm_epsilon",
    "max_positions": "max_position_embeddings",
    "yarn_max_positions": "max_position_embeddings",
    "rotary_percent": "rotary_percent",
    "router_topk": "moe_router_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}


@dataclass(frozen=True)
class Reference:
    """A reference's config.json, and the files beside it that belong to every such model."""

    file: Path
    config: Mapping[str, Any]
    files: tuple[tuple[str, Path], ...] = ()
    has_tokenizer: bool = False

    @property
    def model_type(self) -> str:
        """What it calls its family."""
        return str(self.config.get("model_type", ""))

    @property
    def vocab_size(self) -> int | None:
        """The true size of the vocabulary, if it is said."""
        size = self.config.get("vocab_size")
        return size if type(size) is int else None


@dataclass(frozen=True)
class Row:
    """One key: its values, absent ones left out, and ``same``, ``differs`` or ``only here``."""

    key: str
    values: Mapping[str, Any]
    mark: str

    def as_dict(self) -> dict[str, Any]:
        """The row for machines."""
        return {"key": self.key, **self.values, "mark": self.mark}


@dataclass(frozen=True)
class Comparison:
    """Reference, checkpoint and what will be written, key by key."""

    file: str
    rows: tuple[Row, ...]
    config: Mapping[str, Any]
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """The field ``reference`` of the manifest."""
        return {"file": self.file, "keys": [row.as_dict() for row in self.rows]}

    def as_text(self) -> str:
        """The table for people."""
        return table_text(self.as_dict())


def table_text(content: Mapping[str, Any]) -> str:
    """The table as text, from its form for machines."""
    heads = ("key", "reference", "checkpoint", "written", "mark")
    lines = [heads, *(tuple(_cell(row, head) for head in heads) for row in content["keys"])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell(row: Mapping[str, Any], head: str) -> str:
    if head not in row:
        return "-"
    return row[head] if head in {"key", "mark"} else json.dumps(row[head])


def read_reference(path: Path) -> Reference:
    """The reference at ``path``, a model's directory or a config.json; OptionsError if none."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise OptionsError(
            "no such reference" if not path.is_dir() else "the reference has no config.json",
            file=path,
            hint="Give --reference a Hugging Face directory of the same model, or its config.json",
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionsError(f"cannot read the reference: {error}", file=file) from error
    if not isinstance(config, dict) or not _names_a_model(config):
        raise OptionsError("the reference is not a model's config.json", file=file)
    if isinstance(config.get("text_config"), dict):  # a model that also sees
        config = {**config, **config["text_config"]}
    if not path.is_dir():
        return Reference(file, config)
    beside = [*sorted(path.glob("*.py")), path / "generation_config.json"]
    files = tuple((item.name, item) for item in beside if item.is_file())
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "vocab.txt")
    return Reference(file, config, files, any((path / name).is_file() for name in names))


def _names_a_model(config: Mapping[str, Any]) -> bool:
    kind = config.get("model_type")
    return bool(kind) and isinstance(kind, str)


def compare_reference(
    reference: Reference,
    written: Mapping[str, Any],
    architecture: Architecture,
    args: TrainingArgs,
) -> Comparison:
    """Every key of both configs, and the config with what may be taken from the reference.

    Raises OptionsError naming every size in which they differ.
    """
    theirs, ours = _canonical(reference.config), _canonical(written)
    said = _said(architecture, args)
    config, rows = dict(written), []
    found: dict[str, list[str]] = {name: [] for name in ("conflict", "differs", "taken", "left")}
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        row = _row(key, theirs, ours, said)
        decision = _decide(key, row, architecture, args)
        if decision == "taken":
            config[row.key] = row.values["reference"]
            row = replace(row, values={**row.values, "written": row.values["reference"]})
        if decision:
            found[decision].append(_describe(decision, row, architecture))
        rows.append(row)
    _refuse(found["conflict"], reference)
    notes = found["differs"]
    if found["taken"]:
        notes.append(f"taken from the reference: {', '.join(found['taken'])}")
    if found["left"]:
        notes.append(f"only in the reference, not taken over: {', '.join(found['left'])}")
    config |= _auto_map(reference)
    return Comparison(str(reference.file), tuple(rows), config, tuple(notes))


def _decide(key: str, row: Row, architecture: Architecture, args: TrainingArgs) -> str:
    """What a key's values mean: ``conflict``, ``differs``, ``taken``, ``left`` or nothing."""
    if key in _OWN or key == "vocab_size" or "reference" not in row.values:
        return ""
    value = row.values["reference"]
    if _is_harmless(key, architecture):
        changes = value is not None and value != row.values.get("written")
        return "taken" if changes else ""
    if "written" not in row.values:
        return "left"
    if row.mark == "same":
        return ""
    return "conflict" if _is_conflict(key, value, args) else "differs"


def _describe(decision: str, row: Row, architecture: Architecture) -> str:
    reference = row.values["reference"]
    checkpoint = row.values.get("checkpoint", row.values.get("written"))
    if decision == "left":
        return row.key
    if decision == "taken":
        return f"{row.key} = {reference!r}"
    if decision == "conflict":
        return f"{row.key}: reference {reference!r}, checkpoint {checkpoint!r}"
    text = f"{row.key}: the reference says {reference!r}, the checkpoint {checkpoint!r}, "
    text += f"{row.values['written']!r} is written"
    name = _ARGUMENTS.get(str(architecture.config.get(row.key)))
    return f"{text} (--set {name}=VALUE changes it)" if name else text


def _refuse(conflicts: list[str], reference: Reference) -> None:
    """Raise OptionsError if there is any conflict, naming the first few with both values."""
    if not conflicts:
        return
    more = f" and {len(conflicts) - _SHOWN} more" if len(conflicts) > _SHOWN else ""
    raise OptionsError(
        "the reference is another model than the checkpoint: "
        + "; ".join(conflicts[:_SHOWN]) + more,
        file=reference.file,
        hint="Give the reference of this model, or correct a training argument with --set",
    )  # fmt: skip


def _auto_map(reference: Reference) -> dict[str, Any]:
    """The names of code of the model's own, if that code is there and will be copied."""
    found = reference.config.get("auto_map")
    if not isinstance(found, dict):
        return {}
    names = {name for name, _ in reference.files}
    wanted = {str(value).rpartition(".")[0] + ".py" for value in found.values()}
    return {"auto_map": found} if wanted <= names else {}


def _canonical(config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """(spelling, value) by one name for each key; rotary settings as transformers 4 has them."""
    flat = dict(config)
    flat.pop("text_config", None)
    rotary = flat.pop("rope_parameters", None)
    if isinstance(rotary, dict):
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in rotary:
                flat[key] = rotary[key]
        flat["rope_scaling"] = rotary
    if "rope_scaling" in flat:
        flat["rope_scaling"] = _scaling(flat["rope_scaling"])
    return {_SPELLINGS.get(key, key): (key, value) for key, value in flat.items()}


def _scaling(value: Any) -> Any:  # noqa: ANN401 - JSON
    """The scaling without repeated names, or None where nothing is scaled."""
    if not isinstance(value, dict):
        return value
    kind = value.get("rope_type", value.get("type"))
    others = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    rest = {key: item for key, item in value.items() if key not in others}
    return None if kind in {None, "default"} else {"rope_type": kind, **rest}


def _said(architecture: Architecture, args: TrainingArgs) -> dict[str, Any]:
    """What the training arguments and tensors say, by the name of the key."""
    found = {
        key: fact(value, args)
        for key, value in architecture.config.items()
        if not isinstance(value, Const)
    }
    found["vocab_size"] = args.vocab_size or args.padded_vocab_size
    return {key: value for key, (_, value) in _canonical(found).items()}


def _row(
    key: str,
    theirs: Mapping[str, tuple[str, Any]],
    ours: Mapping[str, tuple[str, Any]],
    said: Mapping[str, Any],
) -> Row:
    values: dict[str, Any] = {}
    if key in theirs:
        values["reference"] = theirs[key][1]
    if key in said:
        values["checkpoint"] = said[key]
    if key in ours:
        values["written"] = ours[key][1]
    name = (ours.get(key) or theirs[key])[0]
    if key not in theirs or key not in ours:
        return Row(name, values, "only here")
    other = said.get(key, ours[key][1])
    return Row(name, values, "same" if theirs[key][1] == other else "differs")


def _is_conflict(key: str, value: Any, args: TrainingArgs) -> bool:  # noqa: ANN401 - JSON
    """Whether two values of ``key`` are two networks, as far as tensors can tell."""
    if key not in _SIZES or (value is None and key in _DEFAULTED):
        return False
    if key == "num_nextn_predict_layers":  # absent or dropped on purpose: said, and 0 written
        return bool(args.mtp_kept)
    return True


def _is_harmless(key: str, architecture: Architecture) -> bool:
    """Whether the reference's value is taken: never where training said something else."""
    return key in _HARMLESS and not isinstance(architecture.config.get(key), str)


def copied_files(
    reference: Reference, tokenizer_files: tuple[tuple[str, Path], ...]
) -> Iterator[tuple[str, Path]]:
    """Files of the reference that a tokenizer's files do not replace."""
    names = {name for name, _ in tokenizer_files}
    return ((name, file) for name, file in reference.files if name not in names)
