"""Layers that predict further tokens, left out on purpose: of every family, never by accident."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tiny_megatron import Ranks, TinyModel, expected_hf, tensors, write_legacy, write_torch_dist

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint, plan_conversion
from ckpt.errors import FamilyError, PlanError

WRITERS = {"torch": write_legacy, "torch_dist": write_torch_dist}


def with_further_layer(root, family, format_):
    """A checkpoint whose arguments and files have a layer that the family's class lacks."""
    plain = TinyModel(family)
    model = TinyModel(family, args={"mtp_num_layers": 1})
    WRITERS[format_](root, model, Ranks(tp=2), te=True)
    assert any(item.name.startswith("mtp.") for item in tensors(model))
    return plain


@pytest.mark.parametrize("format_", WRITERS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3moe", "mixtral"])
def test_a_family_without_such_layers_converts_when_they_are_dropped(tmp_path, family, format_):
    """The rest of the model is exact, and the report counts what was left out."""
    plain = with_further_layer(tmp_path / "run", family, format_)
    report = convert_checkpoint(tmp_path / "run", tmp_path / "out", ConvertOptions(mtp="drop"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = expected_hf(plain)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "1 layer that predicts further tokens: dropped (" in report.as_text()


@pytest.mark.parametrize("family", ["qwen3moe", "mixtral"])
def test_they_are_refused_and_the_way_out_is_named(tmp_path, family):
    """transformers and vLLM have no class of the family that reads them."""
    with_further_layer(tmp_path / "run", family, "torch")
    with pytest.raises(FamilyError, match="mtp_kept is 1") as caught:
        plan_conversion(tmp_path / "run", ConvertOptions())
    assert "--mtp drop leaves out" in str(caught.value.hint)


def test_tensors_that_the_arguments_do_not_mention_are_never_dropped(tmp_path):
    """Without mtp_num_layers they are tensors without a place."""
    model = TinyModel("deepseek-mtp", args={"moe_layer_freq": [0, 1, 1]})
    write_torch_dist(tmp_path / "run", model, Ranks(), te=True)
    options = ConvertOptions(mtp="drop", overrides=("mtp_num_layers=0",))
    with pytest.raises(PlanError, match=r"no place in family .*mtp\.layers\.0"):
        plan_conversion(tmp_path / "run", options)
