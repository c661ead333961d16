"""Megatron-LM's state dict saved by PyTorch's own DCP: ``torch_dcp`` and ``fsdp_dtensor``."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from converted import assert_converts
from tiny_megatron import TinyModel, save_alone, write_dcp

from ckpt.config import ConvertOptions
from ckpt.convert import plan_conversion
from ckpt.errors import CkptError, SourceError
from ckpt.inspection import inspect_directory
from ckpt.sources import open_source

MODEL = TinyModel("llama")
FAMILIES = ["llama", "qwen2", "mixtral", "qwen3moe", "deepseek"]


@pytest.mark.parametrize("fsdp", [False, True], ids=["torch_dcp", "fsdp_dtensor"])
@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_pytorch_saved_gives_the_exact_tensors(tmp_path, family, te, fsdp):
    """Names under ``model.module.``, halves apart and experts in grouped parameters."""
    model = TinyModel(family, dtype=torch.bfloat16)
    source = write_dcp(tmp_path / "run", model, te=te, fsdp=fsdp)
    assert_converts(source, model, tmp_path / "out")


@pytest.mark.slow
def test_dtensors_of_several_ranks_give_the_exact_tensors(tmp_path):
    """Three processes cut every weight, also those of fewer rows and of rows that do not divide."""
    model = TinyModel("mixtral")
    source = write_dcp(tmp_path / "run", model, te=True, fsdp=True, world=3)
    checkpoint = open_source(source)
    assert max(len(tensor.shards) for tensor in checkpoint.tensors) > 1
    assert_converts(source, model, tmp_path / "out")


@pytest.mark.parametrize("fsdp", [False, True], ids=["torch_dcp", "fsdp_dtensor"])
def test_inspect_names_the_format_that_the_arguments_name(tmp_path, fsdp):
    facts = inspect_directory(write_dcp(tmp_path / "run", MODEL, fsdp=fsdp)).as_dict()
    assert facts["format"] == ("fsdp_dtensor" if fsdp else "torch_dcp")
    assert facts["convertible"]
    assert any("optimizer state" in line for line in facts["left_out"])
    assert any("trainer state" in line for line in facts["left_out"])


def test_a_directory_of_another_trainer_is_named_with_the_tool_that_can(tmp_path):
    """Tensors alone say no architecture."""
    state = {"model": {"tok_embeddings.weight": torch.ones(5, 3)}, "step": 4}
    save_alone(state, tmp_path / "step-4")
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path / "step-4")
    text = str(caught.value)
    assert "step-4: a checkpoint of torch.distributed.checkpoint without Megatron-LM's" in text
    assert "tok_embeddings.weight" in text
    assert "torchtitan" in text
    assert "--ckpt-convert-format torch_dist --ckpt-convert-save DIR" in text


def _entries(**more: Any):
    return lambda state: state.update(more)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_entries(ema={"decay": 0.9}), r"entries of no known kind: ema\.decay"),
        (_entries(adapter=torch.ones(3)), "entries of no known kind: adapter"),
        (_entries(model1={"module.a": torch.ones(3)}), r"no known kind: model1\.module\.a"),
        (_entries(args=[1, 2]), "arguments are no namespace"),
        (_entries(args=argparse.Namespace()), "without Megatron-LM's arguments"),
    ],
)
def test_a20_what_is_neither_weight_nor_trainer_state_is_refused(tmp_path, edit, message):
    source = write_dcp(tmp_path / "run", MODEL, edit=edit)
    with pytest.raises(SourceError, match=message):
        open_source(source)


def test_torch_dcp_with_tensor_parallelism_is_refused(tmp_path):
    """Ranks save equal names there, so that one rank's part is all that is left."""

    def edit(state):
        state["args"].tensor_model_parallel_size = 2

    source = write_dcp(tmp_path / "run", MODEL, edit=edit)
    with pytest.raises(SourceError, match="expected TP 1, found TP 2"):
        open_source(source)


def test_fused_rows_of_several_ranks_are_refused_in_fsdp_dtensor(tmp_path):
    """There the rows of Mamba's in_proj lie rank after rank, and not kind after kind."""

    def edit(state):
        state["args"].tensor_model_parallel_size = 2

    mamba, delta = TinyModel("nemotronh"), TinyModel("qwen3next")
    source = write_dcp(tmp_path / "mamba", mamba, fsdp=True, edit=edit)
    with pytest.raises(SourceError, match=r"expected TP 1, or a key for each .* found TP 2"):
        open_source(source)
    apart = write_dcp(tmp_path / "delta", delta, fsdp=True, edit=edit)
    assert_converts(apart, delta, tmp_path / "out")


def test_a13_layers_that_no_rank_saved_under_their_own_number_stop_the_run(tmp_path):
    """As where the pipeline's stages all begin at layer 0."""

    def edit(state):
        for name in [name for name in state["model"] if ".layers.2." in name]:
            del state["model"][name]

    source = write_dcp(tmp_path / "run", MODEL, edit=edit)
    with pytest.raises(CkptError, match=r"layers\.2"):
        plan_conversion(source, ConvertOptions())


def test_a_half_without_the_other_stops_the_run(tmp_path):
    def edit(state):
        del state["model"]["module.decoder.layers.1.mlp.linear_fc1.weight_v"]

    source = write_dcp(tmp_path / "run", MODEL, fsdp=True, edit=edit)
    with pytest.raises(
        CkptError, match=r"layers\.1\.mlp\.linear_fc1\.weight.*parts are not all stored"
    ):
        plan_conversion(source, ConvertOptions())


def test_halves_of_different_kinds_are_refused(tmp_path):
    def edit(state):
        name = "module.decoder.layers.1.mlp.linear_fc1.weight_v"
        state["model"][name] = state["model"][name].half()

    source = write_dcp(tmp_path / "run", MODEL, fsdp=True, edit=edit)
    with pytest.raises(SourceError, match=r"layers\.1\.mlp.*halves are not alike.*F32.*F16"):
        open_source(source)
