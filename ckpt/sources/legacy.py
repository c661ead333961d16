"""Megatron-LM's legacy ``torch`` format: one file for each model-parallel rank.

``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` holds ``args`` and ``model`` (``model0``,
``model1``, ... with interleaved pipeline stages). Layers are numbered from 0 in each stage
and chunk, experts from 0 on each expert rank; both are made global here. The stages'
layers are counted in the files, so any pipeline split is right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.sources import names
from ckpt.sources.checkpoint import Checkpoint, Parallelism, count_in, parallelism_of
from ckpt.sources.flatten import flatten, namespace
from ckpt.sources.locate import rank_directory
from ckpt.sources.ranked import (
    OneSave,
    fold_tied,
    no_tensor,
    rank_shards,
    spare_copies,
)
from ckpt.sources.rows import reorder_qkv
from ckpt.sources.torch_archive import TorchArchive, read_archive
from ckpt.sources.unpickle import Reader, TensorRef, unhurried_collector
from ckpt.storage import ahead
from ckpt.tensors import SourceTensor, View

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ckpt.sources.locate import Located

FILE_NAME = "model_optim_rng.pt"


@dataclass(frozen=True)
class _Rank:
    """One file of the grid, by its tensor, pipeline and expert rank."""

    tp: int
    pp: int
    ep: int
    file: Path


def _chunks(root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """State dicts of the model chunks, in order."""
    if "model" in root:
        return [root["model"]]
    numbered = sorted(
        (int(key[5:]), value)
        for key, value in root.items()
        if key.startswith("model") and key[5:].isdigit()
    )
    return [value for _, value in numbered]


def read(located: Located, *, spans: bool) -> Checkpoint:
    """The checkpoint in a legacy directory.

    Without ``spans`` the views point to the records' headers instead of to the elements.
    Raises SourceError when a rank's file is missing or damaged, or when the files are not
    those that the training arguments say.
    """
    reader = Reader()
    with unhurried_collector():
        return _read(located, _rank_files(located.directory), reader, spans=spans)


def _read(
    located: Located, files: dict[tuple[int, ...], Path], reader: Reader, *, spans: bool
) -> Checkpoint:
    first = _open(next(iter(files.values())), reader, spans=spans)
    args = _plain_args(first)
    sizes = parallelism_of(args)
    ranks = _grid(files, sizes, located.directory)
    collector = _Collector(args, replace(sizes, virtual_pipeline=len(_chunks(first.root))))
    save = OneSave(first)

    def opened(rank: _Rank) -> TorchArchive:
        return first if rank.file == first.file else _open(rank.file, reader, spans=spans)

    # What a file holds beside places of tensors is forgotten before the next.
    for rank, archive in zip(ranks, ahead(opened, ranks, located.directory), strict=True):
        save.add((rank.tp, rank.pp), archive)
        collector.add(rank, archive)
    tensors = [reorder_qkv(tensor, args) for tensor in collector.tensors()]
    return Checkpoint(
        format="torch",
        directory=located.directory,
        iteration=located.iteration,
        args=args,
        parallelism=collector.sizes,
        tensors=tuple(tensors),
        shapes={tensor.name: None for tensor in tensors},
        skipped=names.count_skipped(collector.skipped),
        files=tuple(files.values()),
        metadata_files=(),
        foreign_classes=reader.foreign_classes,
        notes=located.notes,
    )


def _rank_files(directory: Path) -> dict[tuple[int, ...], Path]:
    """Files by the numbers in their directory's name, in ascending order."""
    found = {}
    for path in sorted(directory.iterdir(), key=lambda path: path.name):
        numbers = rank_directory(path.name)
        if numbers is None:
            continue
        file = path / FILE_NAME
        if not file.is_file():
            raise SourceError(f"{FILE_NAME} is missing", file=path)
        found[numbers] = file
    return found


def _open(file: Path, reader: Reader, *, spans: bool) -> TorchArchive:
    archive = read_archive(file, reader, spans=spans)
    root = archive.root
    if not isinstance(root, dict) or not _holds_models(root):
        raise SourceError(
            "holds no model",
            file=file,
            expected="keys args, model",
            found=", ".join(str(key) for key in root) if isinstance(root, dict) else type(root),
        )
    return archive


def _holds_models(root: dict[Any, Any]) -> bool:
    models = [root[key] for key in _model_keys(root)]
    return bool(models) and all(isinstance(model, dict) for model in models)


def _model_keys(root: dict[Any, Any]) -> list[Any]:
    return [key for key in root if re.fullmatch(r"model\d*", str(key))]


def _plain_args(archive: TorchArchive) -> dict[str, Any]:
    args = archive.root.get("args")
    if args is None:
        raise SourceError(
            "holds no training arguments",
            file=archive.file,
            hint="Save the checkpoint with args, as Megatron-LM does",
        )
    values = namespace(args)
    values["checkpoint_version"] = archive.root.get("checkpoint_version", 0)
    return values


def _grid(files: dict[tuple[int, ...], Path], sizes: Parallelism, directory: Path) -> list[_Rank]:
    """Every rank's file; the name's numbers are read by what the args say (PP before EP)."""
    ranks: dict[tuple[int, int, int], _Rank] = {}
    for numbers, file in files.items():
        rest = list(numbers[1:])
        pp = rest.pop(0) if sizes.pipeline > 1 and rest else 0
        ep = rest.pop(0) if sizes.expert > 1 and rest else 0
        if any(rest):  # some versions write _000 for a size of 1
            raise SourceError(
                "the directory's name has more ranks than the training arguments",
                file=file,
                expected=f"PP {sizes.pipeline}, EP {sizes.expert}",
                found=file.parent.name,
            )
        known = ranks.setdefault((numbers[0], pp, ep), _Rank(numbers[0], pp, ep, file))
        if known.file is not file:
            raise SourceError(
                "two directories are of the same rank",
                file=file,
                found=f"{known.file.parent.name} and {file.parent.name}",
            )
    missing = [key for key in _expected(sizes) if key not in ranks]
    if missing:
        raise SourceError(
            f"files of {len(missing)} ranks are missing: "
            + ", ".join(_directory_name(*key, sizes) for key in missing),
            file=directory,
            hint="Their tensors cannot be rebuilt from the other ranks; copy them as well",
        )
    extra = sorted(set(ranks) - set(_expected(sizes)))
    if extra:
        raise SourceError(
            "files of ranks that the training arguments do not have: "
            + ", ".join(ranks[key].file.parent.name for key in extra),
            file=directory,
            hint="They are of another run; remove them",
        )
    return [ranks[key] for key in sorted(ranks, key=lambda key: (key[1], key[2], key[0]))]


def _expected(sizes: Parallelism) -> list[tuple[int, int, int]]:
    """Ranks (tp, pp, ep) that save a file: those of the smallest world that holds the model.

    Dense ranks run over TP first, expert ranks over ETP and then EP
    (megatron/core/parallel_state.py, order tp-cp-ep-dp-pp).
    """
    world = max(sizes.tensor, sizes.expert * sizes.expert_tensor)
    pairs = [
        (rank % sizes.tensor, rank // sizes.expert_tensor % sizes.expert) for rank in range(world)
    ]
    return [(tp, pp, ep) for pp in range(sizes.pipeline) for tp, ep in dict.fromkeys(pairs)]


def _directory_name(tp: int, pp: int, ep: int, sizes: Parallelism) -> str:
    name = f"mp_rank_{tp:02d}"
    name += f"_{pp:03d}" if sizes.pipeline > 1 else ""
    return name + (f"_{ep:03d}" if sizes.expert > 1 else "")


class _Collector:
    """Gathers the ranks' shards of each tensor under global names."""

    def __init__(self, args: Mapping[str, Any], sizes: Parallelism) -> None:
        self.args, self.sizes = args, sizes
        self.skipped: list[tuple[str, str]] = []
        self._layers: dict[int, int] = {}
        self._experts: set[str] = set()
        self._pending: list[tuple[_Rank, int, dict[str, View]]] = []

    def add(self, rank: _Rank, archive: TorchArchive) -> None:
        """Take the tensors of one file."""
        chunks = _chunks(archive.root)
        if len(chunks) != self.sizes.virtual_pipeline:
            raise SourceError(
                "holds another number of model chunks than its neighbours",
                file=rank.file,
                expected=self.sizes.virtual_pipeline,
                found=len(chunks),
            )
        for number, chunk in enumerate(chunks):
            views = self._views(rank, archive, chunk)
            stage = number * self.sizes.pipeline + rank.pp
            layers = {names.layer_of(name) for name in views} - {None}
            self._count_layers(rank, stage, {layer for layer in layers if layer is not None})
            self._pending.append((rank, stage, views))

    def _count_layers(self, rank: _Rank, stage: int, layers: set[int]) -> None:
        count = len(layers)
        if layers != set(range(count)):
            raise SourceError(
                "layers are not numbered from 0 without a gap",
                file=rank.file,
                found=sorted(layers),
            )
        if self._layers.setdefault(stage, count) != count:
            raise SourceError(
                "holds another number of layers than the other ranks of its stage",
                file=rank.file,
                expected=self._layers[stage],
                found=count,
            )

    def _views(
        self, rank: _Rank, archive: TorchArchive, chunk: Mapping[str, Any]
    ) -> dict[str, View]:
        views: dict[str, View] = {}
        for name, value in flatten(chunk):
            reason = names.skip_reason(name)
            if reason:
                if rank.tp == rank.ep == 0:
                    self.skipped.append((name, reason))
            elif isinstance(value, TensorRef):
                view = archive.view(value, name=name)
                plain = names.canonical(name)
                grouped = ".mlp.experts." in plain and not names.is_expert(plain)
                parts = self._split_grouped(plain, view) if grouped else ((plain, view),)
                for part_name, part in parts:
                    if part_name in views:
                        raise SourceError(
                            "two entries are the same tensor",
                            file=rank.file,
                            tensor=name,
                            hint="A model with an encoder and a decoder (T5) is not supported"
                            if name.startswith(("encoder.", "decoder."))
                            else None,
                        )
                    views[part_name] = part
            elif value is not None:
                raise no_tensor(value, rank.file, name)
        return views

    def _split_grouped(self, name: str, view: View) -> Iterator[tuple[str, View]]:
        """Experts that one parameter holds, each as ``[out, in]``.

        ``weight1`` is [H, E*2f] and ``weight2`` [E*f, H] in name only: their memory is
        [E, H, 2f] and [E, f, H] (moe/experts.py, GroupedMLP). A grouped TE parameter is
        [E, out, in].
        """
        stem, _, last = name.rpartition(".")
        local = self._local_experts
        if stem.endswith(".mlp.experts") and last in {"weight1", "weight2"}:
            hidden = view.shape[0] if last == "weight1" else view.shape[1]
            inner = prod(view.shape) // max(1, local * hidden)
            rows = (hidden, inner) if last == "weight1" else (inner, hidden)
            if not view.is_contiguous or local * rows[0] * rows[1] != prod(view.shape):
                raise SourceError("grouped experts do not fit num_experts", tensor=name)
            stack = view.reshape((local, *rows))
            number = "1" if last == "weight1" else "2"
            for index in range(local):
                yield (
                    f"{stem}.{index}.linear_fc{number}.weight",
                    stack.select(0, index).transpose(),
                )
        elif ".mlp.experts.linear_fc" in name and len(view.shape) == 3:  # noqa: PLR2004
            head, _, tail = name.partition(".mlp.experts.")
            for index in range(view.shape[0]):
                yield f"{head}.mlp.experts.{index}.{tail}", view.select(0, index)
        else:
            yield name, view

    def tensors(self) -> list[SourceTensor]:
        """The tensors under global names, shards in order of rank."""
        offsets = self._offsets()
        shards: dict[str, dict[int, list[View]]] = {}
        for rank, stage, views in self._pending:
            held, first = self._expert_ranks(rank), rank.ep * self._local_experts
            for local_name, view in views.items():
                name, is_expert = names.global_name(local_name, offsets[stage], first)
                if is_expert and len(held) > 1:
                    raise self._overwritten(rank, name, len(held))
                if is_expert:
                    self._experts.add(name)
                ranks = shards.setdefault(name, {})
                for key in held if is_expert else (rank.tp,):
                    ranks.setdefault(key, []).append(view)
        return self._join(shards)

    def _offsets(self) -> dict[int, int]:
        """The number of the first layer of each virtual stage."""
        offsets, total = {}, 0
        for stage in sorted(self._layers):
            offsets[stage] = total
            total += self._layers[stage]
        expected = count_in(self.args, "num_layers", "encoder_num_layers")
        if expected and total != expected:
            raise SourceError(
                "the files do not hold all layers",
                expected=f"{expected} layers",
                found=f"{total} in {len(offsets)} pipeline stages",
            )
        return offsets

    def _overwritten(self, rank: _Rank, name: str, writers: int) -> SourceError:
        return SourceError(
            f"{writers} expert tensor-parallel ranks wrote this one file over each other",
            file=rank.file,
            tensor=name,
            expected=f"ETP at most TP, which is {self.sizes.tensor}",
            found=f"ETP {self.sizes.expert_tensor}",
            hint="The other ranks' experts are lost; save the run again as torch_dist",
        )

    @property
    def _local_experts(self) -> int:
        return count_in(self.args, "num_experts") // self.sizes.expert

    def _expert_ranks(self, rank: _Rank) -> tuple[int, ...]:
        """The ranks within an expert's sharding group that wrote a file's experts."""
        sizes = self.sizes
        world = max(sizes.tensor, sizes.expert * sizes.expert_tensor)
        held = (
            number % sizes.expert_tensor
            for number in range(world)
            if (number % sizes.tensor, number // sizes.expert_tensor % sizes.expert)
            == (rank.tp, rank.ep)
        )
        return tuple(dict.fromkeys(held))

    def _join(self, shards: dict[str, dict[int, list[View]]]) -> list[SourceTensor]:
        tensors = []
        for name, by_rank in shards.items():
            ranks = sorted(by_rank)
            views = [by_rank[key][0] for key in ranks]
            expected = self.sizes.expert_tensor if name in self._experts else self.sizes.tensor
            if len(views) != expected:
                raise SourceError(
                    "only some ranks hold this tensor",
                    file=views[0].file,
                    tensor=name,
                    expected=f"{expected} tensor-parallel ranks",
                    found=f"ranks {ranks}",
                )
            main = rank_shards(name, ranks, views)
            copies = spare_copies(name, ranks, [by_rank[key] for key in ranks])
            held = (name,) * len(copies)
            dtype = views[0].dtype
            tensors.append(SourceTensor(name, dtype, main, copies=copies, copy_names=held))
        return fold_tied(tensors, self.args)
