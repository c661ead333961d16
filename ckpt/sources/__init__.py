"""Checkpoint formats, each a module behind one function; the registry is a dict."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ckpt.errors import SourceError
from ckpt.sources import deepspeed, legacy, torch_dcp, torch_dist, universal, zarr, zero
from ckpt.sources.checkpoint import Checkpoint, Parallelism
from ckpt.sources.locate import IterationChoice, Located, locate
from ckpt.storage import list_whole, refresh, stamps_below

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["FORMATS", "Checkpoint", "Parallelism", "locate", "open_source", "reading"]
_KEEP = "It was there a moment ago: put it back, and keep it until it is converted"


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
    with reading(path):
        located = locate(path, iteration)
        list_whole(located.directory)
        if located.format not in FORMATS:  # it was there a moment ago
            raise SourceError("the checkpoint went away", file=located.directory, hint=_KEEP)
        # Before the first file is read: what is planned with belongs to this state or an older one.
        stamps = dict(stamps_below(located.directory)) if spans else {}
        return replace(FORMATS[located.format].read(located, spans=spans), stamps=stamps)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what cannot be read inside into a SourceError: no right to, or gone meanwhile."""
    try:
        yield
    except OSError as error:
        file, gone = error.filename or path, isinstance(error, FileNotFoundError)
        hint = _KEEP if gone else "Give yourself the right to read it, or mend what holds it"
        raise SourceError(f"cannot read: {error.strerror}", file=file, hint=hint) from error
