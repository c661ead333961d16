"""Live Megatron-Core models: exact, complete in every layout, and recorded as in training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron_checkpoints import Layout
from safetensors.torch import load_file, save_file

from ckpt.config import ConvertOptions, ValidateOptions
from ckpt.convert import convert_checkpoint
from ckpt.errors import ValidationError
from ckpt.progress import Silent
from ckpt.sources import locate
from ckpt.validate import megatron_run, validate_checkpoint
from ckpt.validate.recorded import read_reference

pytestmark = pytest.mark.megatron
HERE = Path(__file__).parent

LAYOUTS = {
    "merged by Megatron": Layout("llama", tp=2, pp=2),
    "each rank its file": Layout("qwen2", tp=2, pp=2, te=True, format="torch"),
    "interleaved": Layout("llama", pp=2, vpp=2, layout="Et|ttt|ttt|tL", format="torch"),
    "experts": Layout("mixtral", tp=2, ep=2, etp=1, format="torch"),
    "further tokens": Layout("deepseek-mtp", te=True),
    "half precision": Layout("llama", train=2, dist_opt=True, dtype="bf16"),
}


@pytest.fixture(scope="module")
def made(megatron_checkpoints):
    items = megatron_checkpoints(LAYOUTS.values())
    return dict(zip(LAYOUTS, items, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_live_model_answers_as_the_one_that_was_saved(made, name, tmp_path, monkeypatch):
    """All padding columns, the residual stream behind each layer, and an odd number of rows."""
    item = made[name]
    convert_checkpoint(item.directory, tmp_path, ConvertOptions(overwrite=True))
    ids = torch.cat([item.input_ids, item.input_ids[:1].flip(1)])
    monkeypatch.setattr(megatron_run, "input_ids", lambda *_: ids)
    found = megatron_run.run_megatron(locate(item.directory), tmp_path, ValidateOptions(), Silent())
    assert torch.equal(found.input_ids, ids)
    assert (found.logits[:-1] - item.padded_logits_fp32).abs().max() <= 1e-5
    layers = 4 if name == "further tokens" else 8
    assert sorted(found.hidden) == list(range(layers + 1))
    assert {state.shape[:2] for state in found.hidden.values()} == {ids.shape}
    report = validate_checkpoint(item.directory, tmp_path, ValidateOptions(reference="megatron"))
    assert report.passed, report.as_text()
    assert report.first_bad_layer is None
    assert len(report.layers) == layers + 1
    assert max(layer.max_relative_diff for layer in report.layers.values()) < 1e-4


@pytest.mark.parametrize("name", ["each rank its file", "interleaved"])
def test_the_layer_is_named_whichever_rank_holds_it(made, name, tmp_path):
    item = made[name]
    convert_checkpoint(item.directory, tmp_path, ConvertOptions(overwrite=True))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    key = "model.layers.5.self_attn.k_proj.weight"
    tensors[key] = tensors[key].roll(16, 0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    report = validate_checkpoint(item.directory, tmp_path, ValidateOptions(reference="megatron"))
    assert not report.passed
    assert report.first_bad_layer == 6
    assert "layer 5 is the first" in report.likely_fault()
    assert "queries and keys" in report.likely_fault()


def test_a_lost_tensor_is_not_made_up(made, tmp_path):
    """Megatron gets every parameter from the rank's file or there is no reference."""
    item = made["each rank its file"]
    convert_checkpoint(item.directory, tmp_path / "out", ConvertOptions())
    copied = tmp_path / "run"
    subprocess.run(["cp", "-r", str(item.directory), str(copied)], check=True)  # noqa: S607
    for file in copied.glob("iter_*/mp_rank_*_001/model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        del state["model"]["decoder.final_layernorm.weight"]
        torch.save(state, file)
    with pytest.raises(ValidationError, match="final_layernorm"):
        validate_checkpoint(copied, tmp_path / "out", ValidateOptions(reference="megatron"))


RECORD = """
import json, sys
from pathlib import Path
import megatron_worker as worker
import megatron_model as model
import torch
from types import SimpleNamespace
from megatron_checkpoints import Layout
from ckpt.validate.recorded import record_reference

def rank(number, args, rendezvous):
    worker.start_rank(number, args, rendezvous, te=False)
    chunks = model.build(args, args.params_dtype)
    model.fill(chunks)
    ids = torch.load(sys.argv[2])
    file = record_reference(chunks[0].train(), ids, sys.argv[1], hidden_states=True)
    assert (file is not None) == (number == 0), number
    assert chunks[0].training
    torch.distributed.barrier()

args = worker.make_args(SimpleNamespace(**vars(Layout("llama", tp=2))))
args.world_size = 4  # twice as many as the model needs: two data-parallel copies
torch.set_num_threads(1)
worker.fork_ranks(rank, args)
"""


def test_a_training_job_records_once_what_validation_passes(made, tmp_path):
    """Two tensor-parallel ranks, two data-parallel ones, dropout on; the layers come along."""
    item = made["merged by Megatron"]
    directory = tmp_path / "iter_0000001"
    torch.save(item.input_ids, tmp_path / "ids.pt")
    done = subprocess.run(
        [sys.executable, "-c", RECORD, str(directory), str(tmp_path / "ids.pt")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = read_reference(next(directory.iterdir()))
    assert found.dtype == "float32"
    assert (found.logits[..., : item.vocab_size] - item.logits_fp32).abs().max() <= 1e-5
    convert_checkpoint(item.directory, tmp_path / "out", ConvertOptions())
    options = ValidateOptions(recorded=directory)
    report = validate_checkpoint(item.directory, tmp_path / "out", options)
    assert report.passed
    assert len(report.layers) == 9
