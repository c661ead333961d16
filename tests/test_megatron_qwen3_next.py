"""What transformers leaves out of Qwen3-Next: its layer that predicts the token after the next."""

from __future__ import annotations

import copy

import pytest
import torch
from megatron_checkpoints import Layout
from safetensors.torch import load_file

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.validate.hf_run import load_model

pytestmark = pytest.mark.megatron

LAYOUTS = [
    Layout("qwen3next-mtp", te=True),
    Layout("qwen3next-mtp", te=True, tp=2, pp=2, format="torch"),
]


@pytest.fixture(scope="module")
def made(megatron_checkpoints):
    return {item.layout.name: item for item in megatron_checkpoints(LAYOUTS)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
def test_qwen3_nexts_further_layer_predicts_as_megatrons_does(made, layout, tmp_path):
    """transformers leaves it out; vLLM's drafter computes as here (qwen3_next_mtp.py)."""
    item, out = made[layout.name], tmp_path / "out"
    convert_checkpoint(item.directory, out, ConvertOptions())
    model, tensors = load_model(out), load_file(out / "model.safetensors")
    block = copy.deepcopy(model.model.layers[-1])
    inner = {k[13:]: v for k, v in tensors.items() if k.startswith("mtp.layers.0.")}
    experts = range(model.config.num_experts)
    for kind, parts in (("gate_up", ("gate", "up")), ("down", ("down",))):
        names = [[f"mlp.experts.{n}.{part}_proj.weight" for part in parts] for n in experts]
        rows = [torch.cat([inner.pop(name) for name in pair]) for pair in names]
        inner[f"mlp.experts.{kind}_proj"] = torch.stack(rows)
    block.load_state_dict(inner)

    def norm(name, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return x * (1 + tensors[f"mtp.{name}.weight"])

    ids = item.input_ids
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        following = model.model.embed_tokens(torch.roll(ids, -1, dims=1))
        both = [norm("pre_fc_norm_embedding", following), norm("pre_fc_norm_hidden", hidden)]
        x = torch.cat(both, -1) @ tensors["mtp.fc.weight"].T
        places = torch.arange(ids.shape[1])[None]
        mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf")).triu(1)[None, None]
        turned = model.model.rotary_emb(x, places)
        x = block(x, position_embeddings=turned, attention_mask=mask, position_ids=places)
        found = model.lm_head(norm("norm", x))
    # nothing follows the last token
    assert (found - item.mtp_logits)[:, :-1].abs().max() <= 1e-4
