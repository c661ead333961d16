"""What a distributed checkpoint stores beside its tensors: one dictionary with the arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.sources.flatten import namespace
from ckpt.sources.torch_archive import read_archive

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt.sources.unpickle import Reader

COMMON_FILE = "common.pt"
ARGS_HINT = "Restore common.pt, or copy the args of another iteration of the same run"


def read_common_file(file: Path, reader: Reader) -> dict[str, Any]:
    """The dictionary in ``common.pt``; raises SourceError for anything else."""
    root = read_archive(file, reader).root
    if not isinstance(root, dict):
        raise SourceError("not a dictionary", file=file)
    return root


def plain_args(common: Mapping[str, Any]) -> dict[str, Any]:
    """The training arguments in the common state; raises SourceError without any."""
    values = namespace(common.get("args"))
    if not values:
        raise SourceError("the checkpoint holds no training arguments", hint=ARGS_HINT)
    if "checkpoint_version" in common:
        values.setdefault("checkpoint_version", common["checkpoint_version"])
    return values
