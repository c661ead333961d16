"""Checkpoint formats, each a module behind one function; the registry is a dict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ckpt.errors import SourceError
from ckpt.sources import deepspeed, legacy, torch_dcp, torch_dist, universal, zarr, zero
from ckpt.sources.checkpoint import Checkpoint, Parallelism
from ckpt.sources.locate import IterationChoice, Located, locate
from ckpt.storage import list_whole, refresh

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FORMATS", "Checkpoint", "Parallelism", "locate", "open_source"]


class SourceFormat(Protocol):
    """A module that reads one checkpoint format."""

    def read(self, located: Located, *, spans: bool) -> Checkpoint:
        """List the checkpoint; without ``spans`` the tensors' bytes need not be located."""


FORMATS: dict[str, SourceFormat] = {
    "torch_dist": torch_dist,
    "torch": legacy,
    "zarr": zarr,
    "torch_dcp": torch_dcp,
    "fsdp_dtensor": torch_dcp,
    "deepspeed": deepspeed,
    "deepspeed_zero3": zero,
    "deepspeed_universal": universal,
}
# Families that the programs behind a format train; the others train all. Megatron-DeepSpeed and
# GPT-NeoX have dense models only that a Hugging Face class represents.
_DENSE = frozenset({"llama", "mistral", "gpt2", "gpt_neox", "bloom"})
TRAINED_ONLY: dict[str, frozenset[str]] = {
    "deepspeed": _DENSE,
    "deepspeed_zero3": _DENSE,
    "deepspeed_universal": _DENSE,
}


def open_source(
    path: Path, iteration: IterationChoice = "latest", *, spans: bool = True
) -> Checkpoint:
    """The checkpoint that ``path`` and ``iteration`` mean, listed without reading tensors.

    Raises SourceError when there is none, when it is incomplete or damaged, and
    UnsafePickleError when one of its pickles asks for code.
    """
    refresh(path)
    try:
        located = locate(path, iteration)
        list_whole(located.directory)
        return FORMATS[located.format].read(located, spans=spans)
    except OSError as error:  # a directory that cannot be listed, an object that went away
        raise SourceError(
            f"cannot read: {error.strerror}",
            file=error.filename or path,
            hint="Give yourself the right to read it, or wait until its writer has finished",
        ) from error
