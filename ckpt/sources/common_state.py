"""What a distributed checkpoint stores beside its tensors: one dictionary with the arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.sources.flatten import namespace
from ckpt.sources.provider_config import RUN_CONFIG, provider_args
from ckpt.sources.torch_archive import read_archive

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt.sources.unpickle import Reader

COMMON_FILE = "common.pt"


@dataclass(frozen=True)
class StoredArgs:
    """The training arguments, or why there are none.

    ``files`` are those that they came from beside the common state; ``missing`` says where the
    program that wrote the checkpoint keeps them, and is empty where they were found.
    """

    values: dict[str, Any]
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    missing: str = ""


def read_common_file(file: Path, reader: Reader) -> dict[str, Any]:
    """The dictionary in ``common.pt``; raises SourceError for anything else."""
    root = read_archive(file, reader).root
    if not isinstance(root, dict):
        raise SourceError("not a dictionary", file=file)
    return root


def stored_args(common: Mapping[str, Any] | None, directory: Path) -> StoredArgs:
    """The arguments of Megatron-LM in the common state, or else those of Megatron-Bridge.

    ``common`` is None where there is no common state at all.
    """
    values = namespace((common or {}).get("args"))
    if values:
        if common and "checkpoint_version" in common:
            values.setdefault("checkpoint_version", common["checkpoint_version"])
        return StoredArgs(values)
    file = directory / RUN_CONFIG
    if file.is_file():
        note = f"training arguments from Megatron-Bridge's {RUN_CONFIG}"
        return StoredArgs(provider_args(file), (file,), (note,))
    return StoredArgs({}, missing=_missing(common, directory))


def _missing(common: Mapping[str, Any] | None, directory: Path) -> str:
    """Where the arguments are, judged by the directory's neighbours."""
    if (directory.parent / "context").is_dir():
        return f"NeMo keeps them in {directory.parent / 'context'} (model.yaml)"
    for parent in (directory.parent, directory.parent.parent):
        if (parent / "transformer_config.json").is_file():
            return f"verl keeps them in {parent} (transformer_config.json, huggingface/config.json)"
    if common is None:
        return f"no {COMMON_FILE} and no common_state object; restore {COMMON_FILE}"
    return f"the common state has no args; copy {COMMON_FILE} of another iteration of the same run"
