"""DeepSpeed's forms of a directory give the same exact tensors; what is missing is named."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from converted import assert_equal
from safetensors.torch import load_file
from tiny_deepspeed import (
    HIDDEN,
    VOCAB,
    bloom,
    gpt,
    llama,
    write_layers,
    write_ranks,
    write_universal,
    write_zero3,
)

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.errors import CkptError, FamilyError, SourceError
from ckpt.manifest import read_stage
from ckpt.sources import open_source

MODELS = {"llama": llama, "gpt": gpt}


def convert(source, out):
    convert_checkpoint(source, out, ConvertOptions())
    return load_file(out / "model.safetensors")


def notes(out):
    return "\n".join(read_stage(out, "convert")["notes"])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("first", [2, 3, 9])
@pytest.mark.parametrize("kind", MODELS)
def test_a21_layer_numbers_may_start_anywhere(tmp_path, kind, first, tp):
    """Functions in the layer list count; roles are found by the tensors' names."""
    model = MODELS[kind](tp, first=first)
    assert_equal(convert(write_layers(tmp_path / "run", model), tmp_path / "out"), model.hf)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_a21_without_a_pipeline_the_rank_files_hold_everything(tmp_path, kind, tp):
    """There are no layer files then."""
    model = MODELS[kind](tp)
    assert_equal(convert(write_ranks(tmp_path / "run", model), tmp_path / "out"), model.hf)


@pytest.mark.parametrize("groups", [1, 7])
@pytest.mark.parametrize("dp", [1, 3, 7, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "tp"), [("llama", 1), ("llama", 2), ("gpt", 1), ("gpt", 4)])
def test_zero_3_partitions_make_the_exact_tensors(tmp_path, kind, tp, dp, groups):
    """Pieces begin and end inside rows, and more ranks than elements leave some empty."""
    model = MODELS[kind](tp)
    source = write_zero3(tmp_path / "run", model, dp=dp, groups=groups)
    assert_equal(convert(source, tmp_path / "out"), model.hf)
    assert f"float32 values in {dp} partitions of ZeRO 3" in notes(tmp_path / "out")


def test_zero_3_parameters_that_were_not_trained_come_from_the_model_files(tmp_path):
    """They lie there in the model's own type."""
    model = llama(2)
    frozen = "mlp.dense_4h_to_h.weight"
    for item in model.stored:
        if item.name == frozen:
            item.ranks = [part.bfloat16() for part in item.ranks]
    truth = {n: v.bfloat16() if "down_proj" in n else v for n, v in model.hf.items()}
    source = write_zero3(tmp_path / "run", model, dp=3, frozen=frozen)
    assert_equal(convert(source, tmp_path / "out"), truth)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a21_a_missing_partition_of_zero_3_is_named(tmp_path, kind):
    """Its part of every weight is in no other file."""
    source = write_zero3(tmp_path / "run", llama(2), dp=3)
    for file in (source / "global_step7").glob(f"*zero_pp_rank_1_mp_rank_01_{kind}*"):
        file.unlink()
    with pytest.raises(SourceError, match=f"zero_pp_rank_1_mp_rank_01_{kind}_states"):
        convert(source, tmp_path / "out")


def test_zero_3_from_another_number_of_ranks_is_refused(tmp_path):
    """The last ranks' files, model and optimizer alike, may be what was not copied."""
    source = write_zero3(tmp_path / "run", llama(), dp=3)
    for file in (source / "global_step7").glob("*zero_pp_rank_2_*"):
        file.unlink()
    with pytest.raises(SourceError, match="number of data-parallel ranks"):
        convert(source, tmp_path / "out")


def test_zero_3_partitions_that_do_not_fit_the_shapes_are_refused(tmp_path):
    """Elements left over mean that the parameters are not laid as expected."""
    source = write_zero3(tmp_path / "run", llama(), dp=2)
    for file in (source / "global_step7").glob("*optim_states.pt"):
        state = torch.load(file, weights_only=False)
        flat = state["optimizer_state_dict"]["fp32_flat_groups"]
        flat[0] = torch.cat([flat[0], torch.ones(2)])
        torch.save(state, file)
    with pytest.raises(SourceError, match="another size"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("pipeline", [True, False], ids=["pipeline", "nested"])
@pytest.mark.parametrize("patterns", [True, False], ids=["patterns", "plain"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_a02_universal_checkpoints_give_the_exact_tensors(tmp_path, kind, tp, patterns, pipeline):
    """Also those made without patterns, whose gated MLPs, norms and rows are merely stacked."""
    model = MODELS[kind](tp)
    source = write_universal(tmp_path / "run", model, patterns=patterns, pipeline=pipeline)
    assert_equal(convert(source, tmp_path / "out"), model.hf)
    assert "optimizer's float32 values" in notes(tmp_path / "out")


def test_a21_bloom_s_universal_names_are_read(tmp_path):
    """``tied_modules.embed.`` and numbers of the layer list stand before the names."""
    model = bloom(2)
    assert_equal(convert(write_universal(tmp_path / "run", model), tmp_path / "out"), model.hf)


def test_universal_parameters_joined_in_an_unknown_way_are_refused(tmp_path):
    """A form of joining that is not known here might be any order of rows."""
    source = write_universal(tmp_path / "run", llama(2))
    file = next((source / "global_step7_universal" / "zero").glob("*query_key_value*/fp32.pt"))
    state = torch.load(file, weights_only=False)
    torch.save({**state, "sub_param_shape": (3, -1)}, file)
    with pytest.raises(SourceError, match=r"unknown way.*sub_param_shape"):
        convert(source, tmp_path / "out")


def test_universal_parameters_of_zero_3_are_stored_flat(tmp_path):
    """Then their shapes are in the model's state."""
    model = llama()
    source = write_universal(tmp_path / "run", model, pipeline=False)
    shapes = {}
    for file in (source / "global_step7_universal" / "zero").glob("*/fp32.pt"):
        value = torch.load(file, weights_only=False)["param"]
        shapes[file.parent.name] = value.shape
        torch.save(value.flatten(), file)
    file = source / "global_step7_universal" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(file, weights_only=False), "param_shapes": [shapes]}, file)
    assert_equal(convert(source, tmp_path / "out"), model.hf)


@pytest.mark.parametrize("tp", [1, 2])
def test_a21_bloom_with_alibi_and_its_embedding_norm(tmp_path, tp):
    """The kind of positions is an enum of the training code, which is never imported."""
    model = bloom(tp)
    assert_equal(convert(write_layers(tmp_path / "run", model), tmp_path / "out"), model.hf)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["BloomForCausalLM"]


def test_ranks_that_drifted_apart_are_averaged_and_it_is_said(tmp_path):
    """BigScience's own converter takes the mean as well."""
    model = bloom(2)
    norm = model.find("post_attention_layernorm.weight")
    norm.ranks[1] = norm.ranks[1] + 0.01
    name = "transformer.h.0.post_attention_layernorm.weight"
    mean = ((norm.ranks[0].double() + norm.ranks[1].double()) / 2).float()
    assert not torch.equal(mean, model.hf[name])
    found = convert(write_layers(tmp_path / "run", model), tmp_path / "out")
    assert_equal(found, {**model.hf, name: mean})
    assert "1 tensor is the mean of their ranks' copies" in notes(tmp_path / "out")
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in notes(tmp_path / "out")


def test_ranks_that_are_too_far_apart_stop_the_run(tmp_path):
    """Another layer's gains are no drift."""
    model = bloom(2)
    norm = model.find("input_layernorm.weight")
    norm.ranks[1] = norm.ranks[1].flip(0)
    with pytest.raises(SourceError, match=r"layers\.0\.input_layernorm.*too far apart"):
        convert(write_layers(tmp_path / "run", model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_copies_that_must_be_equal_are_not_averaged(tmp_path):
    """deepspeedai's fork keeps them equal, and its own tools demand it."""
    model = gpt(2)
    model.find("self_attention.dense.bias").ranks[1] += 1e-6
    with pytest.raises(SourceError, match="two stored copies"):
        convert(write_layers(tmp_path / "run", model), tmp_path / "out")


def test_a21_a_layer_that_is_missing_is_named(tmp_path):
    """By its file if a rank's is missing, by its number if all are."""
    source = write_layers(tmp_path / "run", llama(2))
    directory = source / "global_step7"
    (directory / "layer_03-model_01-model_states.pt").unlink()
    with pytest.raises(SourceError, match="layer_03-model_01"):
        convert(source, tmp_path / "out")
    (directory / "layer_03-model_00-model_states.pt").unlink()
    with pytest.raises(SourceError, match=r"layer_03-model_\*"):
        convert(source, tmp_path / "out")
    for file in directory.glob("layer_02-*"):
        file.unlink()
    with pytest.raises(SourceError, match="3 layers, found 1"):
        convert(source, tmp_path / "out")


def test_a21_the_last_rank_s_files_missing_altogether_is_noticed(tmp_path):
    """The training arguments say how many tensor-parallel ranks there were."""
    source = write_layers(tmp_path / "run", llama(2))
    for file in (source / "global_step7").glob("*-model_01-*"):
        file.unlink()
    with pytest.raises(SourceError, match="2 ranks, found 1"):
        convert(source, tmp_path / "out")


def test_a_rank_file_that_is_missing_is_named(tmp_path):
    """Also where a higher one is there."""
    source = write_ranks(tmp_path / "run", llama(2))
    (source / "global_step7" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(SourceError, match="mp_rank_00_model_states"):
        convert(source, tmp_path / "out")


def test_zero_3_weights_that_are_elsewhere_are_not_taken_for_the_model(tmp_path):
    """The rank file alone has the shapes and not the values."""
    source = write_ranks(tmp_path / "run", llama(), stage=3)
    with pytest.raises(SourceError, match="ZeRO stage 3"):
        convert(source, tmp_path / "out")


def test_a03_the_true_vocabulary_size_is_in_the_universal_info(tmp_path):
    """Megatron-DeepSpeed stores it there and not among the arguments."""
    convert(write_layers(tmp_path / "run", llama(2)), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == VOCAB
    assert config["rope_theta"] == 500000
    assert config["num_key_value_heads"] == 6


def test_a21_a_universal_directory_is_found_from_its_run(tmp_path):
    """The tracker file's name of the plain iteration means it where that is gone."""
    source = write_universal(tmp_path / "run", llama())
    assert open_source(source).format == "deepspeed_universal"
    (source / "latest").rename(source / "latest_universal")
    assert open_source(source).iteration == 7
    assert open_source(source / "global_step7_universal").iteration == 7


@pytest.mark.parametrize("where", ["files", "arguments", "names"])
def test_experts_of_deepspeed_are_refused_in_one_line(tmp_path, where):
    """Its gates drop tokens; no Hugging Face class does."""
    model = llama(2)
    if where == "arguments":
        model.args.num_experts = [4]
    if where == "names":
        model.put(2, "mlp.deepspeed_moe.gate.wg.weight", torch.ones(4, HIDDEN))
    source = write_layers(tmp_path / "run", model)
    if where == "files":
        file = source / "global_step7" / "layer_0_expert_3_mp_rank_00_model_states.pt"
        torch.save({}, file)
    with pytest.raises(SourceError, match=r"DeepSpeed's MoE.*no Hugging Face class"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "value"),
    [("glu_activation", "swiglu"), ("apply_residual_connection_post_layernorm", True)],
)
def test_arguments_that_no_family_has_are_refused_by_name(tmp_path, name, value):
    """They change the network and leave no trace in the tensors' names."""
    model = bloom() if name == "glu_activation" else gpt()
    setattr(model.args, name, value)
    with pytest.raises(CkptError, match=name):
        convert(write_layers(tmp_path / "run", model), tmp_path / "out")


def test_a_parallel_residual_is_refused_where_the_class_has_none(tmp_path):
    """GPT-2 would compute something else from the same tensors."""
    model = gpt()
    model.args = argparse.Namespace(**vars(model.args), gpt_j_residual=True)
    with pytest.raises(FamilyError, match="gpt_j_residual"):
        convert(write_layers(tmp_path / "run", model), tmp_path / "out")
