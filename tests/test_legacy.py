"""The legacy ``torch`` format: the grid of ranks, global numbers, and what is in the files."""

from __future__ import annotations

import io
import shutil

import pytest
import torch
from builders import Model, megatron_tensors, write_legacy
from tiny_megatron import Ranks, TinyModel
from tiny_megatron import write_legacy as write_family

from ckpt.errors import SourceError
from ckpt.sources import open_source

MODEL = Model(layers=4)


def names(checkpoint):
    return {tensor.name for tensor in checkpoint.tensors}


def test_names_are_canonical_and_layers_global(tmp_path):
    """Whatever the stages and the spelling."""
    expected = set(megatron_tensors(MODEL, 1))
    for number, options in enumerate(
        [{}, {"te": True}, {"pp": 2}, {"tp": 2, "pp": 2, "vpp": 2}, {"pp": 3, "split": [1, 2, 1]}]
    ):
        source = write_legacy(tmp_path / str(number), MODEL, **options)
        assert names(open_source(source)) == expected


@pytest.mark.parametrize("missing", ["mp_rank_01_001", "mp_rank_00_000"])
def test_a08_a_missing_rank_is_named(tmp_path, missing):
    """Its tensors cannot be made from the others."""
    source = write_legacy(tmp_path / "run", MODEL, tp=2, pp=2)
    shutil.rmtree(source / "iter_0000010" / missing)
    with pytest.raises(SourceError, match=f"1 ranks are missing: {missing}"):
        open_source(source)


def test_a08_all_missing_ranks_of_experts_are_listed(tmp_path):
    """TP 2, EP 2, ETP 1 saves a file for ranks (0, 0) and (1, 1)."""
    ranks = Ranks(tp=2, ep=2, etp=1)
    source = write_family(tmp_path / "run", TinyModel("mixtral"), ranks)
    assert len(open_source(source).files) == 2
    (rank,) = source.glob("iter_*/mp_rank_01_001")
    shutil.rmtree(rank)
    with pytest.raises(SourceError, match=r"mp_rank_01_001"):
        open_source(source)


def test_a08_one_name_means_a_stage_or_an_expert_rank_by_the_arguments(tmp_path):
    """mp_rank_00_001 is the second stage of PP 2 and the second expert rank of EP 2."""
    stages = write_legacy(tmp_path / "pp", MODEL, pp=2)
    experts = write_family(tmp_path / "ep", TinyModel("mixtral"), Ranks(ep=2))
    for source, sizes in ((stages, (2, 1)), (experts, (1, 2))):
        assert len(list(source.glob("iter_*/mp_rank_00_001"))) == 1
        found = open_source(source).parallelism
        assert (found.pipeline, found.expert) == sizes


def test_a_rank_directory_without_its_file_is_incomplete(tmp_path):
    source = write_legacy(tmp_path / "run", MODEL, tp=2)
    (source / "iter_0000010/mp_rank_01/model_optim_rng.pt").unlink()
    with pytest.raises(SourceError, match=r"mp_rank_01: model_optim_rng\.pt is missing"):
        open_source(source)


def test_a_rank_of_another_run_is_not_mixed_in(tmp_path):
    source = write_legacy(tmp_path / "run", MODEL, tp=2)
    iteration = source / "iter_0000010"
    shutil.copytree(iteration / "mp_rank_01", iteration / "mp_rank_02")
    with pytest.raises(SourceError, match=r"do not have: mp_rank_02"):
        open_source(source)
    (iteration / "mp_rank_02").rename(iteration / "mp_rank_01_001")
    with pytest.raises(SourceError, match="more ranks than the training arguments"):
        open_source(source)


def test_a21_rank_directories_may_end_in_zeros(tmp_path):
    """Some versions write a pipeline stage and an expert rank of 0 where there is but one."""
    source = write_legacy(tmp_path / "run", MODEL, tp=2)
    iteration = source / "iter_0000010"
    (iteration / "mp_rank_00").rename(iteration / "mp_rank_00_000")
    shutil.copytree(iteration / "mp_rank_01", iteration / "mp_rank_01_000_000")
    with pytest.raises(SourceError, match="two directories are of the same rank"):
        open_source(source)
    shutil.rmtree(iteration / "mp_rank_01")
    assert open_source(source).parallelism.tensor == 2


def test_a13_layers_that_the_files_lack_stop_the_run(tmp_path):
    """The count in the arguments is compared with that of the files."""
    source = write_legacy(tmp_path / "run", Model(layers=4, args={"num_layers": 5}), pp=2)
    with pytest.raises(SourceError, match=r"5 layers, found 4 in 2 pipeline stages"):
        open_source(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("decoder.layers.0.mlp.linear_fc2.weight"), "only some ranks hold"),
        (lambda m: m.update({"x.weight": torch.ones(2)}), "only some ranks hold"),
        (lambda m: m.update({"x.weight": "text"}), "an entry that is no tensor"),
        (lambda m: [m.pop(k) for k in list(m) if "layers.1." in k], "without a gap"),
        (lambda m: [m.pop(k) for k in list(m) if "layers.3." in k], "another number of layers"),
        (lambda m: m.update({k: v.half() for k, v in m.items()}), "different element types"),
    ],
    ids=["dropped", "added", "text", "gap", "fewer", "types"],
)
def test_a_rank_that_differs_from_its_neighbours_is_an_error_with_its_file(
    tmp_path, change, message
):
    def edit(state, tp, _pp):
        if tp == 1:
            change(state["model"])

    source = write_legacy(tmp_path / "run", MODEL, tp=2, edit=edit)
    with pytest.raises(SourceError, match=message) as caught:
        open_source(source)
    assert "mp_rank_0" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model"), "holds no model"),
        (lambda s: s.update(model=5), "holds no model"),
        (lambda s: s.update(model=[1]), "holds no model"),
        (lambda s: s.pop("args"), "no training arguments"),
        (lambda s: s.update(args=7), "no namespace"),
        (lambda s: s.update(args=None), "no training arguments"),
        (lambda s: setattr(s["args"], "tensor_model_parallel_size", "two"), "no count"),
        (lambda s: setattr(s["args"], "num_layers", [4]), "no count"),
    ],
    ids=["no-model", "number", "list", "no-args", "args-7", "args-none", "tp-two", "layers-list"],
)
def test_a_file_of_another_content_is_an_error_and_no_bug(tmp_path, change, message):
    source = write_legacy(tmp_path / "run", MODEL, edit=lambda state, _t, _p: change(state))
    with pytest.raises(SourceError, match=message):
        open_source(source)


def test_a18_extra_states_in_every_form_are_counted_and_left_out(tmp_path):
    """None, BytesIO, an empty tensor, a filled tensor."""
    forms = [None, io.BytesIO(b"state"), torch.empty(0, dtype=torch.uint8), torch.ones(9)]

    def edit(state, _tp, _pp):
        for layer, form in enumerate(forms):
            for part in ("self_attention.linear_qkv", "mlp.linear_fc1"):
                state["model"][f"decoder.layers.{layer}.{part}._extra_state"] = form

    source = write_legacy(tmp_path / "run", MODEL, tp=2, te=True, edit=edit)
    checkpoint = open_source(source)
    assert names(checkpoint) == set(megatron_tensors(MODEL, 1))
    (skipped,) = checkpoint.skipped
    assert skipped.count == 8
    assert skipped.reason == "extra state of TransformerEngine"


def test_two_spellings_of_one_tensor_are_refused(tmp_path):
    """TransformerEngine's name beside the plain one."""

    def edit(state, _tp, _pp):
        key = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
        state["model"][key] = torch.ones(60)

    source = write_legacy(tmp_path / "run", MODEL, edit=edit)
    with pytest.raises(SourceError, match="two entries are the same tensor"):
        open_source(source)


def test_old_nested_state_dicts_have_the_same_names(tmp_path):
    """Before Megatron-Core: model.language_model.{embedding, encoder, output_layer}."""
    old = {
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
        "pre_mlp_layernorm": "post_attention_layernorm",
    }

    def edit(state, _tp, _pp):
        nested = {"embedding": {"word_embeddings": {}}, "encoder": {}, "output_layer": {}}
        for name, value in state["model"].items():
            if name.startswith("embedding."):
                nested["embedding"]["word_embeddings"]["weight"] = value
            elif name.startswith("output_layer."):
                nested["output_layer"]["weight"] = value
            else:
                key = name.removeprefix("decoder.").replace("final_layernorm", "final_norm")
                for new, spelling in old.items():
                    key = key.replace(new, spelling)
                nested["encoder"][key] = value
        state["model"] = {"language_model": nested}

    source = write_legacy(tmp_path / "run", MODEL, tp=2, edit=edit)
    assert names(open_source(source)) == set(megatron_tensors(MODEL, 1))


def test_a28_optimizer_states_are_not_read(tmp_path):
    """They are most of a file; the source only knows where the model's bytes are."""

    def edit(state, _tp, _pp):
        state["optimizer"] = {"state": {"exp_avg": torch.zeros(100_000)}}

    checkpoint = open_source(write_legacy(tmp_path / "run", MODEL, edit=edit))
    held = sum(shard.view.nbytes for tensor in checkpoint.tensors for shard in tensor.shards)
    assert held == sum(tensor.nbytes for tensor in megatron_tensors(MODEL, 1).values())


def test_a_state_dict_that_holds_itself_is_an_error_and_no_bug(tmp_path):
    def edit(state, _tp, _pp):
        state["model"]["decoder"] = {"again": state["model"]}

    source = write_legacy(tmp_path / "run", MODEL, edit=edit)
    with pytest.raises(SourceError, match="more than 32 deep"):
        open_source(source)
