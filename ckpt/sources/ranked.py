"""What holds for every format whose files are those of ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.sources.flatten import flatten, namespace
from ckpt.sources.unpickle import TensorRef
from ckpt.tensors import Shard, SourceTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckpt.sources.torch_archive import TorchArchive
    from ckpt.tensors import DType, View

_TIED_HEADS = ("output_layer.weight", "word_embeddings_for_head.weight", "word_embeddings.weight")
_EMBEDDING = "embedding.word_embeddings.weight"
# What all files of one save say alike, and those training arguments that shape its numbers.
_OF_A_SAVE = ("iteration", "checkpoint_version")
_OF_A_RUN = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "padded_vocab_size", "num_experts", "moe_router_topk", "rotary_base",
    "norm_epsilon", "layernorm_epsilon", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
    "consumed_train_samples",
)  # fmt: skip


class OneSave:
    """Files of ranks, one after the other: each another one, and all of one save.

    Pipeline stages share no tensor that would show that they are not.
    """

    def __init__(self, first: TorchArchive | None = None) -> None:
        """``first`` says what the others are compared to; without it only copies are noticed."""
        self._first = _identity(first) if first else {}
        self._file = first.file if first else None
        self._seen: dict[bytes, tuple[tuple[int, ...], Path]] = {}

    def add(self, numbers: tuple[int, ...], archive: TorchArchive) -> None:
        """Raise SourceError for a file of another iteration or run, or one that came before.

        Ranks of the same ``numbers``, expert ranks, may hold the same if they hold no experts;
        so may others that hold vectors alone.
        """
        found = _identity(archive) if self._first else {}
        for name in self._first.keys() & found.keys():
            if self._first[name] != found[name]:
                raise SourceError(
                    f"ranks' files are not of one save: they differ in {name}",
                    file=archive.file,
                    expected=f"{self._first[name]!r:.40} as in {self._file}",
                    found=f"{found[name]!r:.40}",
                    hint="Files of two iterations or runs were mixed; copy this one's again",
                )
        self._refuse_twice(numbers, archive)

    def _refuse_twice(self, numbers: tuple[int, ...], archive: TorchArchive) -> None:
        if not archive.fingerprint:
            return
        others, file = self._seen.setdefault(archive.fingerprint, (numbers, archive.file))
        if file != archive.file and _must_differ(archive, experts_alone=others == numbers):
            raise SourceError(
                "two ranks' files are one and the same",
                file=archive.file,
                expected="each rank's own part of the weights",
                found=f"the content of {file}",
                hint="A file was copied over another one; copy this rank's again",
            )


def _identity(archive: TorchArchive) -> dict[str, Any]:
    values = {name: archive.root[name] for name in _OF_A_SAVE if name in archive.root}
    args = archive.root.get("args")
    known = namespace(args) if args is not None else {}
    return values | {name: known[name] for name in _OF_A_RUN if name in known}


def _must_differ(archive: TorchArchive, *, experts_alone: bool) -> bool:
    entries = flatten(archive.root) if isinstance(archive.root, dict) else ()
    held = [(name, value) for name, value in entries if isinstance(value, TensorRef)]
    if experts_alone:
        return any(".experts." in name for name, _ in held)
    return any(len(value.shape) > 1 for _, value in held)


def no_tensor(value: object, file: Path, name: str) -> SourceError:
    """What to say of an entry among the weights that is none."""
    text = repr(value)
    if re.search("Float8|FP8|NVFP4|QuantizedTensor", text):
        return SourceError(
            f"a weight that TransformerEngine keeps in few bits: {text[:60]}",
            file=file,
            tensor=name,
            hint="Save once in the format torch_dist, or without --fp8-param-gather: "
            "both store such weights in bf16",
        )
    return SourceError(f"an entry that is no tensor: {text[:60]}", file=file, tensor=name)


def spare_copies(
    name: str, ranks: Sequence[int], held: Sequence[Sequence[View]]
) -> tuple[tuple[Shard, ...], ...]:
    """Further expert ranks' copies of a tensor, to be compared; ``held`` are all of each rank.

    One is enough to notice drift. Of vectors, which cost nothing to read, all are compared: a
    file of another run among the expert ranks shows itself by its norms.
    """
    count = min(len(views) for views in held)
    count = count if len(held[0][0].shape) == 1 else min(count, 2)
    return tuple(
        rank_shards(name, ranks, [views[index] for views in held]) for index in range(1, count)
    )


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
