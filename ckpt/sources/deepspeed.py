"""Megatron-DeepSpeed and GPT-NeoX: ``global_step*`` directories of pipeline-layer files.

``layer_LL-model_TT-model_states.pt`` holds one pipeline layer of tensor rank TT under names
without the layer; LL counts every entry of the pipeline's layer list, functions included, so
roles are found by the names inside. ``mp_rank_MM_model_states.pt`` holds the arguments and,
without pipeline parallelism, the whole rank's model. Optimizer files are never opened.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.sources import names
from ckpt.sources.checkpoint import Checkpoint, Parallelism
from ckpt.sources.flatten import flatten, namespace
from ckpt.sources.ranked import fold_tied, rank_shards
from ckpt.sources.rows import reorder_qkv
from ckpt.sources.torch_archive import TorchArchive, read_archive
from ckpt.sources.unpickle import Reader, TensorRef
from ckpt.tensors import SourceTensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt.sources.locate import Located
    from ckpt.tensors import View

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_HEADS = ("lm_head.weight", "final_linear.weight", "output_layer.weight")


def read(located: Located, *, spans: bool) -> Checkpoint:
    """The checkpoint in a ``global_step*`` directory.

    Raises SourceError for ZeRO stage 3, whose weights lie in the optimizer's partitions,
    and for layers or ranks that are missing.
    """
    del spans
    directory, reader = located.directory, Reader()
    states = _numbered(directory, _RANK_FILE)
    if not states:
        raise SourceError("mp_rank_*_model_states.pt is missing", file=directory)
    first = read_archive(states[min(states)], reader)
    args = _args(first)
    layers = _numbered(directory, _LAYER_FILE)
    if layers:
        tensors, tp, archives = _from_layers(layers, reader)
    else:
        tensors, tp, archives = _from_ranks(states, reader)
    tensors = fold_tied([reorder_qkv(tensor, args) for tensor in tensors], args)
    skipped = [
        (name, reason)
        for archive in archives
        for name, _ in flatten(archive.root if isinstance(archive.root, dict) else {})
        if (reason := names.skip_reason(name))
    ]
    pipeline = max(1, len(states) // tp)
    return Checkpoint(
        format="deepspeed",
        directory=directory,
        iteration=located.iteration,
        args=args,
        parallelism=Parallelism(tensor=tp, pipeline=pipeline, expert_tensor=tp),
        tensors=tuple(tensors),
        shapes={tensor.name: None for tensor in tensors},
        skipped=names.count_skipped(skipped),
        files=tuple(dict.fromkeys(archive.file for archive in archives)),
        metadata_files=(),
        foreign_classes=reader.foreign_classes,
        notes=located.notes,
    )


def _numbered(directory: Path, pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    found = {}
    for path in sorted(directory.iterdir()):
        match = pattern.fullmatch(path.name)
        if match:
            found[tuple(int(part) for part in match.groups())] = path
    return found


def _args(archive: TorchArchive) -> dict[str, Any]:
    root = archive.root
    if not isinstance(root, dict):
        raise SourceError("holds no model state", file=archive.file)
    stage = (root.get("ds_config") or {}).get("zero_optimization", {})
    if isinstance(stage, dict) and stage.get("stage") == 3:  # noqa: PLR2004 - ZeRO's own number
        raise SourceError(
            "ZeRO stage 3 keeps the weights in the optimizer's partitions",
            file=archive.file,
            hint="Run DeepSpeed's ds_to_universal.py or zero_to_fp32.py first",
        )
    values = namespace(root.get("args"))
    if not values:
        raise SourceError(
            "holds no training arguments", file=archive.file, hint="Supply them with --set"
        )
    values["checkpoint_version"] = root.get("checkpoint_version", 0)
    return values


def _views(archive: TorchArchive, state: Mapping[str, Any]) -> dict[str, View]:
    views = {}
    for name, value in flatten(state):
        if names.skip_reason(name) or value is None:
            continue
        if not isinstance(value, TensorRef):
            raise SourceError("an entry that is no tensor", file=archive.file, tensor=name)
        views[name] = archive.view(value, name=name)
    return views


def _from_layers(
    files: Mapping[tuple[int, ...], Path], reader: Reader
) -> tuple[list[SourceTensor], int, list[TorchArchive]]:
    tp = max(rank for _, rank in files) + 1
    numbers = sorted({number for number, _ in files})
    missing = [(n, r) for n in numbers for r in range(tp) if (n, r) not in files]
    if missing:
        listed = ", ".join(f"layer_{n:02d}-model_{r:02d}" for n, r in missing[:8])
        raise SourceError(f"files are missing: {listed}", file=next(iter(files.values())).parent)
    archives: list[TorchArchive] = []
    gathered: dict[str, list[View]] = {}
    layer = 0
    for number in numbers:
        views = []
        for rank in range(tp):
            archive = read_archive(files[number, rank], reader)
            archives.append(archive)
            views.append(_views(archive, archive.root))
        prefix, is_layer = _role(views[0])
        if is_layer:
            prefix = f"decoder.layers.{layer}."
            layer += 1
        _gather(gathered, prefix, views)
    return _tensors(gathered), tp, archives


def _role(views: Mapping[str, View]) -> tuple[str, bool]:
    """The prefix of a pipeline layer's names, and whether it is a decoder layer."""
    keys = set(views)
    if any(key.endswith(("word_embeddings.weight", "position_embeddings.weight")) for key in keys):
        return "embedding.", False
    if any(".dense" in key or "query_key_value" in key for key in keys):
        return "", True
    if keys <= {"weight", "bias", "norm.weight", "norm.bias", "final_layernorm.weight",
                "final_layernorm.bias"}:  # fmt: skip
        return "decoder.final_layernorm.", False
    if keys & set(_HEADS):
        return "output_layer.", False
    raise SourceError(
        "a pipeline layer of unknown role",
        file=next(iter(views.values())).file,
        found=", ".join(sorted(keys)[:5]),
    )


def _gather(gathered: dict[str, list[View]], prefix: str, views: list[dict[str, View]]) -> None:
    for key in dict.fromkeys(key for rank in views for key in rank):
        if prefix in {"decoder.final_layernorm.", "output_layer."}:
            name = prefix + key.rpartition(".")[2]
        else:
            name = names.canonical(prefix + key.removeprefix("embed."))
        if any(key not in rank for rank in views):
            raise SourceError("only some ranks hold this tensor", tensor=name)
        gathered[name] = [rank[key] for rank in views]


def _tensors(gathered: Mapping[str, list[View]]) -> list[SourceTensor]:
    return [
        SourceTensor(name, views[0].dtype, rank_shards(name, dict(enumerate(views))))
        for name, views in gathered.items()
    ]


def _from_ranks(
    files: Mapping[tuple[int, ...], Path], reader: Reader
) -> tuple[list[SourceTensor], int, list[TorchArchive]]:
    """Runs without pipeline: every rank file holds its part of the whole model."""
    tp = max(rank for (rank,) in files) + 1
    archives = [read_archive(files[rank,], reader) for rank in range(tp)]
    views = []
    for archive in archives:
        module = archive.root.get("module")
        if not isinstance(module, dict):
            raise SourceError(
                "holds no weights, and no layer_*-model_*-model_states.pt lie beside it",
                file=archive.file,
            )
        views.append(_sequential(_views(archive, module)))
    gathered: dict[str, list[View]] = {}
    _gather(gathered, "", views)
    return _tensors(gathered), tp, archives


def _sequential(views: dict[str, View]) -> dict[str, View]:
    """GPT-NeoX without pipeline: ``sequential.N.`` names, N as in the layer files."""
    if not any(key.startswith("sequential.") for key in views):
        return views
    groups: dict[int, dict[str, View]] = {}
    for key, view in views.items():
        _, index, rest = key.split(".", 2)
        groups.setdefault(int(index), {})[rest] = view
    renamed: dict[str, View] = {}
    layer = 0
    for number in sorted(groups):
        group = groups[number]
        prefix, is_layer = _role(group)
        if is_layer:
            prefix, layer = f"decoder.layers.{layer}.", layer + 1
        collected: dict[str, list[View]] = {}
        _gather(collected, prefix, [group])
        renamed |= {name: found[0] for name, found in collected.items()}
    return renamed
