"""BLOOM against what BigScience's Megatron-DeepSpeed computes from the tensors that it stores.

That code needs CUDA's kernels. Its forward pass is written again from
bigscience-workshop/Megatron-DeepSpeed, rank by rank: the slopes and rows of each head are those
of one tensor-parallel rank. Nothing of ckpt or transformers is used. Its ParallelTransformerLayer,
run on the CPU with plain linears and norms in place of the kernels, answers the same to 1e-6.
"""

from __future__ import annotations

import math

import pytest
import torch
from tiny_deepspeed import HEADS, HIDDEN, LAYERS, SIZE, VOCAB, bloom, write_layers
from torch.nn import functional

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.validate.hf_run import load_model

EPS = 1e-5


def slopes(count):
    """Of each head; megatron/model/transformer.py, ``_build_alibi_tensor``, ``get_slopes``."""
    power = 2 ** math.floor(math.log2(count))
    found = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    extra = [2 ** (-8 * (head + 1) / (2 * power)) for head in range(2 * power)]
    return torch.tensor(found + extra[0::2][: count - power])


def gelu(x):
    """megatron/model/fused_bias_gelu.py, ``bias_gelu``."""
    return x * 0.5 * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class Stored:
    """The tensors of a stored model by pipeline layer and name, one of each rank."""

    def __init__(self, model):
        self.ranks = range(model.tp)
        self.tensors = {(item.number, item.name): item.ranks for item in model.stored}

    def of(self, number, name, rank=0):
        return self.tensors[number, name][rank]

    def norm(self, number, name, x):
        at = f"{name}." if name else ""
        weight, bias = (self.of(number, f"{at}{part}") for part in ("weight", "bias"))
        return functional.layer_norm(x, (HIDDEN,), weight, bias, EPS)

    def linear(self, number, name, x, rank):
        return functional.linear(x, self.of(number, f"{name}.weight", rank))


def embed(stored, ids):
    """megatron/mpu/layers.py, ``VocabParallelEmbedding.forward``: each rank's rows, then a norm."""
    total = torch.zeros(*ids.shape, HIDDEN)
    for rank in stored.ranks:
        table = stored.of(1, "word_embeddings.weight", rank)
        local = ids - rank * len(table)
        inside = (local >= 0) & (local < len(table))
        total += table[local.clamp(0, len(table) - 1)] * inside[..., None]
    return stored.norm(1, "word_embeddings.norm", total)


def attend(stored, number, x):
    """megatron/model/transformer.py, ``ParallelAttention.forward`` without key scaling."""
    batch, length, _ = x.shape
    heads = HEADS // len(stored.ranks)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    total = torch.zeros_like(x)
    for rank in stored.ranks:
        at = "self_attention.query_key_value"
        mixed = stored.linear(number, at, x, rank) + stored.of(number, f"{at}.bias", rank)
        query, key, value = mixed.view(batch, length, heads, 3 * SIZE).split(SIZE, -1)
        alibi = slopes(HEADS).view(len(stored.ranks), heads)[rank][:, None, None]
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(SIZE)
        scores = scores + alibi * torch.arange(length)
        weights = scores.masked_fill(later, -10000.0).softmax(-1)
        context = torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2)
        total += stored.linear(number, "self_attention.dense", context, rank)
    return total + stored.of(number, "self_attention.dense.bias")


def think(stored, number, x):
    """megatron/model/transformer.py, ``ParallelMLP.forward``."""
    total = torch.zeros_like(x)
    for rank in stored.ranks:
        wide = stored.linear(number, "mlp.dense_h_to_4h", x, rank)
        inner = gelu(wide + stored.of(number, "mlp.dense_h_to_4h.bias", rank))
        total += stored.linear(number, "mlp.dense_4h_to_h", inner, rank)
    return total + stored.of(number, "mlp.dense_4h_to_h.bias")


def logits(stored, ids, *, post_norm):
    """``ParallelTransformerLayer.forward`` for each layer, then ``parallel_lm_logits``."""
    x = embed(stored, ids)
    for number in range(3, 3 + LAYERS):
        normed = stored.norm(number, "input_layernorm", x)
        x = attend(stored, number, normed) + (normed if post_norm else x)
        normed = stored.norm(number, "post_attention_layernorm", x)
        x = think(stored, number, normed) + (normed if post_norm else x)
    x = stored.norm(LAYERS + 4, "", x)
    parts = [stored.linear(1, "word_embeddings", x, rank) for rank in stored.ranks]
    return torch.cat(parts, -1)[..., :VOCAB]


def made(tp, *, post_norm):
    """A stored model whose numbers are as small as those of a trained one."""
    model = bloom(tp)
    for item in model.stored:
        gain = item.name.endswith("weight") and ("norm" in item.name or item.name == "weight")
        for part in item.ranks:
            part.mul_(0.2).add_(1.0 if gain else 0.0)
    model.args.apply_residual_connection_post_layernorm = post_norm
    return model


@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_converted_model_answers_as_its_training_code_computes(tmp_path, tp, post_norm):
    """fp32 logits at 200 positions; 12 heads, whose slopes are no powers of one number."""
    model = made(tp, post_norm=post_norm)
    ids = torch.randint(0, VOCAB, (2, 200), generator=torch.Generator().manual_seed(3))
    original = logits(Stored(model), ids, post_norm=post_norm)
    convert_checkpoint(write_layers(tmp_path / "run", model), tmp_path / "out", ConvertOptions())
    with torch.no_grad():
        found = load_model(tmp_path / "out")(ids).logits
    assert original.std() > 0.1
    assert (found - original).abs().max() <= 1e-4


def test_the_reference_knows_a_head_out_of_place():
    """Two heads of one rank exchanged change its answer by far more than the tolerance."""
    model = made(1, post_norm=False)
    ids = torch.arange(40)[None]
    before = logits(Stored(model), ids, post_norm=False)
    rows = model.find("query_key_value.weight").ranks[0].view(HEADS, -1, HIDDEN)
    rows[[0, 1]] = rows[[1, 0]]
    assert (logits(Stored(model), ids, post_norm=False) - before).abs().max() > 0.01
