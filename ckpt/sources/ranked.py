"""What holds for every format whose files are those of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.tensors import Shard, SourceTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.tensors import DType, View

_TIED_HEADS = ("output_layer.weight", "word_embeddings_for_head.weight", "word_embeddings.weight")
_EMBEDDING = "embedding.word_embeddings.weight"


def rank_shards(name: str, ranks: Sequence[int], views: Sequence[View]) -> tuple[Shard, ...]:
    """The shards of one tensor, of these ranks; raises SourceError where element types differ."""
    one_dtype(name, views)
    return tuple([Shard(view, rank=rank) for rank, view in zip(ranks, views, strict=True)])


def one_dtype(name: str, views: Sequence[View]) -> DType:
    """The element type of a tensor's parts; raises SourceError where they differ."""
    dtype = views[0].dtype
    for view in views:
        if view.dtype is not dtype:
            raise SourceError(
                "ranks hold different element types",
                file=view.file,
                tensor=name,
                expected=dtype.name,
                found=view.dtype.name,
            )
    return dtype


def fold_tied(tensors: Sequence[SourceTensor], args: Mapping[str, Any]) -> list[SourceTensor]:
    """A tied model's last stage keeps a copy of the embedding as its head: one tensor, one copy.

    The copy is kept for comparison. Models that are not tied come back as they are.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    embedding = by_name.get(_EMBEDDING)
    if args.get("untie_embeddings_and_output_weights", False) or embedding is None:
        return list(tensors)
    for name in _TIED_HEADS:
        head = by_name.pop(name, None)
        if head is not None:
            embedding = replace(
                embedding,
                copies=(*embedding.copies, head.shards),
                copy_names=(*embedding.copy_names, name),
            )
    by_name[_EMBEDDING] = embedding
    return list(by_name.values())
