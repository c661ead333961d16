"""One training tensor of a tiny model, and the Hugging Face tensors that make it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """One training tensor and the Hugging Face tensors (name, shape) that make it.

    ``kind``: vocab, copy (on every rank), column and row (cut along 0 and 1), gate_up, qkv,
    gated (qkv with gates), down (MLA's down projections: whole on every rank under
    TransformerEngine, else column), blocks and delta (``blocks`` of rows, each cut along 0; a
    distributed checkpoint has a key with each one's name). ``also`` names further Hugging Face
    tensors with the same content.
    """

    name: str
    kind: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    also: tuple[str, ...] = ()
    fp32: bool = False
    blocks: tuple[int, ...] = ()
    block_names: tuple[str, ...] = ()


def plain(name: str, hf: str, shape: tuple[int, ...], kind: str = "copy") -> Tensor:
    """A tensor that is one Hugging Face tensor."""
    return Tensor(name, kind, ((hf, shape),))
