"""Rank files of one directory that do not belong together: copied twice, or of another save."""

from __future__ import annotations

import shutil

import pytest
import torch
from builders import Model, write_legacy
from test_deepspeed import write as write_deepspeed
from tiny_megatron import Ranks, TinyModel
from tiny_megatron import write_legacy as write_family

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.errors import SourceError
from ckpt.sources import open_source

MODEL = Model(layers=4)


def rank_file(source, name):
    (file,) = source.glob(f"iter_*/{name}/model_optim_rng.pt")
    return file


def edit(file, change):
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


@pytest.mark.parametrize(
    ("kept", "lost"),
    [("mp_rank_00_000", "mp_rank_01_000"), ("mp_rank_01_000", "mp_rank_01_001")],
)
def test_one_ranks_file_under_another_ranks_name_is_refused(tmp_path, kept, lost):
    """All shapes fit and replicated tensors are equal: only the content says it."""
    source = write_legacy(tmp_path / "run", MODEL, tp=2, pp=2)
    shutil.copy(rank_file(source, kept), rank_file(source, lost))
    with pytest.raises(SourceError, match=f"{lost}.*one and the same.*{kept}"):
        open_source(source)


def test_an_expert_ranks_file_under_another_ones_name_is_refused(tmp_path):
    """Each expert would be there twice, and half of them would be lost."""
    source = write_family(tmp_path, TinyModel("qwen3moe"), Ranks(ep=3))
    shutil.copy(rank_file(source, "mp_rank_00_001"), rank_file(source, "mp_rank_00_002"))
    with pytest.raises(SourceError, match=r"mp_rank_00_002.*one and the same.*mp_rank_00_001"):
        open_source(source)


def test_expert_ranks_of_a_stage_without_experts_may_hold_the_same(tmp_path):
    """The first stage of this model is its dense layer alone."""
    ranks = Ranks(pp=2, ep=2, split=(1, 2))
    source = write_family(tmp_path, TinyModel("deepseek"), ranks)
    assert len(open_source(source).files) == 4


@pytest.mark.parametrize("number", [1, 3])
def test_a_deepspeed_layer_file_under_another_ranks_name_is_refused(tmp_path, number):
    """The final norm's files, which are alike, are not mistaken for such."""
    source = write_deepspeed(tmp_path, MODEL)
    assert open_source(source)
    first, second = (
        source / f"global_step7/layer_{number:02d}-model_{rank:02d}-model_states.pt"
        for rank in range(2)
    )
    shutil.copy(first, second)
    with pytest.raises(SourceError, match=f"{second.name}.*one and the same.*{first.name}"):
        open_source(source)


@pytest.mark.parametrize(
    ("name", "value"),
    [("iteration", 9), ("checkpoint_version", 2.0), ("rotary_base", 77), ("num_layers", 8)],
)
def test_a_stage_of_another_iteration_or_run_is_refused(tmp_path, name, value):
    """Pipeline stages have no tensor in common that would differ."""
    source = write_legacy(tmp_path / "run", MODEL, pp=2)

    def change(state):
        if name in state:
            state[name] = value
        else:
            setattr(state["args"], name, value)

    edit(rank_file(source, "mp_rank_00_001"), change)
    with pytest.raises(SourceError, match=f"not of one save.*{name}.*{value}"):
        open_source(source)


@pytest.mark.parametrize("rank", ["mp_rank_01_001", "mp_rank_00_002", "mp_rank_01_002"])
def test_a_norm_that_differs_on_any_further_expert_rank_is_refused(tmp_path, rank):
    """Copies of the second expert rank's second tensor rank, and of the third expert rank."""
    source = write_family(tmp_path / "run", TinyModel("qwen3moe"), Ranks(tp=2, ep=3))

    def change(state):
        state["model"]["decoder.layers.0.input_layernorm.weight"][0] += 1

    edit(rank_file(source, rank), change)
    with pytest.raises(SourceError, match=f"copies of this tensor differ.*{rank}"):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions())
