"""Training checkpoints of full size that take hardly any room: every tensor is a hole in a file.

Names, shapes, splits, archives and indexes are those that Megatron-LM 0.16 writes with
TransformerEngine's spec; ``torch.save`` itself writes each archive, without its data. What a
reader of weights never opens (optimizer states, ``distrib_optim.pt``) is a hole altogether.
The file system must support sparse files. ``synthetic.py`` fills the holes of the weights.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import pickle
import struct
import tempfile
import zipfile
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron_shapes import (
    DEEPSEEK_V3,
    LLAMA3_405B,
    MODELS,
    RANKS,
    Model,
    Ranks,
    Tensor,
    expert_tensors,
    is_moe,
    layer_tensors,
    outer_tensors,
    training_args,
)
from torch.distributed.checkpoint import filesystem, metadata, planner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from megatron_shapes import Places

    # Writes a part's bytes at a place in an open file.
    Fill = Callable[[int, int, "Part"], None]
    # (place, length) of each axis that is put before a tensor's own.
    Lead = tuple[tuple[int, int], ...]

__all__ = [
    "DEEPSEEK_V3",
    "LLAMA3_405B",
    "MODELS",
    "RANKS",
    "WRITERS",
    "Model",
    "Part",
    "Ranks",
    "open_item",
    "write_legacy",
    "write_torch_dist",
]
TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = 7
MASTER_BYTES = 12  # of optimizer state for a parameter: fp32 weight and two moments
OBJECT_BYTES = 1513  # an empty object, as torch.save writes it
BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
LEGACY_FILE = "model_optim_rng.pt"


@dataclass(frozen=True)
class Part:
    """A block of a weight that is stored in one piece.

    ``key`` is the weight's name with the numbers that layer and expert have in the whole model,
    whatever the format calls it; ``start`` is the block's first element in it.
    """

    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.dtype.itemsize


def _data_start(stream: BinaryIO, record: zipfile.ZipInfo) -> int:
    """Where the bytes of a record of a stored archive begin."""
    stream.seek(record.header_offset + 26)
    name, extra = struct.unpack("<HH", stream.read(4))
    return record.header_offset + 30 + int(name) + int(extra)


def _parts(key: str, item: Tensor, places: Places) -> list[Part]:
    return [Part(key, start, shape, item.dtype) for start, shape in places]


# --- the torch format -------------------------------------------------------------------------


def write_legacy(
    root: Path, model: Model, ranks: Ranks, *, optimizer: bool = True, fill: Fill | None = None
) -> Path:
    """A run's directory in the ``torch`` format, one file a rank, and beside it the optimizer's.

    Without ``fill`` the weights are holes.
    """
    directory = root / f"iter_{ITERATION:07d}"
    args, stages = training_args(model, ranks, "torch"), ranks.stages(model.values.num_layers)
    for stage, layers in enumerate(stages):
        for (tp, ep), rank in _saving_ranks(ranks).items():
            name = f"mp_rank_{tp:02d}" + (f"_{stage:03d}" if ranks.pp > 1 else "")
            here = directory / (name + (f"_{ep:03d}" if ranks.ep > 1 else ""))
            here.mkdir(parents=True)
            held = _rank_model(model, ranks, rank, (stage, layers))
            own = argparse.Namespace(**vars(args), rank=len(list(directory.iterdir())) - 1)
            _save_rank(here / LEGACY_FILE, held, own)
            if fill:
                _fill_rank(here / LEGACY_FILE, held, fill)
            if optimizer:
                size = MASTER_BYTES * sum(prod(item.shape) for item in held.values())
                _hole(here / "distrib_optim.pt", size)
    (root / TRACKER).write_text(str(ITERATION))
    return root


def _saving_ranks(ranks: Ranks) -> dict[tuple[int, int], int]:
    """Tensor and expert rank of each file of a stage, and the rank in the stage that saves it."""
    found: dict[tuple[int, int], int] = {}
    for rank in range(ranks.world):
        found.setdefault((rank % ranks.tp, rank // ranks.etp % ranks.ep), rank)
    return found


@dataclass(frozen=True)
class _Held:
    """One tensor of a rank file: its parts follow each other in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...] = ()


def _rank_model(
    model: Model, ranks: Ranks, rank: int, at_stage: tuple[int, range]
) -> dict[str, _Held]:
    """What one rank holds, by its own names, in which layers and experts count from 0."""
    a, (stage, layers) = model.values, at_stage
    head, tail = outer_tensors(a)
    found: dict[str, _Held] = {}

    def hold(own: str, key: str, item: Tensor, sharing: int) -> None:
        places = item.chunks(sharing)
        mine = places[0 if item.dim is None else rank % sharing]
        parts = tuple(_parts(key + item.name, item, mine))
        found[own] = _Held(item.part(sharing), item.dtype, parts)

    for item in head if stage == 0 else ():
        hold(item.name, "", item, ranks.tp)
    for number, layer in enumerate(layers):
        at, key = f"decoder.layers.{number}.", f"decoder.layers.{layer}."
        for item in layer_tensors(a, layer):
            hold(at + item.name, key, item, ranks.tp)
            if item.name.endswith("weight"):
                extra = at + item.name.rpartition(".")[0] + "._extra_state"
                found[extra] = _Held((0,), torch.uint8)
        local = a.num_experts // ranks.ep if is_moe(a, layer) else 0
        first = rank // ranks.etp % ranks.ep * local
        for item in expert_tensors(a) if local else ():
            for expert in range(local):
                own = f"{at}mlp.experts.{item.name}{expert}"
                hold(own, f"{key}mlp.experts.{first + expert}.", item, ranks.etp)
    for item in tail if stage == ranks.pp - 1 else ():
        hold(item.name, "", item, ranks.tp)
    return found


def _save_rank(file: Path, held: dict[str, _Held], args: argparse.Namespace) -> None:
    # Memory is reserved and never touched.
    tensors = {name: torch.empty(item.shape, dtype=item.dtype) for name, item in held.items()}
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "model": tensors,
        "optimizer": {
            "optimizer": {"param_groups": [{"lr": 1e-4, "params": list(range(len(held)))}]}
        },
        "rng_state": [{"random_rng_state": (3, tuple(args.rank + n for n in range(625)), None)}],
    }
    with torch.serialization.skip_data():
        torch.save(state, file)


def _fill_rank(file: Path, held: dict[str, _Held], fill: Fill) -> None:
    """Put the parts' bytes into the records, which torch numbers in the order of the model."""
    with zipfile.ZipFile(file) as archive, file.open("r+b") as stream:
        for number, item in enumerate(held.values()):
            record = archive.getinfo(f"{file.stem}/data/{number}")
            if record.file_size != sum(part.nbytes for part in item.parts):
                raise ValueError(f"{file}: record {number} is another tensor")
            at = _data_start(stream, record)
            for part in item.parts:
                fill(stream.fileno(), at, part)
                at += part.nbytes


def _hole(file: Path, size: int) -> None:
    with file.open("wb") as stream:
        stream.truncate(size)


# --- the torch_dist format --------------------------------------------------------------------


@dataclass
class _Stored:
    """One entry of a rank's save plan, and the bytes that it takes."""

    fqn: str
    size: tuple[int, ...] | None
    dtype: torch.dtype
    offset: tuple[int, ...] | None
    shape: tuple[int, ...]
    part: Part | None = None

    @property
    def kind(self) -> str:
        """``weight``, ``object`` or ``state`` of the optimizer."""
        return "weight" if self.part else "object" if self.size is None else "state"


@dataclass
class _Writer:
    """Lays entries end to end in the files of the ranks."""

    directory: Path
    fill: Fill | None
    templates: dict[tuple[Any, ...], _Template] = field(default_factory=dict)

    def write(self, rank: int, entries: list[_Stored]) -> tuple[list[Any], list[Any]]:
        """A rank's three files; its plan's items, and where the storage put them.

        The optimizer's states have the third file for themselves.
        """
        items, places = [], []
        weights = [entry for entry in entries if entry.kind != "state"]
        states = [entry for entry in entries if entry.kind == "state"]
        for number, group in enumerate((weights[::2], weights[1::2], states)):
            if not group:
                continue
            name = f"__{rank}_{number}.distcp"
            with (self.directory / name).open("wb") as stream:
                at = 0
                for entry in group:
                    length = self._put(stream.fileno(), at, entry)
                    items.append(_write_item(entry))
                    index = metadata.MetadataIndex(entry.fqn, _size(entry.offset))
                    places.append((index, filesystem._StorageInfo(name, at, length)))  # noqa: SLF001 - as torch writes it
                    at += length
                stream.truncate(at)
        # Every rank's plan and results reach the coordinator as pickles of their own.
        plan = pickle.loads(pickle.dumps(planner.SavePlan(items)))  # noqa: S301 - its own
        return plan, pickle.loads(pickle.dumps(places))  # noqa: S301 - its own

    def _put(self, descriptor: int, at: int, entry: _Stored) -> int:
        if entry.size is None and self.fill:
            return os.pwrite(descriptor, _object_bytes(), at)
        if entry.size is None:
            return OBJECT_BYTES
        if entry.part is None:
            return OBJECT_BYTES + prod(entry.shape) * entry.dtype.itemsize
        key = (entry.shape, entry.dtype)
        if key not in self.templates:
            self.templates[key] = _template(*key)
        template = self.templates[key]
        os.pwrite(descriptor, template.head, at)
        os.pwrite(descriptor, template.tail, at + template.length - len(template.tail))
        if self.fill:
            self.fill(descriptor, at + template.start, entry.part)
        return template.length


def _size(values: tuple[int, ...] | None) -> torch.Size | None:
    return None if values is None else torch.Size(values)


@functools.cache
def _object_bytes() -> bytes:
    stream = io.BytesIO()
    torch.save([None], stream)
    return stream.getvalue()


@dataclass(frozen=True)
class _Template:
    """What ``torch.save`` writes around a tensor's data, which begins at ``start``."""

    head: bytes
    tail: bytes
    length: int
    start: int


def _template(shape: tuple[int, ...], dtype: torch.dtype) -> _Template:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "archive"
        with torch.serialization.skip_data():
            torch.save(torch.empty(shape, dtype=dtype), file)
        length = file.stat().st_size
        edge = 1024  # both ends are smaller; between them are zeros
        with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            start = _data_start(stream, archive.getinfo("archive/data/0"))
            stream.seek(0)
            head = stream.read(edge)
            stream.seek(max(0, length - edge))
            return _Template(head, stream.read(), length, start)


def _write_item(entry: _Stored) -> Any:  # noqa: ANN401 - torch's class
    index = metadata.MetadataIndex(entry.fqn, _size(entry.offset))
    if entry.size is None or entry.offset is None:
        return planner.WriteItem(index, planner.WriteItemType.BYTE_IO)
    chunk = metadata.ChunkStorageMetadata(torch.Size(entry.offset), torch.Size(entry.shape))
    properties = metadata.TensorProperties(dtype=entry.dtype)
    data = planner.TensorWriteData(chunk, properties, torch.Size(entry.size))
    return planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)


def write_torch_dist(
    root: Path, model: Model, ranks: Ranks, *, optimizer: bool = True, fill: Fill | None = None
) -> Path:
    """A run's directory in the ``torch_dist`` format, save plans in its index included.

    ``optimizer`` adds the distributed optimizer's states (``dp_reshardable``). Without ``fill``
    the weights are holes.
    """
    directory = root / f"iter_{ITERATION:07d}"
    directory.mkdir(parents=True)
    args = training_args(model, ranks, "torch_dist")
    common = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    torch.save(common, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(BACKENDS))
    writer = _Writer(directory, fill)
    plans: list[Any] = []
    storage: dict[Any, Any] = {}
    for rank, entries in enumerate(_entries_by_rank(model, ranks, optimizer=optimizer)):
        plan, places = writer.write(rank, entries)
        plans.append(plan)
        storage.update(places)
    index = metadata.Metadata(_state(plans), planner_data=None, storage_data=storage)
    index.storage_meta = metadata.StorageMeta("/runs/full-scale")
    index.all_local_plans = plans  # type: ignore[attr-defined]
    (directory / ".metadata").write_bytes(pickle.dumps(index, protocol=4))
    (root / TRACKER).write_text(str(ITERATION))
    return root


def _state(plans: list[Any]) -> dict[str, Any]:
    """What the coordinator makes of the plans: every tensor with all its chunks."""
    state: dict[str, Any] = {}
    for item in (item for plan in plans for item in plan.items):
        data = item.tensor_data
        if data is None:
            state[item.index.fqn] = metadata.BytesStorageMetadata()
        else:
            entry = metadata.TensorStorageMetadata(data.properties, data.size, [])
            state.setdefault(item.index.fqn, entry).chunks.append(data.chunk)
    return state


def _entries_by_rank(model: Model, ranks: Ranks, *, optimizer: bool) -> Iterator[list[_Stored]]:
    """What each rank saves, stage by stage."""
    layers = ranks.stages(model.values.num_layers)
    for stage in range(ranks.pp):
        held: list[list[_Stored]] = [[] for _ in range(ranks.world)]
        _add_dense(held, model, ranks, layers[stage], stage)
        _add_experts(held, model, ranks, layers[stage])
        if optimizer:
            _add_optimizer(held, ranks, stage)
        yield from held


def _add_dense(
    held: list[list[_Stored]], model: Model, ranks: Ranks, layers: range, stage: int
) -> None:
    a = model.values
    head, tail = outer_tensors(a)
    placed: list[tuple[Tensor, str, int | None]] = []
    placed += [(item, "", None) for item in (head if stage == 0 else ())]
    for layer in layers:
        placed += [(item, f"decoder.layers.{layer}.", layer) for item in layer_tensors(a, layer)]
    placed += [(item, "", None) for item in (tail if stage == ranks.pp - 1 else ())]
    for number, (item, key, at_layer) in enumerate(placed):
        at, lead = ("", ()) if at_layer is None else _stacked(a, at_layer)
        for tp, places in enumerate(item.chunks(ranks.tp)):
            # Replicas of a rank over the stage take turns in saving.
            rank = (tp + ranks.tp * number) % ranks.world
            held[rank] += _stored(at + item.name, _parts(key + item.name, item, places), item, lead)
        if item.name.endswith("weight") and at:
            module = at + item.name.rpartition(".")[0]
            place, of = lead[0] if lead else (0, 1)
            held[0].append(_object(f"{module}._extra_state/shard_{place}_{of}"))


def _stacked(a: argparse.Namespace, layer: int) -> tuple[str, Lead]:
    """A layer's prefix and its place among those it is stacked with, if all layers are alike."""
    if isinstance(a.moe_layer_freq, list):
        return f"decoder.layers.{layer}.", ()
    return "decoder.layers.", ((layer, a.num_layers),)


def _add_experts(held: list[list[_Stored]], model: Model, ranks: Ranks, layers: range) -> None:
    a = model.values
    for layer in layers:
        at, lead = _stacked(a, layer)
        for item in expert_tensors(a) if is_moe(a, layer) else ():
            name = f"{at}mlp.experts.experts.{item.name}"
            for expert in range(a.num_experts):
                rank = expert // (a.num_experts // ranks.ep) * ranks.etp
                key = f"decoder.layers.{layer}.mlp.experts.{expert}.{item.name}"
                both = (*lead, (expert, a.num_experts))
                for etp, places in enumerate(item.chunks(ranks.etp)):
                    held[rank + etp] += _stored(name, _parts(key, item, places), item, both)
                shard = ".".join(str(place) for place, _ in both)
                of = ".".join(str(length) for _, length in both)
                extra = name.removesuffix("weight") + f"_extra_state/shard_{shard}.0_{of}.1"
                held[rank].append(_object(extra))


def _stored(name: str, parts: list[Part], item: Tensor, lead: Lead) -> list[_Stored]:
    """The chunks of a tensor; ``lead`` is the place on each axis that is put before its own."""
    size = (*(length for _, length in lead), *item.shape)
    first = tuple(place for place, _ in lead)
    ones = (1,) * len(lead)
    return [
        _Stored(name, size, part.dtype, (*first, *part.start), (*ones, *part.shape), part)
        for part in parts
    ]


def _object(fqn: str) -> _Stored:
    return _Stored(fqn, None, torch.uint8, None, ())


def _add_optimizer(held: list[list[_Stored]], ranks: Ranks, stage: int) -> None:
    """One flat bucket for each rank and state, with a chunk for each parameter in it."""
    for number, entries in enumerate(held):
        group = stage * ranks.world + number
        lengths = [prod(entry.shape) for entry in entries if entry.size is not None]
        for state in ("param", "exp_avg", "exp_avg_sq"):
            fqn = (
                f"optimizer.distributed.dp_group_idx_{group}.gbuf_idx_0."
                f"dtype_(torch.bfloat16, torch.float32).bucket_idx_0.{state}"
            )
            at = 0
            for length in lengths:
                part = _Stored(fqn, (sum(lengths),), torch.float32, (at,), (length,))
                entries.append(part)
                at += length


WRITERS = {"torch": write_legacy, "torch_dist": write_torch_dist}


def open_item(file: Path, offset: int, length: int) -> Any:  # noqa: ANN401 - what was saved
    """An item of a ``.distcp`` file as torch itself reads it."""
    with file.open("rb") as stream:
        stream.seek(offset)
        return torch.load(io.BytesIO(stream.read(length)))
