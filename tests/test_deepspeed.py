"""Megatron-DeepSpeed's directories: roles by the names inside, and nothing dropped silently."""

from __future__ import annotations

import pytest
import torch
from builders import Model, hf_tensors, megatron_tensors, rank_part, training_args
from safetensors.torch import load_file

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.errors import SourceError

OLD = (
    ("pre_mlp_layernorm.", "post_attention_layernorm."),
    ("self_attention.linear_qkv.", "self_attention.query_key_value."),
    ("self_attention.linear_proj.", "self_attention.dense."),
    ("mlp.linear_fc1.", "mlp.dense_h_to_4h."),
    ("mlp.linear_fc2.", "mlp.dense_4h_to_h."),
)


def pipeline_layers(model, tp, rank):
    """What each entry of the pipeline's layer list saves; entries without weights save nothing."""
    parts = {n: rank_part(n, w, tp, rank).clone() for n, w in megatron_tensors(model, tp).items()}
    layers = {1: {"word_embeddings.weight": parts["embedding.word_embeddings.weight"]}}
    for number in range(model.layers):
        at = f"decoder.layers.{number}."
        layer = {name.removeprefix(at): part for name, part in parts.items() if name.startswith(at)}
        for new, old in OLD:
            layer = {name.replace(new, old): part for name, part in layer.items()}
        layers[3 + number] = layer
    last = 4 + model.layers
    layers[last] = {"weight": parts["decoder.final_layernorm.weight"]}
    if model.tied:
        layers[last + 1] = {"lm_head.weight": layers[1]["word_embeddings.weight"].clone()}
    else:
        layers[last + 1] = {"lm_head.weight": parts["output_layer.weight"]}
    return layers


def write(root, model, *, tp=2, edit=None, stage=0):
    directory = root / "global_step7"
    directory.mkdir(parents=True)
    for rank in range(tp):
        layers = pipeline_layers(model, tp, rank)
        if edit:
            edit(layers, rank)
        for number, layer in layers.items():
            torch.save(layer, directory / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        state = {
            "module": None,
            "args": training_args(model, tp=tp, pp=1),
            "checkpoint_version": 3.0,
            "ds_config": {"zero_optimization": {"stage": stage}},
        }
        torch.save(state, directory / f"mp_rank_{rank:02d}_model_states.pt")
        (directory / f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt").write_bytes(b"unread")
    (root / "latest").write_text("global_step7")
    return root


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("model", [Model(), Model(tied=True), Model(family="qwen2")], ids=str)
def test_a21_layer_files_give_the_exact_tensors(tmp_path, model, tp):
    """Layers are counted by role, not by the number in the name; optimizer files do not matter."""
    convert_checkpoint(write(tmp_path / "run", model, tp=tp), tmp_path / "out", ConvertOptions())
    found, truth = load_file(tmp_path / "out" / "model.safetensors"), hf_tensors(model)
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], value) for name, value in truth.items())


def test_a04_a_tied_head_that_differs_stops_the_run(tmp_path):
    """The head is compared with the embedding and not dropped."""

    def stale(layers, _rank):
        layers[max(layers)]["lm_head.weight"] += 1

    source = write(tmp_path / "run", Model(tied=True), edit=stale)
    with pytest.raises(SourceError, match=r"embedding\.word_embeddings\.weight"):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_tensor_that_only_one_rank_holds_is_named(tmp_path, lost):
    """Whichever of the ranks it is that lacks it."""

    def drop(layers, rank):
        if rank == lost:
            del layers[3]["self_attention.dense.weight"]

    with pytest.raises(SourceError, match="only some ranks"):
        convert_checkpoint(
            write(tmp_path / "run", Model(), edit=drop), tmp_path / "out", ConvertOptions()
        )


def test_ranks_of_different_element_types_are_refused(tmp_path):
    """As in Megatron-LM's own format."""

    def halve(layers, rank):
        if rank == 1:
            layers[3]["self_attention.dense.weight"] = layers[3][
                "self_attention.dense.weight"
            ].half()

    with pytest.raises(SourceError, match="element types"):
        convert_checkpoint(
            write(tmp_path / "run", Model(), edit=halve), tmp_path / "out", ConvertOptions()
        )


def test_zero_stage_3_and_unknown_roles_are_refused_by_name(tmp_path):
    """Weights that are only in the optimizer's partitions are not looked for elsewhere."""
    with pytest.raises(SourceError, match="ZeRO stage 3"):
        convert_checkpoint(
            write(tmp_path / "three", Model(), stage=3), tmp_path / "out", ConvertOptions()
        )

    def strange(layers, _rank):
        layers[2] = {"mystery.weight": torch.ones(2)}

    with pytest.raises(SourceError, match="unknown role"):
        convert_checkpoint(
            write(tmp_path / "run", Model(), edit=strange), tmp_path / "out", ConvertOptions()
        )
