"""Converted tensors equal the truth, bit for bit, in every layout that the writers can write."""

from __future__ import annotations

import json

import pytest
import torch
from builders import (
    Model,
    hf_config,
    hf_tensors,
    variant,
    write_legacy,
    write_tokenizer,
    write_torch_dist,
)
from converted import assert_equal, read_tensors

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.errors import CkptError, FamilyError, OptionsError, SourceError
from ckpt.inspection import inspect_directory, weight_files
from ckpt.manifest import read_stage

FAMILIES = {
    "llama": Model(),
    "llama-bias": Model(bias=True),
    "tied": Model(tied=True),
    "multi-query": Model(groups=1),
    "multi-head": Model(groups=12),
    "qwen2": Model(family="qwen2", tied=True),
    "qwen3": Model(family="qwen3"),
    "bf16": Model(dtype=torch.bfloat16),
}


def convert(source, place, **options):
    convert_checkpoint(source, place, ConvertOptions(**options))
    return read_tensors(place)


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a01_a02_a04_a10_legacy_ranks_give_the_exact_tensors(tmp_path, family, tp, pp, te):
    """Queries, gate and up, norms and tied heads land where they belong, whatever the ranks."""
    model = FAMILIES[family]
    source = write_legacy(tmp_path / "run", model, tp=tp, pp=pp, te=te)
    assert_equal(convert(source, tmp_path / "out"), hf_tensors(model))


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "numbered"])
@pytest.mark.parametrize("prefix", ["", "module.", "model."])
@pytest.mark.parametrize("halves", [False, True], ids=["whole", "w-and-v"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "bf16"])
def test_a15_every_key_form_of_torch_dist_gives_the_same_tensors(
    tmp_path, family, stacked, prefix, halves
):
    """Stacked or numbered layers, prefixes, and gate and up apart are only spellings."""
    model = FAMILIES[family]
    source = write_torch_dist(
        tmp_path / "run", model, tp=2, stacked=stacked, prefix=prefix, halves=halves, optimizer=True
    )
    assert_equal(convert(source, tmp_path / "out"), hf_tensors(model))


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "split"),
    [(7, 3, 1, [1, 4, 2]), (8, 2, 2, None), (5, 2, 1, [1, 4]), (7, 2, 2, [1, 3, 2, 1])],
)
def test_a13_uneven_and_interleaved_stages_number_every_layer_once(
    tmp_path, layers, pp, vpp, split
):
    """Layers are counted in the files, so any split of the pipeline is right."""
    model = Model(layers=layers)
    source = write_legacy(tmp_path / "run", model, tp=2, pp=pp, vpp=vpp, split=split)
    assert_equal(convert(source, tmp_path / "out"), hf_tensors(model))


def test_a03_padding_rows_are_cut_and_reported(tmp_path):
    """160 stored rows of 131: both matrices and the config have 131."""
    source = write_legacy(tmp_path / "run", Model(), tp=2)
    found = convert(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == found["lm_head.weight"].shape[0] == 131
    assert read_stage(tmp_path / "out", "convert")["model"]["padding_rows"] == 29


def test_a03_a_tokenizer_with_more_ids_than_the_vocabulary_is_refused(tmp_path):
    """Rows are never cut below the highest token id."""
    source = write_legacy(tmp_path / "run", Model(), tp=2)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", 140)
    with pytest.raises(OptionsError, match="id 139"):
        convert(source, tmp_path / "out", tokenizer=tokenizer)
    found = convert(source, tmp_path / "out", tokenizer=tokenizer, vocab_size=140)
    assert found["lm_head.weight"].shape[0] == 140


def test_a03_without_any_known_size_padding_is_kept_and_said(tmp_path):
    """Nothing is guessed."""
    source = write_legacy(tmp_path / "run", Model(args={"vocab_size": ...}), tp=2)
    found = convert(source, tmp_path / "out")
    assert found["lm_head.weight"].shape[0] == 160
    assert any(
        "padding rows are kept" in n for n in read_stage(tmp_path / "out", "convert")["notes"]
    )


def test_a04_differing_tied_copies_stop_the_run(tmp_path):
    """A stale head on the last stage is not chosen silently, nor is the embedding."""

    def stale(state, _tp, pp):
        if pp == 1:
            state["model"]["output_layer.weight"] += 1

    source = write_legacy(tmp_path / "run", Model(tied=True), tp=2, pp=2, edit=stale)
    with pytest.raises(SourceError, match="two stored copies") as caught:
        convert(source, tmp_path / "out")
    assert "mp_rank_00_000" in str(caught.value)
    assert "embedding.word_embeddings.weight" in str(caught.value)
    assert "output_layer.weight in" in str(caught.value)
    assert "mp_rank_00_001" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_norms_that_differ_between_ranks_stop_the_run(tmp_path):
    """Replicated tensors must be equal on all ranks."""

    def drift(state, tp, _pp):
        if tp == 1:
            state["model"]["decoder.final_layernorm.weight"][3] += 0.25

    source = write_legacy(tmp_path / "run", Model(), tp=2, edit=drift)
    with pytest.raises(SourceError, match=r"decoder\.final_layernorm\.weight"):
        convert(source, tmp_path / "out")


def test_a14_arguments_among_the_tensors_are_found(tmp_path):
    """Newer versions keep the common state inside the .distcp files."""
    model = Model()
    source = write_torch_dist(tmp_path / "run", model, tp=2, common="common_state")
    assert_equal(convert(source, tmp_path / "out"), hf_tensors(model))
    gone = write_torch_dist(tmp_path / "gone", model, tp=2, common=None)
    with pytest.raises(SourceError, match=r"no common\.pt and no common_state"):
        convert(gone, tmp_path / "none")


@pytest.mark.parametrize(
    "field", ["num_query_groups", "kv_channels", "ffn_hidden_size", "padded_vocab_size",
              "hidden_size", "num_layers", "expert_tensor_parallel_size"]
)  # fmt: skip
def test_a16_absent_sizes_are_derived_from_the_tensors(tmp_path, field):
    """What shapes decide is derived, and said."""
    model = Model(args={field: ...})
    found = convert(write_torch_dist(tmp_path / "run", model, tp=2), tmp_path / "out")
    assert_equal(found, hf_tensors(model))


@pytest.mark.parametrize(("field", "names"), [("rotary_base", ()), ("norm_epsilon", ())])
def test_a16_assumed_values_that_change_numbers_are_said(tmp_path, field, names):
    """A default that would change numbers comes with a note."""
    del names
    convert(write_legacy(tmp_path / "run", Model(args={field: ...})), tmp_path / "out")
    notes = read_stage(tmp_path / "out", "convert")["notes"]
    assert any("assumed" in note for note in notes)


def test_a16_what_nothing_decides_is_asked_for(tmp_path):
    """The message names the field and the flag, and the flag works."""
    model = Model(args={"num_attention_heads": ...})
    source = write_legacy(tmp_path / "run", model)
    with pytest.raises(FamilyError, match="--set num_attention_heads=VALUE"):
        convert(source, tmp_path / "out")
    found = convert(source, tmp_path / "out", overrides=("num_attention_heads=12",))
    assert_equal(found, hf_tensors(model))


def test_a25_config_values_are_those_of_training(tmp_path):
    """head_dim, eps, rotary base and positions come from the arguments and not from habit."""
    model = Model()
    convert(write_legacy(tmp_path / "run", model, tp=2), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert hf_config(model).items() <= config.items()
    assert config["torch_dtype"] == config["dtype"] == "float32"


@pytest.mark.parametrize("spelling", ["apply_layernorm_1p", "layernorm_zero_centered_gamma"])
def test_zero_centred_gains_become_plain_ones(tmp_path, spelling):
    """Hugging Face's Llama multiplies by w, so 1 + w is written."""
    model = Model(zero_centred=True, args={"apply_layernorm_1p": ..., spelling: True})
    found = convert(write_legacy(tmp_path / "run", model, tp=2), tmp_path / "out")
    for name, value in hf_tensors(model).items():
        assert torch.allclose(found[name], value, atol=1e-6), name


def test_a22_many_small_files_and_an_index_that_says_just_what_they_hold(tmp_path):
    """A tensor larger than the limit gets a file of its own."""
    model = Model()
    found = convert(
        write_legacy(tmp_path / "run", model, tp=2), tmp_path / "out", max_shard_size="10kB"
    )
    assert_equal(found, hf_tensors(model))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert len(weight_files(tmp_path / "out")) > 5


def test_a24_tokenizer_files_are_copied_byte_for_byte(tmp_path):
    """Special ids reach config.json; nothing is invented."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer", 131)
    (tokenizer / "chat_template.jinja").write_text("{{ messages }}")
    (tokenizer / "README.md").write_text("not a tokenizer file")
    source = write_legacy(tmp_path / "run", Model())
    convert(source, tmp_path / "out", tokenizer=tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tokenizer / name).read_bytes()
    assert not (tmp_path / "out" / "README.md").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 130)


def test_a27_overflow_and_underflow_of_a_cast_are_counted_by_name(tmp_path):
    """bf16 holds 70000 and 1e-9, fp16 does not."""
    model = Model(dtype=torch.bfloat16)

    def extreme(state, tp, _pp):
        if tp == 0:
            weight = state["model"]["decoder.layers.1.mlp.linear_fc2.weight"]
            weight[0, 0], weight[0, 1], weight[1, 0] = 70000.0, 1e-9, 1e-9

    source = write_legacy(tmp_path / "run", model, tp=2, edit=extreme)
    found = convert(source, tmp_path / "out", dtype="fp16")
    casts = read_stage(tmp_path / "out", "convert")["casts"]
    name = "model.layers.1.mlp.down_proj.weight"
    assert casts["overflowed"] == {name: 1}
    assert casts["underflowed"][name] == 2
    truth = hf_tensors(model)["model.embed_tokens.weight"].half()
    assert torch.equal(found["model.embed_tokens.weight"], truth)


@pytest.mark.parametrize("version", [0, 1.0])
def test_old_row_orders_of_queries_keys_and_values(tmp_path, version):
    """Checkpoint versions 0 and 1 order the rows of each rank differently."""
    model = Model(groups=12)

    def old(state, _tp, _pp):
        state["checkpoint_version"] = version
        for key, value in state["model"].items():
            if "linear_qkv.weight" in key:
                rows = value.reshape(-1, 3, model.head_dim, model.hidden)
                order = (1, 0, 2, 3) if version == 0 else (0, 2, 1, 3)
                state["model"][key] = rows.permute(order).reshape(value.shape).contiguous()

    source = write_legacy(tmp_path / "run", model, tp=2, edit=old)
    assert_equal(convert(source, tmp_path / "out"), hf_tensors(model))


def test_a_llama_that_transformers_refuses_is_written_under_another_name(tmp_path):
    """transformers' Llama wants hidden to divide by heads; its Mistral does not."""
    from ckpt.validate.hf_run import load_model

    model = Model(hidden=56)
    assert_equal(
        convert(write_legacy(tmp_path / "run", model), tmp_path / "out"), hf_tensors(model)
    )
    assert load_model(tmp_path / "out").config.model_type == "mistral"


def test_conversion_is_the_same_from_both_formats(tmp_path):
    """One model, two formats, equal files."""
    model = variant(Model(), tied=True)
    convert(write_legacy(tmp_path / "a", model, tp=3, pp=2), tmp_path / "one")
    convert(write_torch_dist(tmp_path / "b", model, tp=2), tmp_path / "two")
    assert (tmp_path / "one/model.safetensors").read_bytes() == (
        tmp_path / "two/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("writer", [write_legacy, write_torch_dist])
def test_inspect_says_what_is_there(tmp_path, writer):
    """Sizes, family, parameters and padding without reading a tensor."""
    facts = inspect_directory(writer(tmp_path / "run", Model(), tp=2)).as_dict()
    assert facts["family"] == "llama"
    assert facts["parallelism"]["TP"] == 2
    assert facts["parameters"] == sum(t.numel() for t in hf_tensors(Model()).values())
    assert facts["vocabulary"] == {"size": 131, "stored rows": 160, "padding": 29}


def test_a19_the_tracker_decides_and_incomplete_iterations_are_named(tmp_path):
    """The highest number is not taken when the tracker does not say so."""
    root = write_legacy(tmp_path / "run", Model())
    (root / "iter_0000020").mkdir()
    (root / "iter_0000020" / "half").write_text("")
    facts = inspect_directory(root).as_dict()
    assert facts["iteration"] == 10
    assert "iter_0000020" in " ".join(facts["notes"])
    with pytest.raises(SourceError, match="incomplete"):
        inspect_directory(root, iteration=20)
    with pytest.raises(SourceError, match="no iteration 30"):
        inspect_directory(root, iteration=30)
    (root / "latest_checkpointed_iteration.txt").unlink()
    assert inspect_directory(root).as_dict()["iteration"] == 10
    with pytest.raises(CkptError):
        inspect_directory(tmp_path / "nowhere")
