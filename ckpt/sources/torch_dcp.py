"""Megatron-LM's ``torch_dcp`` and ``fsdp_dtensor``: its state dict saved by PyTorch's own DCP.

There is no ``metadata.json`` and no ``common.pt``: ``args`` is an object among the tensors, and
weights are ``model.module.NAME`` with global layer numbers (megatron/training/checkpointing.py,
``generate_state_dict``). ``fsdp_dtensor`` splits gated linears into ``..._w`` and ``..._v`` and
numbers grouped experts globally (megatron/core/transformer/fsdp_dtensor_checkpoint.py).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.sources import names, torch_dist
from ckpt.sources.checkpoint import Checkpoint, parallelism_of
from ckpt.sources.common_state import StoredArgs, stored_args
from ckpt.sources.dcp_index import Index
from ckpt.sources.global_tensors import model_tensors
from ckpt.sources.unpickle import Reader

if TYPE_CHECKING:
    from ckpt.sources.dcp_index import Item
    from ckpt.sources.locate import Located

FORMATS = ("torch_dcp", "fsdp_dtensor")
_WEIGHT = "model."
_COMMON = ("args", "checkpoint_version")
_STATE = re.compile(
    r"(args|checkpoint_version|iteration|num_floating_point_operations_so_far|content_metadata"
    r"|opt_param_scheduler|rng_state|rerun_state_machine|rerun_state_machine_state|optimizer)"
    r"([./].*)?"
)
_FUSED = re.compile(r".*\.(in_proj|conv1d|conv1d_weight|conv1d_bias)(\.(weight|bias))?")
_PLAIN_HINT = (
    "Other trainers (torchtitan, torchtune, FSDP) write such directories; convert it with the one "
    "that did. From Megatron-LM, load it there and save with --ckpt-convert-format torch_dist "
    "--ckpt-convert-save DIR"
)


def read(located: Located, *, spans: bool) -> Checkpoint:
    """The checkpoint in a directory of ``torch.distributed.checkpoint`` that Megatron-LM saved.

    Raises SourceError, with the tool that can read it, for one that Megatron-LM did not save.
    """
    directory, reader = located.directory, Reader()
    index = Index(directory, reader, spans=spans)
    if torch_dist.common_object(index):  # torch_dist of Megatron-Core 0.19, without its json file
        return torch_dist.read(located, spans=spans)
    stored = _read_args(index)
    args = stored.values
    items, skipped = _list_items(index)
    _check_fused(items, args, index)
    files = index.files(items)
    tensors = model_tensors(index.tensors(items))
    return Checkpoint(
        format=_format_name(args),
        directory=directory,
        iteration=located.iteration,
        args=args,
        parallelism=parallelism_of(args),
        tensors=tensors,
        shapes={tensor.name: tensor.shape for tensor in tensors},
        skipped=names.count_skipped(skipped),
        files=files,
        metadata_files=(index.file, *stored.files),
        foreign_classes=reader.foreign_classes,
        notes=(*located.notes, *stored.notes),
        raw_names=tuple(item.name for item in items),
    )


def _read_args(index: Index) -> StoredArgs:
    common = {name: index.object(name) for name in _COMMON if index.has_object(name)}
    stored = stored_args(common, index.directory)
    if stored.missing:
        found = ", ".join(list(index.names())[:3])
        raise SourceError(
            "a checkpoint of torch.distributed.checkpoint without Megatron-LM's arguments",
            file=index.directory,
            expected="an object args",
            found=found or "nothing",
            hint=_PLAIN_HINT,
        )
    sizes = parallelism_of(stored.values)
    if _format_name(stored.values) == "torch_dcp" and sizes.tensor > 1:
        raise SourceError(
            "torch_dcp with tensor parallelism: ranks overwrote each other's parts",
            file=index.directory,
            expected="TP 1",
            found=f"TP {sizes.tensor}",
        )
    return stored


def _check_fused(items: list[Item], args: dict[str, Any], index: Index) -> None:
    """Raise SourceError for rows of several kinds that lie rank after rank in one tensor.

    Megatron splits those of gated delta nets into a key for each kind, those of Mamba not.
    """
    fused = next((item.name for item in items if _FUSED.fullmatch(item.name)), None)
    ranks = parallelism_of(args).tensor
    if fused and ranks > 1:
        raise SourceError(
            "a fused projection of tensor-parallel ranks is not supported in this format",
            file=index.file,
            tensor=fused,
            expected="TP 1, or a key for each of its parts",
            found=f"TP {ranks}",
            hint="Load it with Megatron-LM and save it as torch_dist (--ckpt-convert-format)",
        )


def _format_name(args: dict[str, Any]) -> str:
    name = args.get("ckpt_format")
    return name if isinstance(name, str) and name in FORMATS else FORMATS[0]


def _list_items(index: Index) -> tuple[list[Item], list[tuple[str, str]]]:
    """The weights, and what is left out on purpose; SourceError for what is neither."""
    items, skipped, unknown = [], [], []
    for name in index.names():
        reason = names.skip_reason(name)
        if name.startswith(_WEIGHT) and index.is_tensor(name) and not reason:
            items.append(index.item(name))
        elif name.startswith(_WEIGHT) and reason:
            skipped.append((name, reason))
        elif _STATE.fullmatch(name):
            optimizer = name.startswith("optimizer")
            skipped.append((name, "optimizer state" if optimizer else "trainer state"))
        else:
            unknown.append(name)
    if unknown:
        raise SourceError(
            f"{len(unknown)} entries of no known kind: " + ", ".join(unknown[:5]),
            file=index.file,
            expected="weights as model.NAME, and the state of Megatron-LM's trainer",
        )
    return items, skipped
