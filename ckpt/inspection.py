"""What a directory holds: a training checkpoint in any format, or a Hugging Face model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt.arch import choose_architecture, refuse_foreign
from ckpt.convert.outline import outline
from ckpt.errors import CkptError, ModelError
from ckpt.manifest import MANIFEST_NAME, read_manifest, read_stage
from ckpt.shards import INDEX_NAME, read_header
from ckpt.sources import open_source
from ckpt.sources.unpickle import unhurried_collector
from ckpt.terminal import format_bytes
from ckpt.training import parse_training_args
from ckpt.unfinished import refuse_unfinished

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt.sources import Checkpoint
    from ckpt.sources.locate import IterationChoice
    from ckpt.training import TrainingArgs


@dataclass(frozen=True)
class Inspection:
    """Facts about a directory, in the order in which people want them."""

    facts: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The facts for machines."""
        return dict(self.facts)

    def as_text(self) -> str:
        """One fact a line."""
        width = max(len(name) for name in self.facts)
        lines = []
        for name, value in self.facts.items():
            values = value if isinstance(value, list) else [value]
            for number, item in enumerate(values):
                label = name.replace("_", " ") if number == 0 else ""
                lines.append(f"{label:<{width}}  {_text(item)}")
        return "\n".join(lines)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def inspect_directory(path: Path, *, iteration: IterationChoice = "latest") -> Inspection:
    """What ``path`` holds; no tensor is read.

    Raises SourceError or ModelError when it holds neither a checkpoint nor a model.
    """
    refuse_unfinished(path)
    if (path / "config.json").is_file():
        return _inspect_model(path)
    with unhurried_collector():
        return _inspect_checkpoint(open_source(path, iteration, spans=False))


def _inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    facts: dict[str, Any] = {
        "directory": str(checkpoint.directory),
        "format": checkpoint.format,
        "iteration": checkpoint.iteration,
        "parallelism": {
            "TP": checkpoint.parallelism.tensor,
            "PP": checkpoint.parallelism.pipeline,
            "VPP": checkpoint.parallelism.virtual_pipeline,
            "EP": checkpoint.parallelism.expert,
            "ETP": checkpoint.parallelism.expert_tensor,
        },
        "size": format_bytes(sum(file.stat().st_size for file in checkpoint.files)),
        "tensors": len(checkpoint.tensors),
        "dtypes": {dtype.name: count for dtype, count in checkpoint.dtypes().items()},
        "left_out": [f"{item.count} x {item.reason}" for item in checkpoint.skipped] or "nothing",
    }
    facts |= _conversion(checkpoint)
    return Inspection(facts)


def _conversion(checkpoint: Checkpoint) -> dict[str, Any]:
    """Family and completeness, or what stands in the way."""
    if not checkpoint.args:
        reason = f"the checkpoint holds no training arguments: {checkpoint.missing_args}"
        return {"convertible": False, "reason": reason, "notes": list(checkpoint.notes)}
    try:
        refuse_foreign([tensor.name for tensor in checkpoint.tensors], checkpoint.args)
        args = parse_training_args(checkpoint.args, checkpoint.shapes)
        architecture = choose_architecture(args)
        vocab = args.vocab_size or args.padded_vocab_size
        counts = outline(checkpoint, args, architecture, vocab_size=vocab)
    except CkptError as error:
        return {"convertible": False, "reason": str(error), "notes": list(checkpoint.notes)}
    return {
        "family": architecture.name,
        "model": _model_sizes(args),
        "parameters": counts.parameters,
        "vocabulary": {
            "size": args.vocab_size or "unknown",
            "stored rows": args.padded_vocab_size,
            "padding": counts.padding_rows,
        },
        "convertible": True,
        "notes": [*architecture.warnings(args), *checkpoint.notes, *args.notes] or "none",
    }


def _model_sizes(args: TrainingArgs) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "layers": args.layers,
        "hidden": args.hidden_size,
        "heads": args.heads,
        "groups": args.groups,
        "head dim": args.head_dim,
        "ffn": args.ffn_hidden_size,
        "tied": args.tied,
    }
    if args.mtp_layers:
        sizes["layers for further tokens"] = args.mtp_layers
    if args.experts:
        sizes |= {"experts": args.experts, "top-k": args.router_topk, "expert ffn": args.expert_ffn}
    return sizes


def _inspect_model(path: Path) -> Inspection:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read: {error}", file=path / "config.json") from error
    if not isinstance(config, dict):
        raise ModelError("not a model's config.json", file=path / "config.json")
    names = config.get("architectures")
    specs = [spec for name in weight_files(path) for spec in read_header(path / name).values()]
    dtypes: dict[str, int] = {}
    for spec in specs:
        dtypes[spec.dtype.name] = dtypes.get(spec.dtype.name, 0) + 1
    manifest = read_manifest(path)
    stages = manifest["stages"] if manifest else {}
    validated = read_stage(path, "validate") or {}
    return Inspection(
        {
            "directory": str(path),
            "format": "huggingface",
            "model": str(names[0]) if names and isinstance(names, list) else "unknown",
            "files": len(weight_files(path)),
            "tensors": len(specs),
            "parameters": sum(prod(spec.shape) for spec in specs),
            "size": format_bytes(sum(spec.nbytes for spec in specs)),
            "dtypes": dtypes,
            MANIFEST_NAME: ", ".join(stages) if stages else "none: not a finished output of ckpt",
            "validated": str(validated.get("verdict", "no")),
        }
    )


def weight_files(path: Path) -> list[str]:
    """The weight files of a model, checked against its index; ModelError if they disagree."""
    index = path / INDEX_NAME
    there = {file.name for file in path.glob("*.safetensors")}
    if not index.is_file():
        if there != {"model.safetensors"}:
            raise ModelError(
                "weights are missing", file=path, expected="model.safetensors", found=sorted(there)
            )
        return ["model.safetensors"]
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        claims = {str(name) for name in named.values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"cannot read the index: {error!r}", file=index) from error
    if claims != there:
        raise ModelError(
            "index and files disagree",
            file=index,
            expected=sorted(claims),
            found=sorted(there),
        )
    for name in sorted(there):
        held = set(read_header(path / name))
        claimed = {tensor for tensor, file in named.items() if file == name}
        if held != claimed:
            raise ModelError(
                "the index names other tensors than the file holds",
                file=path / name,
                found=", ".join(sorted(held ^ claimed)[:5]),
            )
    return sorted(there)
