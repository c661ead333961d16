"""ZeRO stage 3: the weights are what the optimizer's partitions hold, in float32.

``zero_pp_rank_D_mp_rank_TT_model_states.pt`` of data-parallel rank D and tensor rank TT
holds the arguments and the shapes of the parameters in order; ``*optim_states.pt`` beside it
holds flat groups. Each parameter is padded to a multiple of the ranks D and cut evenly among
them; on each rank its piece follows that of the parameter before, from group to group
(deepspeed/utils/zero_to_fp32.py, _zero3_merge_trainable_params). Parameters that were not
trained lie as such pieces in the model files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.parts import Held, Placed, flat_boxes
from ckpt.sources import names
from ckpt.sources.assemble import assemble, check_ranks, read_run
from ckpt.sources.checkpoint import Checkpoint, Parallelism
from ckpt.sources.deepspeed import numbered
from ckpt.sources.torch_archive import TorchArchive, read_archive
from ckpt.sources.unpickle import Reader, TensorRef
from ckpt.storage import ahead
from ckpt.tensors import View, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ckpt.sources.locate import Located

_MODEL_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_CAST = "--dtype bf16 or fp16 gives them the type that training computed in"


@dataclass(frozen=True)
class _Rank:
    """The files of one tensor rank, by data-parallel rank."""

    models: tuple[TorchArchive, ...]
    optimizers: tuple[TorchArchive, ...]


def read(located: Located, *, spans: bool) -> Checkpoint:
    """The checkpoint in a directory of partitions; no tensor is read.

    Raises SourceError for partitions that are missing or do not fit the parameters' shapes.
    """
    del spans
    reader = Reader()
    models, optimizers = _grid(located.directory)
    ranks = [_open(models, optimizers, rank, reader) for rank in _second(models)]
    first = ranks[0].models[0]
    run = read_run(located, first, reader)
    stored: dict[str, dict[int, Held]] = {}
    skipped: list[tuple[str, str]] = []
    for number, rank in enumerate(ranks):
        for name, held in _held(rank):
            reason = names.skip_reason(name)
            if reason is None:
                stored.setdefault(name, {})[number] = held
            elif number == 0:
                skipped.append((name, reason))
    tp, dp = len(ranks), len(ranks[0].models)
    check_ranks(run, stored, tp)
    return assemble(
        run,
        stored,
        files=[a.file for rank in ranks for a in (*rank.models, *rank.optimizers)],
        parallelism=Parallelism(tensor=tp, expert_tensor=tp),
        skipped=skipped,
        notes=(f"weights are the optimizer's float32 values in {dp} partitions of ZeRO 3", _CAST),
    )


def _second(keys: Iterable[tuple[int, ...]]) -> range:
    return range(max(key[1] for key in keys) + 1)


def _grid(directory: Path) -> tuple[dict[tuple[int, ...], Path], dict[tuple[int, ...], Path]]:
    """Model and optimizer files by (data-parallel, tensor-parallel) rank, none missing."""
    models, optimizers = numbered(directory, _MODEL_FILE), numbered(directory, _OPTIM_FILE)
    keys = {*models, *optimizers}
    data = range(max(key[0] for key in keys) + 1)
    missing = [
        f"zero_pp_rank_{d}_mp_rank_{t:02d}_{kind}_states.pt"
        for d in data
        for t in _second(keys)
        for kind, files in (("model", models), ("optim", optimizers))
        if (d, t) not in files
    ]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""  # noqa: PLR2004
        raise SourceError(
            "ZeRO 3 keeps a part of every weight in each of its files, and some are missing: "
            + ", ".join(missing[:4])
            + more,
            file=directory,
            hint="Their part cannot be rebuilt from the others; copy them as well",
        )
    return models, optimizers


def _open(
    models: Mapping[tuple[int, ...], Path],
    optimizers: Mapping[tuple[int, ...], Path],
    rank: int,
    reader: Reader,
) -> _Rank:
    data = sorted(d for d, t in models if t == rank)
    files = [models[d, rank] for d in data] + [optimizers[d, rank] for d in data]
    opened = list(ahead(lambda file: read_archive(file, reader), files, files[0]))
    return _Rank(tuple(opened[: len(data)]), tuple(opened[len(data) :]))


def _held(rank: _Rank) -> Iterator[tuple[str, Held]]:
    """Every parameter of a tensor rank by its stored name."""
    first = rank.models[0]
    state = first.root
    _check_buffers(first)
    shapes = _shapes(first, state.get("param_shapes"))
    partitions = [_flat_groups(archive, len(rank.models)) for archive in rank.optimizers]
    sizes = {tuple(prod(group.shape) for group in groups) for groups in partitions}
    if len(sizes) > 1:
        raise SourceError("partitions of different sizes", file=rank.optimizers[0].file)
    at = 0
    for name, shape in shapes.items():
        count = -(-prod(shape) // len(partitions))
        pieces = [_runs(groups, at, count) for groups in partitions]
        yield name, _put_together(shape, count, pieces)
        at += count
    if at != sum(next(iter(sizes))):
        raise SourceError(
            "the partition is of another size than the parameters' parts",
            file=rank.optimizers[0].file,
            expected=f"{at} elements",
            found=f"{sum(next(iter(sizes)))}",
        )
    yield from _frozen(rank)


def _shapes(archive: TorchArchive, groups: object) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters in the order of the partitions."""
    found: dict[str, tuple[int, ...]] = {}
    for group in groups if isinstance(groups, list) else [groups]:
        if not isinstance(group, dict) or not all(isinstance(s, tuple) for s in group.values()):
            raise SourceError("param_shapes is damaged", file=archive.file)
        found |= group
    return found


def _flat_groups(archive: TorchArchive, ranks: int) -> list[View]:
    """The float32 groups of one partition, in order."""
    root = archive.root
    state = root.get("optimizer_state_dict") if isinstance(root, dict) else None
    groups = state.get("fp32_flat_groups") if isinstance(state, dict) else None
    if not isinstance(state, dict) or not isinstance(groups, list) or not groups:
        raise SourceError(
            "holds no fp32_flat_groups",
            file=archive.file,
            hint="The run may have kept its weights on NVMe; save it again without",
        )
    counts = state.get("partition_count")
    if any(count != ranks for count in (counts if isinstance(counts, list) else [counts])):
        raise SourceError(
            "was written by another number of data-parallel ranks than there are files",
            file=archive.file,
            expected=f"{counts} partitions",
            found=f"{ranks}",
        )
    return [_flat(archive, group, "fp32_flat_groups") for group in groups]


def _flat(archive: TorchArchive, value: object, name: str) -> View:
    view = archive.view(value, name=name) if isinstance(value, TensorRef) else None
    if view is None or len(view.shape) != 1 or not view.is_contiguous:
        raise SourceError("no flat tensor", file=archive.file, tensor=name)
    return view


def _runs(groups: Sequence[View], first: int, count: int) -> list[View]:
    """``count`` elements from ``first`` on of the groups laid end to end."""
    found, at = [], 0
    for group in groups:
        size = group.shape[0]
        start, end = max(first, at), min(first + count, at + size)
        if start < end:
            found.append(group.narrow(0, start - at, end - start))
        at += size
    return found


def _put_together(shape: tuple[int, ...], count: int, pieces: Sequence[Sequence[View]]) -> Held:
    """The parameter whose rank r holds elements r * count and on; padding at the end is left."""
    parts: list[Placed] = []
    for rank, runs in enumerate(pieces):
        at = rank * count
        for run in runs:
            end = min(at + run.shape[0], prod(shape))
            parts += _placed(shape, run, at, end)
            at += run.shape[0]
    return Held(shape, tuple(parts))


def _placed(shape: tuple[int, ...], run: View, first: int, end: int) -> Iterator[Placed]:
    at = 0
    for start, size in flat_boxes(shape, first, end):
        offset = run.offset + at * run.dtype.itemsize
        view = View(run.file, offset, run.dtype, size, contiguous_strides(size))
        yield Placed(view, start)
        at += prod(size)


def _frozen(rank: _Rank) -> Iterator[tuple[str, Held]]:
    """Parameters that were not trained: pieces in the model files, in the model's own type."""
    shapes = rank.models[0].root.get("frozen_param_shapes") or {}
    for name, shape in _shapes(rank.models[0], shapes).items():
        pieces = []
        for archive in rank.models:
            fragments: Any = archive.root.get("frozen_param_fragments") or {}
            pieces.append([_flat(archive, fragments.get(name), name)])
        count = -(-prod(shape) // len(pieces))
        if any(piece[0].shape[0] != count for piece in pieces):
            raise SourceError(
                "a frozen parameter's parts are of another size than its shape says",
                file=rank.models[0].file,
                tensor=name,
                expected=f"{count} elements on each of {len(pieces)} ranks",
            )
        yield name, _put_together(shape, count, pieces)


def _check_buffers(archive: TorchArchive) -> None:
    """Raise SourceError for a buffer that may be part of the model."""
    for name in archive.root.get("buffer_names") or ():
        if names.skip_reason(name) is None:
            raise SourceError("a buffer of unknown meaning", file=archive.file, tensor=name)
