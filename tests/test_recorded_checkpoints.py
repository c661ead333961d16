"""Checkpoints that Megatron-Core's own savers wrote, kept here because the versions are rare.

Each archive holds a Llama-like model of two layers by two tensor-parallel ranks in bf16, token
ids, and the logits that the original model answered in fp32.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.sources import open_source
from ckpt.validate.hf_run import load_model

RECORDED = Path(__file__).parent / "recorded"
FORMATS = {
    "megatron-core-0.12.3": "zarr",
    "megatron-core-0.19.2": "torch_dist",  # the arguments are an object among the tensors
}


def test_every_recorded_checkpoint_is_tested():
    assert {path.name.removesuffix(".tar.xz") for path in RECORDED.iterdir()} == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_a14_the_converted_model_answers_as_the_original(tmp_path, name):
    with tarfile.open(RECORDED / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / "checkpoint"
    assert open_source(source).format == FORMATS[name]
    assert not list(source.glob("iter_*/common.pt")) or name != "megatron-core-0.19.2"
    convert_checkpoint(source, tmp_path / "out", ConvertOptions())
    ids = load_file(tmp_path / "inputs.safetensors")["input_ids"]
    original = load_file(tmp_path / "logits.safetensors")["logits"]
    with torch.no_grad():
        found = load_model(tmp_path / "out")(ids).logits
    assert found.shape[-1] < original.shape[-1]  # the padding rows are gone
    assert (found - original[..., : found.shape[-1]]).abs().max() <= 1e-5
