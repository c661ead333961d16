"""GPT-NeoX's checkpoints: its config names, its row orders, and biases that ranks share out."""

from __future__ import annotations

import json

import pytest
import torch
from converted import assert_equal
from safetensors.torch import load_file
from tiny_deepspeed import neox, neox_llama, write_layers, write_ranks, write_universal, write_zero3
from transformers import AutoConfig, AutoModelForCausalLM

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.errors import FamilyError, SourceError
from ckpt.manifest import read_stage

WRITERS = {"layers": write_layers, "sequential": write_ranks}


def convert(source, out):
    convert_checkpoint(source, out, ConvertOptions())
    return load_file(out / "model.safetensors")


def notes(out):
    return "\n".join(read_stage(out, "convert")["notes"])


def change(model, **settings):
    config = json.dumps({**settings})
    model.configs["zz.yml"] = config
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("form", WRITERS)
def test_row_biases_of_a_parallel_residual_are_summed(tmp_path, form, tp, dtype):
    """Each rank adds its own before the sum over ranks; the sum is rounded once."""
    model = neox(tp, dtype=dtype)
    source = WRITERS[form](tmp_path / "run", model)
    assert_equal(convert(source, tmp_path / "out"), model.hf)
    assert ("6 tensors are the sum" in notes(tmp_path / "out")) == (tp > 1)


def test_a_sum_that_leaves_the_range_of_its_type_is_said(tmp_path):
    """Two finite parts of a float16 bias may add up to infinity."""
    model = neox(2, dtype=torch.float16)
    bias = model.find("attention.dense.bias")
    for part in bias.ranks:
        part[5] = 40000
    convert(write_layers(tmp_path / "run", model), tmp_path / "out")
    overflowed = read_stage(tmp_path / "out", "convert")["casts"]["overflowed"]
    assert overflowed == {"gpt_neox.layers.0.attention.dense.bias": 1}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_row_biases_behind_the_sum_are_not_summed(tmp_path, tp):
    """Without a parallel residual every rank adds the same bias once."""
    model = neox(tp, parallel=False)
    found = convert(write_layers(tmp_path / "run", model), tmp_path / "out")
    assert_equal(found, model.hf)


def test_the_config_says_what_was_trained(tmp_path):
    """Rotary share and base, the residual and the activation, in transformers' own names."""
    convert(write_layers(tmp_path / "run", neox(2)), tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.use_parallel_residual is True
    assert config.hidden_act == "gelu"
    assert config.rope_parameters["partial_rotary_factor"] == 0.4
    assert config.rope_parameters["rope_theta"] == 20000
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    convert(write_layers(tmp_path / "serial", neox(2, parallel=False)), tmp_path / "two")
    assert AutoConfig.from_pretrained(tmp_path / "two").use_parallel_residual is False


@pytest.mark.parametrize("naming", ["new", "old"])
@pytest.mark.parametrize("groups", [12, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("form", WRITERS)
def test_llama_of_gpt_neox_gives_the_exact_tensors(tmp_path, form, tp, groups, naming):
    """[up; gate] or w1, w3; heads in turns, or all queries, keys, values with fewer groups."""
    model = neox_llama(tp, groups=groups, naming=naming)
    source = WRITERS[form](tmp_path / "run", model)
    assert_equal(convert(source, tmp_path / "out"), model.hf)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-6
    assert config["num_key_value_heads"] == groups


@pytest.mark.parametrize("naming", ["new", "old"])
@pytest.mark.parametrize("tp", [1, 2])
def test_llama_of_gpt_neox_from_partitions_and_universal(tmp_path, tp, naming):
    """Its rows are put in order also where they lie in pieces, or all ranks end to end."""
    model = neox_llama(tp, groups=4, naming=naming)
    assert_equal(convert(write_zero3(tmp_path / "z", model, dp=3), tmp_path / "three"), model.hf)
    source = write_universal(tmp_path / "u", model, patterns=False)
    assert_equal(convert(source, tmp_path / "universal"), model.hf)


def test_norms_that_drifted_apart_are_averaged(tmp_path):
    """As GPT-NeoX's own converter does."""
    model = neox(2)
    norm = model.find("input_layernorm.weight")
    norm.ranks[1] = norm.ranks[1] * 1.01
    name = "gpt_neox.layers.0.input_layernorm.weight"
    mean = ((norm.ranks[0].double() + norm.ranks[1].double()) / 2).float()
    found = convert(write_layers(tmp_path / "run", model), tmp_path / "out")
    assert_equal(found, {**model.hf, name: mean})
    assert "1 tensor is the mean" in notes(tmp_path / "out")


def test_without_the_config_files_nothing_is_guessed(tmp_path):
    """The stored arguments do not say which residual or positions the model has."""
    model = neox()
    model.configs = {}
    with pytest.raises(SourceError, match=r"configs: GPT-NeoX's config is missing"):
        convert(write_layers(tmp_path / "run", model), tmp_path / "out")


def test_config_files_that_contradict_are_refused(tmp_path):
    """Each other, or the stored arguments."""
    with pytest.raises(SourceError, match="two config files disagree about pos_emb"):
        convert(write_layers(tmp_path / "a", change(neox(), pos_emb="alibi")), tmp_path / "out")
    with pytest.raises(SourceError, match="disagree about num_layers"):
        convert(write_layers(tmp_path / "b", change(neox(), num_layers=4)), tmp_path / "out")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("gpt_j_tied", True),
        ("use_qk_layernorm", True),
        ("moe-num-experts", 8),
        ("attention_config", [[["local"], 3]]),
        ("norm", "scalenorm"),
        ("activation", "mish"),
        ("sliding_window_width", 64),
        ("te_layernorm_mlp", True),
        ("use_mup", True),
    ],
)
def test_settings_that_nothing_can_be_are_refused_by_name(tmp_path, setting, value):
    """They change the network and mostly leave no trace in the tensors' names."""
    model = change(neox(), **{setting: value})
    with pytest.raises(SourceError, match=setting.replace("-", "_")):
        convert(write_layers(tmp_path / "run", model), tmp_path / "out")


def test_a_parallel_residual_with_another_block_is_refused(tmp_path):
    """Llama's class has none."""
    model = change(neox_llama(), gpt_j_residual=True)
    with pytest.raises(FamilyError, match="gpt_j_residual"):
        convert(write_layers(tmp_path / "run", model), tmp_path / "out")


def test_grouped_rows_that_do_not_fit_are_refused(tmp_path):
    """The config may be another run's."""
    model = change(neox_llama(2), num_kv_heads=4)
    with pytest.raises(SourceError, match="num_kv_heads"):
        convert(write_layers(tmp_path / "run", model), tmp_path / "out")
