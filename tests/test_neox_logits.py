"""GPT-NeoX's forward pass, rank by rank as its code computes it, against the converted model.

The pass below reads what each rank stores and follows megatron/model/transformer.py: biases of
row-parallel linears are added before the sum over ranks where the residual is parallel, and
behind it where not; ``linear1`` is [up; gate]; fewer groups are [q; k; v] on each rank.
"""

from __future__ import annotations

import pytest
import torch
from tiny_deepspeed import HEADS, HIDDEN, LAYERS, PADDED, SIZE, neox, neox_llama, write_layers
from torch.nn import functional as F  # noqa: N812 - its usual name
from transformers import AutoModelForCausalLM

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint

TOKENS = torch.randint(PADDED, (17,), generator=torch.Generator().manual_seed(3))
CASES = {
    "parallel-tp1": neox(1),
    "parallel-tp4": neox(4),
    "serial-tp2": neox(2, parallel=False),
    "llama-tp2": neox_llama(2),
    "llama-groups-tp4": neox_llama(4, groups=4),
    "llama-old-tp2": neox_llama(2, groups=4, naming="old"),
}


class Pass:
    """One forward pass over the ranks of a stored model."""

    def __init__(self, model, *, parallel, rotary, base, groups):
        self.stored = {(item.number, item.name): item.ranks for item in model.stored}
        self.tp, self.parallel, self.rotary, self.base = model.tp, parallel, rotary, base
        self.groups = groups

    def get(self, number, name, rank):
        ranks = self.stored.get((number, name))
        return None if ranks is None else ranks[rank]

    def norm(self, x, number, name, rank):
        if (number, f"{name}.scale") in self.stored:
            return F.rms_norm(x, (HIDDEN,), self.get(number, f"{name}.scale", rank), 1e-6)
        weight, bias = (self.get(number, f"{name}.{part}", rank) for part in ("weight", "bias"))
        return F.layer_norm(x, (HIDDEN,), weight, bias, 1e-5)

    def linear(self, x, number, name, rank, *, bias=True):
        held = self.get(number, f"{name}.bias", rank) if bias else None
        return F.linear(x, self.get(number, f"{name}.weight", rank), held)

    def turn(self, x):
        """Rotary positions: the first and the second half of the turned part go together."""
        part, rest = x[..., : self.rotary], x[..., self.rotary :]
        frequencies = self.base ** -(torch.arange(0, self.rotary, 2) / self.rotary)
        angles = torch.arange(len(x))[:, None] * frequencies
        angles = torch.cat([angles, angles], -1)[:, None]
        first, second = part.chunk(2, -1)
        turned = part * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
        return torch.cat([turned, rest], -1)

    def attention(self, x, number, rank):
        mixed = self.linear(x, number, "attention.query_key_value", rank)
        heads, groups = HEADS // self.tp, self.groups // self.tp
        if self.groups == HEADS:
            query, key, value = mixed.view(len(x), heads, 3 * SIZE).chunk(3, -1)
        else:
            parts = mixed.split([heads * SIZE, groups * SIZE, groups * SIZE], -1)
            query, key, value = (part.view(len(x), -1, SIZE) for part in parts)
            key, value = (p.repeat_interleave(heads // groups, 1) for p in (key, value))
        query, key = self.turn(query), self.turn(key)
        q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0]
        return mixed.transpose(0, 1).flatten(1)

    def mlp(self, x, number, rank):
        """The hidden values of the MLP and the name of the linear that follows."""
        if (number, "mlp.w1.weight") in self.stored:
            gate, up = (self.linear(x, number, f"mlp.{name}", rank) for name in ("w1", "w3"))
            return F.silu(gate) * up, "mlp.w2"
        if (number, "mlp.linear1.weight") in self.stored:
            up, gate = self.linear(x, number, "mlp.linear1", rank).chunk(2, -1)
            return F.silu(gate) * up, "mlp.linear2"
        return F.gelu(self.linear(x, number, "mlp.dense_h_to_4h", rank)), "mlp.dense_4h_to_h"

    def add_up(self, parts, number, name, *, inside):
        """The sum over ranks, with each rank's bias inside it or one bias behind it."""
        total = sum(
            self.linear(part, number, name, rank, bias=inside) for rank, part in enumerate(parts)
        )
        bias = self.get(number, f"{name}.bias", 0)
        return total if inside or bias is None else total + bias

    def block(self, x, number):
        ranks = range(self.tp)
        one = [self.norm(x, number, "input_layernorm", rank) for rank in ranks]
        mixed = [self.attention(one[rank], number, rank) for rank in ranks]
        after = self.add_up(mixed, number, "attention.dense", inside=self.parallel)
        base = x if self.parallel else x + after
        two = [self.norm(base, number, "post_attention_layernorm", rank) for rank in ranks]
        hidden = [self.mlp(two[rank], number, rank) for rank in ranks]
        parts, name = [part for part, _ in hidden], hidden[0][1]
        out = self.add_up(parts, number, name, inside=self.parallel)
        return x + after + out

    def logits(self):
        table = torch.cat(self.stored[0, "word_embeddings.weight"])
        x = table[TOKENS]
        for layer in range(LAYERS):
            x = self.block(x, 2 + layer)
        x = self.norm(x, LAYERS + 3, "norm", 0)
        return x @ torch.cat(self.stored[LAYERS + 4, "final_linear.weight"]).T


@pytest.mark.parametrize("case", CASES)
def test_the_converted_model_answers_as_the_ranks_do(tmp_path, case):
    """Every position and every token, to the rounding of float32."""
    model, llama = CASES[case], case.startswith("llama")
    groups = 4 if "groups" in case or "old" in case else HEADS
    rotary, base = (SIZE, 10000.0) if llama else (2, 20000.0)
    truth = Pass(
        model, parallel=case.startswith("parallel"), rotary=rotary, base=base, groups=groups
    ).logits()
    convert_checkpoint(write_layers(tmp_path / "run", model), tmp_path / "out", ConvertOptions())
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        found = converted(TOKENS[None]).logits[0]
    assert torch.allclose(found, truth, rtol=0, atol=2e-5 * float(truth.abs().max()))
