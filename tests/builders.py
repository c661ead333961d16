"""Tiny Megatron checkpoints of Llama-like models, written without Megatron.

The model starts as Hugging Face tensors (the truth). Slow and plain code brings them into
Megatron's order, cuts them for ranks, and saves them as Megatron does. Nothing here uses the
code under test. All sizes differ from each other, norms and biases are random, padding rows
are not zero.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pathlib
import pickle
import signal
import sys
import types
import zipfile
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Model:
    """What is trained. ``bias`` gives every linear one, as ``add_bias_linear`` does."""

    family: str = "llama"
    layers: int = 3
    hidden: int = 60
    heads: int = 12
    groups: int = 6
    head_dim: int = 10
    ffn: int = 36
    vocab: int = 131
    divisible: int = 16
    tied: bool = False
    bias: bool = False
    gated: bool = True
    zero_centred: bool = False
    dtype: torch.dtype = torch.float32
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def qkv_bias(self) -> bool:
        return self.bias or self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    def padded(self, tp: int) -> int:
        step = self.divisible * tp
        return (self.vocab + step - 1) // step * step


def random(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that depend on the name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if "norm" in name:
        return (torch.rand(shape, generator=generator) + 0.5).to(dtype)
    return (torch.randn(shape, generator=generator) * 0.2).to(dtype)


def hf_tensors(model: Model) -> dict[str, torch.Tensor]:
    """The truth: every tensor of the Hugging Face model, by name."""
    q, kv = model.heads * model.head_dim, model.groups * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocab, model.hidden),
        "model.norm.weight": (model.hidden,),
    }
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab, model.hidden)
    for number in range(model.layers):
        at, mlp = f"model.layers.{number}.", f"model.layers.{number}.mlp."
        attention = at + "self_attn."
        shapes[at + "input_layernorm.weight"] = (model.hidden,)
        shapes[at + "post_attention_layernorm.weight"] = (model.hidden,)
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{attention}{part}_proj.weight"] = (rows, model.hidden)
            if model.qkv_bias:
                shapes[f"{attention}{part}_proj.bias"] = (rows,)
        shapes[attention + "o_proj.weight"] = (model.hidden, q)
        shapes[mlp + "gate_proj.weight"] = (model.ffn, model.hidden)
        shapes[mlp + "up_proj.weight"] = (model.ffn, model.hidden)
        shapes[mlp + "down_proj.weight"] = (model.hidden, model.ffn)
        if model.bias:
            shapes[attention + "o_proj.bias"] = (model.hidden,)
            shapes[mlp + "gate_proj.bias"] = shapes[mlp + "up_proj.bias"] = (model.ffn,)
            shapes[mlp + "down_proj.bias"] = (model.hidden,)
        if model.qk_norm:
            shapes[attention + "q_norm.weight"] = (model.head_dim,)
            shapes[attention + "k_norm.weight"] = (model.head_dim,)
    return {name: random(name, *shape, dtype=model.dtype) for name, shape in shapes.items()}


def grouped_qkv(model: Model, query, key, value) -> torch.Tensor:
    """Rows in Megatron's order: for each group its queries, its key, its value."""
    head, wide = model.head_dim, model.heads // model.groups * model.head_dim
    rows = []
    for group in range(model.groups):
        rows += [
            query[group * wide : (group + 1) * wide],
            key[group * head : (group + 1) * head],
            value[group * head : (group + 1) * head],
        ]
    return torch.cat(rows)


def megatron_tensors(model: Model, tp: int) -> dict[str, torch.Tensor]:
    """The whole model in Megatron-Core's names (local spec, global layers) and order."""
    truth = hf_tensors(model)
    shift = 1.0 if model.zero_centred else 0.0

    def padded(name: str) -> torch.Tensor:
        rows = model.padded(tp) - model.vocab
        return torch.cat([truth[name], random("padding", rows, model.hidden, dtype=model.dtype)])

    found = {"embedding.word_embeddings.weight": padded("model.embed_tokens.weight")}
    for number in range(model.layers):
        hf, core = f"model.layers.{number}.", f"decoder.layers.{number}."
        plain = {
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
            "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
            "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
            "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
            "mlp.linear_fc2.weight": "mlp.down_proj.weight",
            "mlp.linear_fc2.bias": "mlp.down_proj.bias",
        }
        for ours, theirs in plain.items():
            if hf + theirs in truth:
                gain = shift if "norm" in ours else 0.0
                found[core + ours] = truth[hf + theirs] - gain
        for kind in ("weight", "bias"):
            if f"{hf}self_attn.q_proj.{kind}" in truth:
                parts = [truth[f"{hf}self_attn.{part}_proj.{kind}"] for part in "qkv"]
                found[f"{core}self_attention.linear_qkv.{kind}"] = grouped_qkv(model, *parts)
            if f"{hf}mlp.gate_proj.{kind}" in truth:
                halves = [truth[f"{hf}mlp.{part}_proj.{kind}"] for part in ("gate", "up")]
                found[f"{core}mlp.linear_fc1.{kind}"] = torch.cat(halves)
    found["decoder.final_layernorm.weight"] = truth["model.norm.weight"] - shift
    if not model.tied:
        found["output_layer.weight"] = padded("lm_head.weight")
    return found


def shard_dim(name: str) -> int | None:
    """The dimension that tensor-parallel ranks share, None for what all of them hold."""
    if "word_embeddings" in name or "output_layer" in name:
        return 0
    if "linear_qkv" in name or "linear_fc1" in name:
        return None if "layer_norm" in name else 0
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return 1
    return None


def rank_part(name: str, whole: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """What one tensor-parallel rank holds; of a gated MLP its gate rows, then its up rows."""
    dim = shard_dim(name)
    if dim is None:
        return whole.clone()
    if "linear_fc1" in name:
        gate, up = whole.chunk(2)
        return torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
    return whole.chunk(tp, dim)[rank].clone()


def te_name(name: str) -> str:
    """The name under TransformerEngine's spec, which fuses norms into the next linear."""
    name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


def training_args(model: Model, *, tp: int, pp: int, vpp: int = 1) -> argparse.Namespace:
    """The arguments that Megatron-LM stores, those that matter and some that do not."""
    values = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "kv_channels": model.head_dim,
        "group_query_attention": True,
        "num_query_groups": model.groups,
        "max_position_embeddings": 4096,
        "seq_length": 128,
        "position_embedding_type": "rope",
        "rotary_base": 500000,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": False,
        "normalization": "RMSNorm",
        "norm_epsilon": 3e-5,
        "apply_layernorm_1p": model.zero_centred,
        "swiglu": True,
        "add_bias_linear": model.bias,
        "add_qkv_bias": model.family == "qwen2",
        "qk_layernorm": model.qk_norm,
        "untie_embeddings_and_output_weights": not model.tied,
        "vocab_size": model.vocab,
        "padded_vocab_size": model.padded(tp),
        "make_vocab_size_divisible_by": model.divisible,
        "num_experts": None,
        "moe_layer_freq": 1,
        "multi_latent_attention": False,
        "mtp_num_layers": None,
        "params_dtype": model.dtype,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": tp,
        "lr": 1e-4,
        "exit_signal": signal.SIGTERM,
        "save": pathlib.PurePosixPath("runs/one"),
    }
    values |= model.args
    return argparse.Namespace(**{k: v for k, v in values.items() if v is not Ellipsis})


def _stage_of_layers(model: Model, stages: int, split: list[int] | None) -> list[list[int]]:
    counts = split or [model.layers // stages + (n < model.layers % stages) for n in range(stages)]
    numbers = iter(range(model.layers))
    return [[next(numbers) for _ in range(count)] for count in counts]


def write_legacy(
    root: Path,
    model: Model,
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    split: list[int] | None = None,
    te: bool = False,
    iteration: int = 10,
    edit: Callable[[dict[str, Any], int, int], None] | None = None,
) -> Path:
    """A run's directory in the ``torch`` format.

    ``split`` gives the layers of each virtual stage in order; ``edit(state, tp_rank,
    pp_rank)`` may change what a rank saves.
    """
    whole = megatron_tensors(model, tp)
    stages = _stage_of_layers(model, pp * vpp, split)
    args = training_args(model, tp=tp, pp=pp, vpp=vpp)
    directory = root / f"iter_{iteration:07d}"
    for tp_rank in range(tp):
        for pp_rank in range(pp):
            chunks = []
            for chunk in range(vpp):
                stage = chunk * pp + pp_rank
                last = stage == pp * vpp - 1
                names = _names_of_stage(whole, stages[stage], first=stage == 0, last=last)
                if model.tied and last and pp * vpp > 1:
                    names["output_layer.weight"] = "embedding.word_embeddings.weight"
                chunks.append({
                    te_name(ours) if te else ours: rank_part(name, whole[name], tp, tp_rank)
                    for ours, name in names.items()
                })  # fmt: skip
            keys = ["model"] if vpp == 1 else [f"model{n}" for n in range(vpp)]
            state = {
                "args": args,
                "checkpoint_version": 3.0,
                "iteration": iteration,
                **dict(zip(keys, chunks, strict=True)),
                "optimizer": {"state": {0: torch.ones(3)}},
                "rng_state": [{"random_rng_state": (3, (1, 2), None)}],
            }
            if edit:
                edit(state, tp_rank, pp_rank)
            name = f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else "")
            (directory / name).mkdir(parents=True)
            torch.save(state, directory / name / "model_optim_rng.pt")
    (root / TRACKER).write_text(str(iteration))
    return root


def _names_of_stage(whole, layers: list[int], *, first: bool, last: bool) -> dict[str, str]:
    """Local name to global name of what one virtual stage holds."""
    names = {}
    for name in whole:
        parts = name.split(".")
        if name.startswith("decoder.layers."):
            if int(parts[2]) in layers:
                local = ["decoder", "layers", str(layers.index(int(parts[2]))), *parts[3:]]
                names[".".join(local)] = name
        elif name.startswith("embedding."):
            if first:
                names[name] = name
        elif last:
            names[name] = name
    return names


@dataclass
class Item:
    """A global tensor of a ``torch_dist`` checkpoint: its parts by where they begin."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[tuple[int, ...], Any]


def dist_items(
    model: Model, *, tp: int, stacked: bool, prefix: str, halves: bool
) -> dict[str, Item]:
    """Every weight as global tensors with chunks, as Megatron-Core's sharded state dict has."""
    items: dict[str, Item] = {}
    for name, whole in megatron_tensors(model, tp).items():
        parts = name.split(".")
        layer = int(parts[2]) if name.startswith("decoder.layers.") else None
        key = te_name(name)
        stack = stacked and layer is not None
        if stack:
            key = key.replace(f"layers.{layer}.", "layers.", 1)
        if halves and "linear_fc1" in key and "layer_norm" not in key:
            for suffix, half in zip(("_w", "_v"), whole.chunk(2), strict=True):
                pieces = _pieces(name, half, tp, halves=False)
                _add_item(
                    items, prefix + key + suffix, half, pieces, layer if stack else None, model
                )
        else:
            pieces = _pieces(name, whole, tp, halves="linear_fc1" in name)
            _add_item(items, prefix + key, whole, pieces, layer if stack else None, model)
    return items


def _pieces(name: str, whole: torch.Tensor, tp: int, *, halves: bool):
    """(start, part) of the chunks of one whole tensor."""
    dim = shard_dim(name)
    if dim is None:
        return [((0,) * whole.dim(), whole)]
    blocks = whole.chunk(2) if halves else (whole,)
    found, at = [], 0
    for block in blocks:
        for part in block.chunk(tp, dim):
            start = [0] * whole.dim()
            start[dim] = at
            found.append((tuple(start), part))
            at += part.shape[dim]
    return found


def _add_item(items, key, whole, pieces, layer, model: Model) -> None:
    if layer is None:
        items[key] = Item(tuple(whole.shape), whole.dtype, dict(pieces))
        return
    item = items.setdefault(key, Item((model.layers, *whole.shape), whole.dtype, {}))
    for start, part in pieces:
        at = (layer, *start)
        item.parts[at] = part[None]


def write_torch_dist(
    root: Path,
    model: Model,
    *,
    tp: int = 1,
    stacked: bool = True,
    prefix: str = "",
    halves: bool = False,
    common: str | None = "common.pt",
    optimizer: bool = False,
    iteration: int = 10,
    edit: Callable[[dict[str, Item], dict[str, Any]], None] | None = None,
) -> Path:
    """A run's directory in the ``torch_dist`` format, one file for each of two ranks.

    ``edit(items, common_state)`` may change what is saved. ``common`` is where the arguments
    go: ``common.pt``, ``common_state`` (an object among the tensors) or nowhere.
    """
    items = dist_items(model, tp=tp, stacked=stacked, prefix=prefix, halves=halves)
    state = {
        "args": training_args(model, tp=tp, pp=1),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "content_metadata": {"singleton_local_shards": halves},
    }
    objects: dict[str, Any] = {"rng_state/shard_0_1": [[{"seed": 1}]]}
    for name in [key for key in items if key.endswith("linear_proj.weight")]:
        objects[name.replace("weight", "_extra_state/shard_0_1")] = [None]
    if optimizer:
        for name, item in list(items.items()):
            for kind in ("exp_avg", "exp_avg_sq", "fp32_param"):
                parts = {
                    at: torch.zeros_like(part, dtype=torch.float32)
                    for at, part in item.parts.items()
                }
                items[f"optimizer.state.{kind}.{name}"] = Item(item.shape, torch.float32, parts)
    if edit:
        edit(items, state)
    if common == "common_state":
        objects["common_state/shard_0_1"] = [state]
    directory = root / f"iter_{iteration:07d}"
    directory.mkdir(parents=True)
    if common == "common.pt":
        torch.save(state, directory / "common.pt")
    save_dist(directory, items, objects)
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (root / TRACKER).write_text(str(iteration))
    return root


def save_dist(directory: Path, items: dict[str, Item], objects: dict[str, Any]) -> None:
    """The ``.distcp`` files and their index."""
    from torch.distributed.checkpoint import filesystem, metadata

    files = {name: io.BytesIO() for name in ("__0_0.distcp", "__1_0.distcp")}
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    turn = 0

    def put(fqn: str, start: tuple[int, ...] | None, value: Any) -> None:
        nonlocal turn
        name = list(files)[turn % len(files)]
        turn += 1
        stream = files[name]
        begin = stream.tell()
        buffer = io.BytesIO()
        torch.save(value, buffer)
        stream.write(buffer.getvalue())
        offset = None if start is None else torch.Size(start)
        index = metadata.MetadataIndex(fqn, offset)
        storage[index] = filesystem._StorageInfo(name, begin, stream.tell() - begin)

    for fqn, item in items.items():
        chunks = []
        for start, part in item.parts.items():
            size = part.shape if isinstance(part, torch.Tensor) else item.shape
            chunks.append(metadata.ChunkStorageMetadata(torch.Size(start), torch.Size(size)))
            put(fqn, start, part.clone() if isinstance(part, torch.Tensor) else part)
        properties = metadata.TensorProperties(dtype=item.dtype)
        entries[fqn] = metadata.TensorStorageMetadata(properties, torch.Size(item.shape), chunks)
    for fqn, value in objects.items():
        entries[fqn] = metadata.BytesStorageMetadata()
        put(fqn, None, value)
    for name, stream in files.items():
        (directory / name).write_bytes(stream.getvalue())
    index = metadata.Metadata(entries, planner_data=None, storage_data=storage)
    (directory / ".metadata").write_bytes(pickle.dumps(index, protocol=4))


WRITERS: dict[str, Callable[..., Path]] = {"torch": write_legacy, "torch_dist": write_torch_dist}


@contextlib.contextmanager
def foreign_module(name: str, **members: Any) -> Iterator[None]:
    """A module that exists only while something is pickled."""
    names = [name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)]
    modules = {part: types.ModuleType(part) for part in names}
    for key, value in members.items():
        value.__module__, value.__qualname__ = name, key
        setattr(modules[name], key, value)
    for part, module in modules.items():
        parent, _, last = part.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for part in modules:
            del sys.modules[part]


def replace_pickle(archive: Path, change: Callable[[bytes], bytes]) -> None:
    """Rewrite the pickle inside a file of ``torch.save``; storages stay as they are."""
    archive.write_bytes(with_other_pickle(archive.read_bytes(), change))


def with_other_pickle(archive: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The same archive with its pickle changed."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive)) as old,
        zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new,
    ):
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith("/data.pkl") else content)
    return out.getvalue()


def write_tokenizer(directory: Path, size: int, **config: Any) -> Path:
    """A tokenizer's files with ``size`` ids, the last one an added token."""
    directory.mkdir(parents=True)
    vocabulary = {f"t{number}": number for number in range(size - 1)}
    content = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
        "added_tokens": [{"id": size - 1, "content": "<end>", "special": True}],
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    settings = {"bos_token": "t1", "eos_token": {"content": "<end>"}, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def hf_config(model: Model) -> dict[str, Any]:
    """Values that config.json must have, from the same arguments."""
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups,
        "head_dim": model.head_dim,
        "rms_norm_eps": 3e-5,
        "rope_theta": 500000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": model.tied,
    }


__all__ = [name for name in dir() if not name.startswith("_")]
variant = replace
