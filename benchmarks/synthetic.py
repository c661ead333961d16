"""Training checkpoints of a chosen size with weights in them, and what a conversion must give.

A dense model of Llama's kind and one of experts of Qwen3-MoE's, in both of Megatron's formats,
with the distributed optimizer's states beside them, which are holes. Every stored part of a
weight has bytes of its own: a stamp of its name and place, then a piece of one block of random
finite numbers that begins at a place of its own. So a part that lands anywhere else shows.
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron_shapes import (
    Model,
    Ranks,
    Tensor,
    expert_tensors,
    is_moe,
    layer_tensors,
    outer_tensors,
)
from sparse_megatron import LEGACY_FILE, WRITERS, Part

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

_WORDS = 8_388_617  # 16-bit numbers in the block; a prime, so no row of a weight divides it
_STAMP_BYTES = 8
_FINITE, _NORMAL = 0xBFFF, 0x2000  # exponents from 64 to 127: normal numbers below 2


@dataclass(frozen=True)
class Case:
    """A kind of checkpoint, its format and ranks; one of fp32 is converted to bf16."""

    kind: str
    format: str
    ranks: Ranks
    fp32: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter."""
        return 4 if self.fp32 else 2

    @property
    def cast(self) -> tuple[str, ...]:
        """Options of ``ckpt convert``."""
        return ("--dtype", "bf16") if self.fp32 else ()


# Megatron's saver of rank files loses tensor ranks where experts have fewer ranks than that
# (Megatron-LM: megatron/training/checkpointing.py, `get_expert_data_parallel_rank() == 0`), unless
# EP makes up for it. So expert TP is 4, with dense copies in every expert rank's file, or EP is 4.
CASES = {
    "dense-torch": Case("dense", "torch", Ranks(tp=4, pp=2)),
    "dense-torch_dist": Case("dense", "torch_dist", Ranks(tp=4, pp=2)),
    "moe-torch": Case("moe", "torch", Ranks(tp=4, pp=2, ep=2, etp=4)),
    "moe-torch_dist": Case("moe", "torch_dist", Ranks(tp=4, pp=2, ep=2)),
    "cast-torch": Case("dense", "torch", Ranks(tp=4, pp=2), fp32=True),
    "cast-torch_dist": Case("dense", "torch_dist", Ranks(tp=4, pp=2), fp32=True),
    "moe-torch-ep4": Case("moe", "torch", Ranks(tp=4, pp=2, ep=4)),
}
_HEADS = ("num_attention_heads", "num_query_groups", "kv_channels")
# Up to how many parameters: hidden size, MLP's (an expert's), heads, groups, their size, words.
WIDTHS: dict[str, list[tuple[float, tuple[int, ...]]]] = {
    "dense": [
        (30e6, (256, 704, 8, 4, 32, 4000)),
        (400e6, (1024, 2816, 16, 4, 64, 32000)),
        (2.5e9, (2048, 8192, 32, 8, 64, 32000)),  # as Llama 3.2 1B is
        (1e99, (4096, 14336, 32, 8, 128, 128256)),  # as Llama 3 8B is
    ],
    "moe": [
        (30e6, (256, 64, 8, 4, 32, 4000)),
        (400e6, (512, 256, 16, 4, 64, 32000)),
        (1e99, (1024, 384, 16, 4, 128, 32000)),
    ],
}
_DENSE: dict[str, Any] = {"rotary_base": 500000}
_MOE: dict[str, Any] = dict(  # noqa: C408 - as arguments are written
    qk_layernorm=True, rotary_base=1000000, moe_grouped_gemm=True, moe_router_topk=8,
    moe_router_score_function="softmax", moe_router_load_balancing_type="aux_loss",
    moe_router_pre_softmax=False, moe_aux_loss_coeff=1e-3, moe_router_topk_scaling_factor=None,
    moe_shared_expert_gate=False, moe_router_num_groups=None, moe_router_group_topk=None,
)  # fmt: skip


def model_of(case: Case, size: int) -> Model:
    """A model with about ``size`` bytes of weights and an even number of layers."""
    parameters = size // case.itemsize
    widths = next(widths for limit, widths in WIDTHS[case.kind] if parameters < limit)
    hidden, ffn, *heads, vocab = widths
    args = _MOE if case.kind == "moe" else _DENSE
    args = {
        **args, **dict(zip(_HEADS, heads, strict=True)), "hidden_size": hidden,
        "group_query_attention": True, "vocab_size": vocab, "max_position_embeddings": 4096,
        "ffn_hidden_size": ffn, "num_layers": 2,
        "params_dtype": torch.float32 if case.fp32 else torch.bfloat16,
    }  # fmt: skip
    if case.kind == "moe":
        few = hidden < 512  # noqa: PLR2004 - a tiny one
        args |= {"moe_ffn_hidden_size": ffn, "num_experts": 32 if few else 128}
        args |= {"ffn_hidden_size": 8 * ffn}
    two = Model(args)
    outside = sum(_count(item) for group in outer_tensors(two.values) for item in group)
    each = (sum(_count(weight.item) for weight in weights(two)) - outside) / 2
    layers = max(2, round((parameters - outside) / each / 2) * 2)
    return Model({**args, "num_layers": layers})


def _count(item: Tensor) -> int:
    return int(np.prod(item.shape))


@dataclass(frozen=True)
class Weight:
    """A weight of the whole model; ``expert`` tells which ranks share it."""

    key: str
    item: Tensor
    expert: bool = False


def weights(model: Model) -> Iterator[Weight]:
    """Every weight of a model, under its name with global numbers."""
    a = model.values
    head, tail = outer_tensors(a)
    yield from (Weight(item.name, item) for item in head)
    for layer in range(a.num_layers):
        at = f"decoder.layers.{layer}."
        yield from (Weight(at + item.name, item) for item in layer_tensors(a, layer))
        for expert in range(a.num_experts if is_moe(a, layer) else 0):
            for item in expert_tensors(a):
                yield Weight(f"{at}mlp.experts.{expert}.{item.name}", item, expert=True)
    yield from (Weight(item.name, item) for item in tail)


class Numbers:
    """The bytes of every part of every weight; they depend on its name and place alone."""

    def __init__(self) -> None:
        """Make the block that all parts are cut from."""
        words = np.random.default_rng(7).integers(2**16, size=_WORDS, dtype=np.uint16)
        self._block = memoryview(((words & _FINITE) | _NORMAL).tobytes())

    def pieces(self, part: Part) -> list[bytes | memoryview]:
        """The part's bytes, to be written one after the other."""
        name = f"{part.key} {part.start}".encode()
        stamp = np.frombuffer(blake2b(name, digest_size=_STAMP_BYTES).digest(), np.uint16)
        found: list[bytes | memoryview] = [((stamp & _FINITE) | _NORMAL).tobytes()]
        at, left = zlib.crc32(name) % _WORDS * 2, part.nbytes - _STAMP_BYTES
        while left:
            piece = self._block[at : at + left]
            found.append(piece)
            at, left = 0, left - len(piece)
        return found

    def fill(self, descriptor: int, offset: int, part: Part) -> None:
        """Write a part into a file."""
        for piece in self.pieces(part):
            done = 0
            while done < len(piece):
                done += os.pwrite(descriptor, piece[done:], offset + done)
            offset += done

    def whole(self, weight: Weight, ranks: Ranks) -> torch.Tensor:
        """A weight put together from the parts of all ranks that share it."""
        item = weight.item
        found = torch.empty(item.shape, dtype=item.dtype)
        for places in item.chunks(ranks.etp if weight.expert else ranks.tp):
            for start, shape in places:
                part = Part(weight.key, start, shape, item.dtype)
                content = bytearray(b"".join(self.pieces(part)))
                box = tuple(slice(at, at + n) for at, n in zip(start, shape, strict=True))
                found[box] = torch.frombuffer(content, dtype=item.dtype).view(shape)
        return found


def write_checkpoint(root: Path, case: Case, size: int, *, optimizer: bool = True) -> Model:
    """Write a run's directory with about ``size`` bytes of weights, part by part; its model."""
    model = model_of(case, size)
    WRITERS[case.format](root, model, case.ranks, optimizer=optimizer, fill=Numbers().fill)
    return model


def weight_files(root: Path) -> list[Path]:
    """The files that hold weights, and nothing of the optimizer's."""
    rank_files = sorted(root.glob(f"iter_*/mp_rank_*/{LEGACY_FILE}"))
    return rank_files or sorted(root.glob("iter_*/__*_[01].distcp"))


def expected(case: Case, model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """What a conversion must write: every tensor of the Hugging Face model, one at a time."""
    numbers, a = Numbers(), model.values
    for weight in weights(model):
        for name, value in to_hf(weight.key, numbers.whole(weight, case.ranks), a):
            yield name, value.to(torch.bfloat16) if case.cast else value


_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_INSIDE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def to_hf(
    key: str, value: torch.Tensor, a: argparse.Namespace
) -> Iterator[tuple[str, torch.Tensor]]:
    """The Hugging Face tensors that are made of one whole weight, as views of it."""
    if key in _OUTSIDE:
        yield _OUTSIDE[key], value
        return
    _, _, layer, inside = key.split(".", 3)
    at = f"model.layers.{layer}."
    expert = re.match(r"mlp\.(experts\.\d+\.)?linear_fc([12])\.weight$", inside)
    if inside in _INSIDE:
        yield at + _INSIDE[inside], value
    elif expert:
        mlp = at + "mlp." + (expert[1] or "")
        names = ("gate_proj", "up_proj") if expert[2] == "1" else ("down_proj",)
        for name, part in zip(names, value.chunk(len(names)), strict=True):
            yield f"{mlp}{name}.weight", part
    elif inside == "self_attention.linear_qkv.weight":
        grouped = value.view(a.num_query_groups, -1, a.kv_channels, a.hidden_size)
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        for letter, part in zip("qkv", parts, strict=True):
            yield f"{at}self_attn.{letter}_proj.weight", part.reshape(-1, a.hidden_size)
    else:
        raise ValueError(f"no name is known for {key}")
