"""Checkpoints that megatron-core wrote, converted: fp32 logits against the original's."""

from __future__ import annotations

import pytest
import torch
from megatron_checkpoints import Layout, first_of_each, wanted
from mtp_reference import mtp_logits
from safetensors.torch import load_file

from ckpt.config import ConvertOptions, ValidateOptions
from ckpt.convert import convert_checkpoint
from ckpt.validate import validate_checkpoint
from ckpt.validate.hf_run import load_model

pytestmark = pytest.mark.megatron

ONE_EXPERT = {
    "moe_router_topk": 1,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
}
LAYOUTS = [
    Layout("llama", tp=2, pp=2),
    Layout("llama", tp=4, format="torch", te=True),
    Layout("llama", pp=2, vpp=2, layout="Et|ttt|ttt|tL", format="torch"),
    Layout("llama", pp=2, first_layers=3, single=True),
    Layout("llama", train=2, dist_opt=True),
    Layout("llama3", tp=2, te=True),
    Layout("mistral", tp=2, old_args=True),
    Layout("qwen2", tp=2, pp=2, te=True, format="torch"),
    Layout("qwen3", tp=2, old_args=True),
    Layout("gpt", tp=2, te=True),
    Layout("mixtral", tp=2, ep=2, etp=1, format="torch"),
    Layout("qwen3moe", te=True, ep=2),
    Layout("deepseek", tp=2, pp=2, te=True, format="torch"),
    Layout("deepseek", tp=2, ep=2, te=True),
    Layout("deepseek-mtp", te=True),
    Layout("deepseek-mtp", tp=2, pp=2, te=True, format="torch"),
    Layout("deepseek", te=True, overrides=ONE_EXPERT),
    Layout("gemma", tp=2, te=True),
    Layout("gemma2", tp=2, te=True, format="torch", positions=(2, 224)),
    Layout("gemma2", pp=2, te=True, positions=(2, 224)),
    Layout("gemma3", tp=2, pp=2, te=True, positions=(2, 224)),
    Layout("gemma3", te=True, format="torch", positions=(2, 224)),
    Layout("ernie", tp=2, te=True, positions=(2, 224)),
    Layout("ernie", pp=2, format="torch", positions=(2, 224)),
    Layout("glm4", tp=2, te=True, format="torch", positions=(2, 224)),
    Layout("glm4", pp=2, te=True),
    Layout("minimax", tp=2, ep=2, etp=1, te=True, format="torch", positions=(2, 224)),
    Layout("minimax", tp=2, te=True),
    Layout("minimax", ep=2),
    Layout("olmoe", te=True),
    Layout("olmoe", ep=2, te=True),
    Layout("deepseek-v32", tp=2, te=True, format="torch", positions=(2, 224)),
    Layout("deepseek-v32", ep=2, te=True),
    Layout("deepseek-v32", te=True, overrides={"dsa_indexer_topk": 160}),
    Layout("deepseek-glm5", tp=2, te=True, positions=(2, 224)),
]
QWEN3_NEXT = [
    Layout("qwen3next", te=True, positions=(2, 210)),
    Layout("qwen3next", te=True, tp=2, format="torch", positions=(2, 210)),
    Layout("qwen3next", te=True, tp=2, pp=2, positions=(2, 210)),
    Layout("qwen3next", te=True, ep=2, format="torch", positions=(2, 210)),
    Layout("qwen3next-mtp", te=True),
    Layout("qwen3next-mtp", te=True, tp=2, pp=2, format="torch"),
]
NEMOTRON = [
    Layout("nemotron", tp=2, pp=2, te=True, positions=(2, 210)),
    Layout("nemotron", tp=2, te=True, format="torch", positions=(2, 210)),
    Layout("nemotron", tp=2, overrides={"layernorm_zero_centered_gamma": False}),
    Layout("nemotronh", te=True, positions=(2, 210)),
    Layout("nemotronh", te=True, tp=2, pp=2, format="torch", positions=(2, 210)),
    Layout("nemotronh", te=True, tp=2, positions=(2, 210)),
    Layout("nemotron3", te=True, tp=2, ep=2, etp=1, format="torch", positions=(2, 210)),
    Layout("nemotron3", te=True, tp=2, pp=2, positions=(2, 210)),
    Layout("nemotron3-latent", te=True, ep=2, positions=(2, 210)),
    Layout("nemotron3-latent", te=True, tp=2, format="torch", positions=(2, 210)),
]
LAYOUTS += QWEN3_NEXT + NEMOTRON


# Beside the first of each family, in the default run: what ranks of other kinds store.
KINDS = {layout.name for layout in LAYOUTS[:5]}


# Families whose layers are those of another one that is in the default run.
NEAREST = {
    "nemotron3-latent": "nemotron3",
    "deepseek-glm5": "deepseek-v32",
    "olmoe": "minimax",
}


def kind(layout):
    return layout.name if layout.name in KINDS else NEAREST.get(layout.family, layout.family)


@pytest.fixture(scope="module")
def made(request, megatron_checkpoints):
    layouts = [LAYOUTS[0], *wanted(request, "layout")]
    return {item.layout.name: item for item in megatron_checkpoints(layouts)}


@pytest.mark.parametrize("layout", first_of_each(LAYOUTS, kind), ids=lambda layout: layout.name)
def test_the_converted_model_answers_as_megatron_did(made, layout, tmp_path):
    """The ground truth is the model that wrote the checkpoint."""
    item = made[layout.name]
    family = "mistral" if layout.family == "mistral" else None
    convert_checkpoint(item.directory, tmp_path / "out", ConvertOptions(family=family))
    model = load_model(tmp_path / "out")
    with torch.no_grad():
        found = model(item.input_ids).logits
    original = item.logits_fp32[..., : found.shape[-1]]
    assert original.std() > 0.1
    assert (found - original).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "layout",
    first_of_each([x for x in LAYOUTS if x.family == "deepseek-mtp"], kind),
    ids=lambda layout: layout.name,
)
def test_a12_further_tokens_are_predicted_as_megatron_did(made, layout, tmp_path):
    """Each head's logits, computed with transformers' layers from the converted tensors."""
    item = made[layout.name]
    convert_checkpoint(item.directory, tmp_path / "out", ConvertOptions())
    (further,) = mtp_logits(tmp_path / "out", item.input_ids)
    original = item.mtp_logits[..., : further.shape[-1]]
    assert original.std() > 0.1
    assert (further - original).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[0], LAYOUTS[1], LAYOUTS[7], LAYOUTS[11], LAYOUTS[12], QWEN3_NEXT[0]],
    ids=lambda x: x.name,
)
def test_a_live_megatron_model_is_the_reference(made, layout, tmp_path):
    """Both formats, with and without TransformerEngine's names; the shards are not merged by us."""
    item = made[layout.name]
    convert_checkpoint(item.directory, tmp_path / "out", ConvertOptions())
    options = ValidateOptions(reference="megatron", max_positions=128, max_abs_diff=1e-4)
    report = validate_checkpoint(item.directory, tmp_path / "out", options)
    assert report.passed, report.as_text()
    assert report.agreement.longest >= 128
    kept = load_file(tmp_path / "out" / "original" / "ckpt-reference.safetensors")
    assert kept["logits"].shape[0] >= 1


def test_a_live_reference_catches_a_swapped_tensor(made, tmp_path):
    """Gate and up exchanged in the last layer fail, and the layer is named."""
    from safetensors.torch import save_file

    item = made[LAYOUTS[0].name]
    out = tmp_path / "out"
    convert_checkpoint(item.directory, out, ConvertOptions())
    tensors = load_file(out / "model.safetensors")
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    gate, up = (f"model.layers.{last}.mlp.{kind}_proj.weight" for kind in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    report = validate_checkpoint(item.directory, out, ValidateOptions(reference="megatron"))
    assert not report.passed
    assert report.first_bad_layer is None or report.first_bad_layer == last + 1
