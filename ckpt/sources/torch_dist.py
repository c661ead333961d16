"""Megatron-Core's ``torch_dist`` format: global tensors cut into chunks, indexed by ``.metadata``.

The arguments are in ``common.pt``, since Megatron-Core 0.19 in the object ``common_state``
among the chunks (megatron/core/dist_checkpointing/serialization.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.sources import names
from ckpt.sources.checkpoint import Checkpoint, parallelism_of
from ckpt.sources.common_state import COMMON_FILE, read_common_file, stored_args
from ckpt.sources.dcp_index import Index
from ckpt.sources.global_tensors import model_tensors
from ckpt.sources.unpickle import Reader

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.sources.dcp_index import Item
    from ckpt.sources.locate import Located

_COMMON_OBJECT = "common_state"


def read(located: Located, *, spans: bool) -> Checkpoint:
    """The checkpoint in a ``torch_dist`` directory.

    Without ``spans`` only names, types and shapes are read; the views then point to the
    chunks' archives instead of to their elements. Raises SourceError for an index that
    is damaged, for files that are missing or shorter than it says, and for objects of a kind
    that Megatron does not store.
    """
    directory, reader = located.directory, Reader()
    index = Index(directory, reader, spans=spans)
    common, common_files = _read_common(index, reader)
    items, skipped = _list_items(index)
    files = index.files(items)
    tensors = model_tensors(index.tensors(items))
    args = stored_args(common, directory)
    return Checkpoint(
        format="torch_dist",
        directory=directory,
        iteration=located.iteration,
        args=args.values,
        missing_args=args.missing,
        parallelism=parallelism_of(args.values),
        tensors=tensors,
        shapes={tensor.name: tensor.shape for tensor in tensors},
        skipped=names.count_skipped(skipped),
        files=files,
        metadata_files=(index.file, *common_files, *args.files),
        foreign_classes=reader.foreign_classes,
        notes=(*located.notes, *args.notes),
        raw_names=tuple(item.name for item in items),
    )


def common_object(index: Index) -> str | None:
    """The name of the object that holds the common state, or None without one."""
    return next((name for name in index.names() if _is_common(name)), None)


def _is_common(name: str) -> bool:
    return name.partition("/")[0] == _COMMON_OBJECT


def _read_common(index: Index, reader: Reader) -> tuple[dict[str, Any] | None, tuple[Path, ...]]:
    """The unsharded state: ``common.pt``, or since 0.19 the object ``common_state``, or None."""
    file = index.directory / COMMON_FILE
    if file.is_file():
        return read_common_file(file, reader), (file,)
    name = common_object(index)
    if name is not None and index.has_object(name):
        root = index.object(name)
        root = root[0] if isinstance(root, list) and root else root
        if not isinstance(root, dict):
            raise SourceError("the common state is not a dictionary", file=index.file, tensor=name)
        return root, ()
    return None, ()


def _list_items(index: Index) -> tuple[list[Item], list[tuple[str, str]]]:
    """The tensors of the model, and what is left out on purpose."""
    items, skipped, unknown = [], [], []
    for name in index.names():
        reason = names.skip_reason(name)
        if _is_common(name):
            continue
        if reason:
            skipped.append((name, reason))
        elif index.is_tensor(name):
            items.append(index.item(name))
        else:
            unknown.append(name)
    if unknown:
        raise SourceError(
            "objects that are no tensors and of no known kind: " + ", ".join(unknown[:5]),
            file=index.file,
            hint="They may change what the model computes; what wrote them is not Megatron alone",
        )
    return items, skipped
