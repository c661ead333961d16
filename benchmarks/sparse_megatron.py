"""Training checkpoints of full size that take hardly any room: every tensor is a hole in a file.

Names, shapes, splits, archives and indexes are those that Megatron-LM 0.16 writes with
TransformerEngine's spec; ``torch.save`` itself writes each archive, without its data. What a
reader of weights never opens (optimizer states, ``distrib_optim.pt``) is a hole altogether.
The file system must support sparse files.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import signal
import tempfile
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

if TYPE_CHECKING:
    from collections.abc import Iterator

    Places = list[tuple[tuple[int, ...], tuple[int, ...]]]  # (offset, shape) of chunks

TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = 7
MASTER_BYTES = 12  # of optimizer state for a parameter: fp32 weight and two moments
OBJECT_BYTES = 1513  # an empty object, as torch.save writes it


@dataclass(frozen=True)
class Model:
    """The training arguments that make an architecture; those that Megatron-LM would hold."""

    args: dict[str, Any]

    @property
    def values(self) -> argparse.Namespace:
        """The arguments by attribute."""
        return argparse.Namespace(**{**COMMON, **self.args})


@dataclass(frozen=True)
class Ranks:
    """Parallel sizes; ``last`` is how many layers the last pipeline stage holds, if fewer."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    last: int | None = None

    @property
    def world(self) -> int:
        """Ranks of a pipeline stage in the smallest world that holds the model."""
        return max(self.tp, self.ep * self.etp)

    def stages(self, layers: int) -> list[range]:
        """The layers of each stage."""
        count = self.pp
        each = layers // count if self.last is None else (layers - self.last) // (count - 1)
        return [range(n * each, min(layers, (n + 1) * each)) for n in range(count)]


@dataclass(frozen=True)
class Tensor:
    """A weight as one process would hold it, and the dimension that ranks share."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    gated: bool = False
    dtype: torch.dtype = torch.bfloat16

    def part(self, ranks: int) -> tuple[int, ...]:
        """The shape that each of ``ranks`` ranks holds."""
        return tuple(n // ranks if axis == self.dim else n for axis, n in enumerate(self.shape))

    def chunks(self, ranks: int) -> list[Places]:
        """For each rank, where its chunks begin and how large they are."""
        if self.dim is None:
            return [[((0,) * len(self.shape), self.shape)], *([] for _ in range(ranks - 1))]
        halves = 2 if self.gated else 1
        length = self.shape[self.dim] // halves // ranks
        shape = tuple(length if axis == self.dim else n for axis, n in enumerate(self.shape))
        return [
            [(self._at((half * ranks + rank) * length), shape) for half in range(halves)]
            for rank in range(ranks)
        ]

    def _at(self, start: int) -> tuple[int, ...]:
        return tuple(start if axis == self.dim else 0 for axis in range(len(self.shape)))


COMMON: dict[str, Any] = dict(  # noqa: C408 - as arguments are written
    normalization="RMSNorm", layernorm_epsilon=1e-5, layernorm_zero_centered_gamma=False,
    swiglu=True, add_bias_linear=False, add_qkv_bias=False, position_embedding_type="rope",
    rotary_percent=1.0, rotary_interleaved=False, rotary_seq_len_interpolation_factor=None,
    use_rope_scaling=False, openai_gelu=False, squared_relu=False, window_size=None,
    untie_embeddings_and_output_weights=True, num_experts=None, moe_layer_freq=1,
    multi_latent_attention=False, qk_layernorm=False, mtp_num_layers=None, seq_length=4096,
)  # fmt: skip
DEEPSEEK_V3 = Model(dict(  # noqa: C408 - as arguments are written
    num_layers=61, hidden_size=7168, ffn_hidden_size=18432, num_attention_heads=128,
    kv_channels=128, group_query_attention=False, num_query_groups=1, vocab_size=129280,
    max_position_embeddings=4096, layernorm_epsilon=1e-6, rotary_base=10000,
    multi_latent_attention=True, qk_layernorm=True, q_lora_rank=1536, kv_lora_rank=512,
    qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128, rope_type="yarn",
    rotary_scaling_factor=40.0, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1,
    mscale=1.0, mscale_all_dim=1.0, num_experts=256, moe_layer_freq=[0] * 3 + [1] * 58,
    moe_ffn_hidden_size=2048, moe_shared_expert_intermediate_size=2048, moe_grouped_gemm=True,
    moe_shared_expert_gate=False, moe_router_topk=8, moe_router_score_function="sigmoid",
    moe_router_load_balancing_type="seq_aux_loss", moe_router_enable_expert_bias=True,
    moe_router_pre_softmax=False, moe_router_num_groups=8, moe_router_group_topk=4,
    moe_router_topk_scaling_factor=2.5, moe_aux_loss_coeff=1e-4,
))  # fmt: skip
LLAMA3_405B = Model(dict(  # noqa: C408 - as arguments are written
    num_layers=126, hidden_size=16384, ffn_hidden_size=53248, num_attention_heads=128,
    kv_channels=128, group_query_attention=True, num_query_groups=8, vocab_size=128256,
    max_position_embeddings=131072, rotary_base=500000, use_rope_scaling=True,
    rope_scaling_factor=8.0,
))  # fmt: skip
MODELS = {"deepseek-v3": DEEPSEEK_V3, "llama-3-405b": LLAMA3_405B}
RANKS = {
    "deepseek-v3": Ranks(tp=8, pp=16, ep=64, last=1),
    "llama-3-405b": Ranks(tp=8, pp=16, last=6),
}


def layer_tensors(a: argparse.Namespace, layer: int) -> list[Tensor]:
    """The tensors of a decoder layer but for its routed experts, without the layer's prefix."""
    h, attention = a.hidden_size, "self_attention."
    if a.multi_latent_attention:
        rope, heads = a.qk_pos_emb_head_dim, a.num_attention_heads
        query, both = heads * (a.qk_head_dim + rope), heads * (a.qk_head_dim + a.v_head_dim)
        found = [
            Tensor("input_layernorm.weight", (h,)),
            Tensor(attention + "linear_proj.weight", (h, heads * a.v_head_dim), 1),
            Tensor(attention + "linear_q_down_proj.weight", (a.q_lora_rank, h)),
            Tensor(attention + "linear_q_up_proj.weight", (query, a.q_lora_rank), 0),
            Tensor(attention + "linear_q_up_proj.layer_norm_weight", (a.q_lora_rank,)),
            Tensor(attention + "linear_kv_down_proj.weight", (a.kv_lora_rank + rope, h)),
            Tensor(attention + "linear_kv_up_proj.weight", (both, a.kv_lora_rank), 0),
            Tensor(attention + "linear_kv_up_proj.layer_norm_weight", (a.kv_lora_rank,)),
        ]
    else:
        heads, groups, size = a.num_attention_heads, a.num_query_groups, a.kv_channels
        found = [
            Tensor(attention + "linear_proj.weight", (h, heads * size), 1),
            Tensor(attention + "linear_qkv.weight", ((heads + 2 * groups) * size, h), 0),
            Tensor(attention + "linear_qkv.layer_norm_weight", (h,)),
        ]
    if not is_moe(a, layer):
        return [*found, *_mlp("mlp.", h, a.ffn_hidden_size, norm=True)]
    return [
        *found,
        Tensor("pre_mlp_layernorm.weight", (h,)),
        Tensor("mlp.router.weight", (a.num_experts, h)),
        Tensor("mlp.router.expert_bias", (a.num_experts,), dtype=torch.float32),
        *_mlp("mlp.shared_experts.", h, a.moe_shared_expert_intermediate_size),
    ]


def is_moe(a: argparse.Namespace, layer: int) -> bool:
    """Whether a layer has routed experts."""
    return bool(a.num_experts and a.moe_layer_freq[layer])


def _mlp(at: str, hidden: int, ffn: int, *, norm: bool = False) -> list[Tensor]:
    gain = [Tensor(at + "linear_fc1.layer_norm_weight", (hidden,))]
    return [
        Tensor(at + "linear_fc1.weight", (2 * ffn, hidden), 0, gated=True),
        *(gain if norm else ()),
        Tensor(at + "linear_fc2.weight", (hidden, ffn), 1),
    ]


def expert_tensors(a: argparse.Namespace) -> list[Tensor]:
    """The tensors of one routed expert, without prefix and number."""
    return _mlp("", a.hidden_size, a.moe_ffn_hidden_size)


def outer_tensors(a: argparse.Namespace) -> tuple[list[Tensor], list[Tensor]]:
    """What the first and what the last stage holds beside its layers."""
    table = (a.vocab_size, a.hidden_size)
    return (
        [Tensor("embedding.word_embeddings.weight", table, 0)],
        [
            Tensor("decoder.final_layernorm.weight", (a.hidden_size,)),
            Tensor("output_layer.weight", table, 0),
        ],
    )


def training_args(model: Model, ranks: Ranks, format_: str) -> argparse.Namespace:
    """As many arguments as Megatron-LM stores; those that play no part are numbered."""
    unused = {f"unused_argument_{number:03d}": number for number in range(560)}
    return argparse.Namespace(
        **unused,
        **vars(model.values),
        padded_vocab_size=model.values.vocab_size,
        params_dtype=torch.bfloat16,
        transformer_impl="transformer_engine",
        tensor_model_parallel_size=ranks.tp,
        pipeline_model_parallel_size=ranks.pp,
        expert_model_parallel_size=ranks.ep,
        expert_tensor_parallel_size=ranks.etp if ranks.ep > 1 else ranks.tp,
        decoder_last_pipeline_num_layers=ranks.last,
        ckpt_format=format_,
        exit_signal=signal.SIGTERM,
    )


# --- the torch format -------------------------------------------------------------------------


def write_legacy(root: Path, model: Model, ranks: Ranks, *, optimizer: bool = True) -> Path:
    """A run's directory in the ``torch`` format, one file a rank, and beside it the optimizer's."""
    directory = root / f"iter_{ITERATION:07d}"
    args, stages = training_args(model, ranks, "torch"), ranks.stages(model.values.num_layers)
    for stage, layers in enumerate(stages):
        pairs = [(n % ranks.tp, n // ranks.etp % ranks.ep) for n in range(ranks.world)]
        for tp, ep in dict.fromkeys(pairs):
            name = f"mp_rank_{tp:02d}" + (f"_{stage:03d}" if ranks.pp > 1 else "")
            here = directory / (name + (f"_{ep:03d}" if ranks.ep > 1 else ""))
            here.mkdir(parents=True)
            held = _rank_model(model, ranks, layers, first=stage == 0, last=stage == ranks.pp - 1)
            own = argparse.Namespace(**vars(args), rank=len(list(directory.iterdir())) - 1)
            _save_rank(here / "model_optim_rng.pt", held, own)
            if optimizer:
                size = MASTER_BYTES * sum(value.numel() for value in held.values())
                _hole(here / "distrib_optim.pt", size)
    (root / TRACKER).write_text(str(ITERATION))
    return root


def _rank_model(
    model: Model, ranks: Ranks, layers: range, *, first: bool, last: bool
) -> dict[str, torch.Tensor]:
    """What one rank holds; memory is reserved and never touched."""
    a = model.values
    head, tail = outer_tensors(a)
    found = {item.name: _empty(item, ranks.tp) for item in (head if first else ())}
    for number, layer in enumerate(layers):
        at = f"decoder.layers.{number}."
        for item in layer_tensors(a, layer):
            found[at + item.name] = _empty(item, ranks.tp)
            if item.name.endswith("weight"):
                extra = at + item.name.rpartition(".")[0] + "._extra_state"
                found[extra] = torch.empty(0, dtype=torch.uint8)
        for item in expert_tensors(a) if is_moe(a, layer) else ():
            for expert in range(a.num_experts // ranks.ep):
                found[f"{at}mlp.experts.{item.name}{expert}"] = _empty(item, ranks.etp)
    return found | {item.name: _empty(item, ranks.tp) for item in (tail if last else ())}


def _empty(item: Tensor, ranks: int) -> torch.Tensor:
    return torch.empty(item.part(ranks), dtype=item.dtype)


def _save_rank(file: Path, held: dict[str, torch.Tensor], args: argparse.Namespace) -> None:
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "model": held,
        "optimizer": {
            "optimizer": {"param_groups": [{"lr": 1e-4, "params": list(range(len(held)))}]}
        },
        "rng_state": [{"random_rng_state": (3, tuple(args.rank + n for n in range(625)), None)}],
    }
    with torch.serialization.skip_data():
        torch.save(state, file)


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
    real: bool


@dataclass
class _Writer:
    """Lays entries end to end in the files of the ranks."""

    directory: Path
    templates: dict[tuple[Any, ...], tuple[bytes, bytes, int]] = field(default_factory=dict)

    def write(self, rank: int, entries: list[_Stored]) -> tuple[list[Any], list[Any]]:
        """A rank's two files; its plan's items, and where the storage put them."""
        items, places = [], []
        for number in range(2):
            name = f"__{rank}_{number}.distcp"
            with (self.directory / name).open("wb") as stream:
                at = 0
                for entry in entries[number::2]:
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
        if entry.size is None:
            return OBJECT_BYTES
        if not entry.real:
            return OBJECT_BYTES + prod(entry.shape) * entry.dtype.itemsize
        key = (entry.shape, entry.dtype)
        if key not in self.templates:
            self.templates[key] = _template(*key)
        head, tail, length = self.templates[key]
        os.pwrite(descriptor, head, at)
        os.pwrite(descriptor, tail, at + length - len(tail))
        return length


def _size(values: tuple[int, ...] | None) -> torch.Size | None:
    return None if values is None else torch.Size(values)


def _template(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes, int]:
    """What ``torch.save`` writes before and behind the data of a tensor, and the whole length."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "archive"
        with torch.serialization.skip_data():
            torch.save(torch.empty(shape, dtype=dtype), file)
        length = file.stat().st_size
        edge = 1024  # both ends are smaller; between them are zeros
        with file.open("rb") as stream:
            head = stream.read(edge)
            stream.seek(max(0, length - edge))
            return head, stream.read(), length


def _write_item(entry: _Stored) -> Any:  # noqa: ANN401 - torch's class
    index = metadata.MetadataIndex(entry.fqn, _size(entry.offset))
    if entry.size is None or entry.offset is None:
        return planner.WriteItem(index, planner.WriteItemType.BYTE_IO)
    chunk = metadata.ChunkStorageMetadata(torch.Size(entry.offset), torch.Size(entry.shape))
    properties = metadata.TensorProperties(dtype=entry.dtype)
    data = planner.TensorWriteData(chunk, properties, torch.Size(entry.size))
    return planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)


def write_torch_dist(root: Path, model: Model, ranks: Ranks, *, optimizer: bool = True) -> Path:
    """A run's directory in the ``torch_dist`` format, save plans in its index included.

    ``optimizer`` adds the distributed optimizer's states (``dp_reshardable``).
    """
    directory = root / f"iter_{ITERATION:07d}"
    directory.mkdir(parents=True)
    args = training_args(model, ranks, "torch_dist")
    common = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    torch.save(common, directory / "common.pt")
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "version": 1}')
    writer = _Writer(directory)
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
    placed = [(item, "", None) for item in (head if stage == 0 else ())]
    stacked = not isinstance(a.moe_layer_freq, list)
    for layer in layers:
        at = "decoder.layers." + ("" if stacked else f"{layer}.")
        lead = (layer, a.num_layers) if stacked else None
        placed += [(item, at, lead) for item in layer_tensors(a, layer)]  # type: ignore[misc]
    placed += [(item, "", None) for item in (tail if stage == ranks.pp - 1 else ())]
    for number, (item, at, lead) in enumerate(placed):
        for tp, places in enumerate(item.chunks(ranks.tp)):
            # Replicas of a rank over the stage take turns in saving.
            rank = (tp + ranks.tp * number) % ranks.world
            held[rank] += _stored(at + item.name, item, places, (lead,) if lead else ())
        if item.name.endswith("weight") and at:
            module = at + item.name.rpartition(".")[0]
            place, of = lead or (0, 1)
            held[0].append(_object(f"{module}._extra_state/shard_{place}_{of}"))


def _add_experts(held: list[list[_Stored]], model: Model, ranks: Ranks, layers: range) -> None:
    a = model.values
    for layer in layers:
        for item in expert_tensors(a) if is_moe(a, layer) else ():
            name = f"decoder.layers.{layer}.mlp.experts.experts.{item.name}"
            for expert in range(a.num_experts):
                rank = expert // (a.num_experts // ranks.ep) * ranks.etp
                for etp, places in enumerate(item.chunks(ranks.etp)):
                    lead = ((expert, a.num_experts),)
                    held[rank + etp] += _stored(name, item, places, lead)
                extra = name.removesuffix("weight") + "_extra_state"
                held[rank].append(_object(f"{extra}/shard_{expert}.0_{a.num_experts}.1"))


def _stored(
    name: str, item: Tensor, places: Places, lead: tuple[tuple[int, int], ...]
) -> list[_Stored]:
    """The chunks of a tensor; ``lead`` is (place, length) of each axis put before its own."""
    size = (*(length for _, length in lead), *item.shape)
    first = tuple(place for place, _ in lead)
    return [
        _Stored(name, size, item.dtype, (*first, *at), (*(1 for _ in lead), *shape), real=True)
        for at, shape in places
    ]


def _object(fqn: str) -> _Stored:
    return _Stored(fqn, None, torch.uint8, None, (), real=False)


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
                part = _Stored(fqn, (sum(lengths),), torch.float32, (at,), (length,), real=False)
                entries.append(part)
                at += length


WRITERS = {"torch": write_legacy, "torch_dist": write_torch_dist}


def open_item(file: Path, offset: int, length: int) -> Any:  # noqa: ANN401 - what was saved
    """An item of a ``.distcp`` file as torch itself reads it."""
    with file.open("rb") as stream:
        stream.seek(offset)
        return torch.load(io.BytesIO(stream.read(length)))
