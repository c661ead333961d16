"""`ckpt inspect --check`: any Hugging Face directory against its index and its config.json."""

from __future__ import annotations

import inspect
import json
import shutil

import pytest
import torch
from builders import Model, write_legacy
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from ckpt.cli import main
from ckpt.errors import ModelError
from ckpt.model_check import check_model

SMALL = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 6, "intermediate_size": 36, "vocab_size": 50, "max_position_embeddings": 32,
    "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "num_experts_per_tok": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "phi3": {},
    "olmo2": {},
    "glm4": {},
    "granite": {},
    "starcoder2": {},
    "stablelm": {},
    "nemotron": {},
    "opt": {"ffn_dim": 36, "word_embed_proj_dim": 24},
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 40},
    "gpt_neox": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mixtral": {"num_local_experts": 3},
    "qwen2_moe": {"num_experts": 3},
    "qwen3_moe": {"num_experts": 3},
    "olmoe": {"num_experts": 3},
    "gpt_oss": {"num_local_experts": 3},
    "glm4_moe": {"n_routed_experts": 3, "first_k_dense_replace": 1},
    "deepseek_v2": {"n_routed_experts": 3, "first_k_dense_replace": 1, "q_lora_rank": 12,
                    "kv_lora_rank": 10, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"n_routed_experts": 4, "first_k_dense_replace": 1, "q_lora_rank": 12,
                    "kv_lora_rank": 10, "n_group": 2, "topk_group": 1,
                    "num_nextn_predict_layers": 0},
}  # fmt: skip


def saved(place, family, *, limit="5GB", **changes):
    """A tiny model that transformers built and saved."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**SMALL, **FAMILIES[family], **changes}
    config = AutoConfig.for_model(family.removesuffix("-tied"), **settings)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(place, max_shard_size=limit)
    return place


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("sharded") / "model", "llama", limit="10KB")


def copied(model, place):
    return shutil.copytree(model, place / "copy")


def changed(model, place, change, name="model.safetensors"):
    """A copy of a model in one file, its tensors changed in place."""
    directory = copied(model, place)
    tensors = load_file(directory / name)
    change(tensors)
    save_file(tensors, directory / name, metadata={"format": "pt"})
    return directory


def set_config(directory, **values):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def run(*arguments):
    mixes = "mix_stderr" in inspect.signature(CliRunner).parameters
    runner = CliRunner(mix_stderr=False) if mixes else CliRunner()
    return runner.invoke(main, ["inspect", "--check", *map(str, arguments)])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_whole(tmp_path, family):
    checked = check_model(saved(tmp_path, family, limit="30KB"))
    assert checked.passed, checked.as_text()
    assert checked.facts["tensors"] > 10
    assert not any("not compared" in note for note in checked.notes), checked.notes
    assert checked.facts["transformers"] in checked.as_text()


def test_a06_what_ckpt_writes_is_whole(tmp_path):
    source = write_legacy(tmp_path / "run", Model(tied=True), tp=2)
    done = CliRunner().invoke(main, ["convert", str(source), str(tmp_path / "out"), "--quiet"])
    assert done.exit_code == 0, done.output
    done = run(tmp_path / "out")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1].split() == ["verdict", "whole"]


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "differences"),
    [
        (lambda t: t.pop(UP), {"missing": [UP]}),
        (lambda t: t.update({UP + "0": t.pop(UP)}), {"missing": [UP], "unexpected": [UP + "0"]}),
        (lambda t: t.update(other=torch.ones(5)), {"unexpected": ["other"]}),
        (
            lambda t: t.update({UP: t[UP].T.contiguous()}),
            {"of another shape": [f"{UP}: expected [36, 24], found [24, 36]"]},
        ),
    ],
    ids=["removed", "renamed", "added", "reshaped"],
)
def test_a06_a20_a_changed_tensor_is_named(tmp_path, llama, change, differences):
    """Exit code 1, and its name in the text and in the JSON."""
    directory = changed(llama, tmp_path, change)
    done = run(directory, "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert (report["passed"], report["differences"]) == (False, differences)
    text = run(directory).stdout
    for names in differences.values():
        assert names[0] in text
    assert "not whole" in text


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "mixtral", "deepseek_v3", "gpt_oss"])
def test_a06_every_tensor_of_a_family_is_missed_by_its_name(tmp_path, family):
    """Each one removed in turn."""
    model = saved(tmp_path / "model", family)
    whole = load_file(model / "model.safetensors")
    for number, name in enumerate(whole):
        if number % 5:
            continue
        rest = {key: value for key, value in whole.items() if key != name}
        save_file(rest, model / "model.safetensors")
        assert check_model(model).differences == {"missing": [name]}


def test_a22_an_index_that_lies_is_told_in_every_way(tmp_path, sharded):
    directory = copied(sharded, tmp_path)
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    names = sorted(index["weight_map"])
    places = sorted(set(index["weight_map"].values()))
    assert len(places) > 3
    moved, lost = names[0], names[1]
    before = index["weight_map"][moved]
    index["weight_map"][moved] = next(place for place in places if place != before)
    del index["weight_map"][lost]
    index["weight_map"]["ghost.weight"] = places[0]
    index["metadata"]["total_size"] += 4
    file.write_text(json.dumps(index))
    (directory / "extra.safetensors").write_bytes((directory / places[0]).read_bytes())
    (directory / "consolidated.safetensors").write_bytes(b"another format")
    checked = check_model(directory)
    size = index["metadata"]["total_size"]
    assert checked.differences["index entries in no file"] == [
        f"ghost.weight (the index says {places[0]})"
    ]
    assert checked.differences["index entries of another file"] == [
        f"{moved} in {before}, not in {index['weight_map'][moved]}"
    ]
    assert checked.differences["tensors that the index lacks"][0].startswith(lost)
    assert checked.differences["files that belong to nothing"] == ["extra.safetensors"]
    assert checked.differences["total_size of the index"] == [
        f"{size}, but the tensors have {size - 4} bytes"
    ]
    assert len(checked.differences) == 5
    assert any("consolidated.safetensors" in note for note in checked.notes)


def test_a22_a_file_that_is_gone_or_cut_short_is_named(tmp_path, sharded):
    directory = copied(sharded, tmp_path)
    files = sorted(directory.glob("*.safetensors"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-3])
    checked = check_model(directory)
    assert checked.differences["files missing"] == [files[0].name]
    assert files[1].name in checked.differences["files damaged"][0]
    assert checked.differences["missing"]


def test_a22_a_tensor_in_two_files_is_named(tmp_path, sharded):
    directory = copied(sharded, tmp_path)
    first, second = sorted(directory.glob("*.safetensors"))[:2]
    tensors, name = load_file(second), next(iter(load_file(first)))
    save_file({**tensors, name: load_file(first)[name]}, second)
    twice = check_model(directory).differences["stored twice"]
    assert twice == [f"{name} in {first.name} and {second.name}"]


def test_a06_a_config_of_another_model_is_not_whole(tmp_path, llama):
    directory = copied(llama, tmp_path)
    set_config(directory, num_hidden_layers=3, vocab_size=49)
    checked = check_model(directory)
    assert len(checked.differences["missing"]) == 9
    assert "lm_head.weight: expected [49, 24], found [50, 24]" in checked.as_text()
    assert "and 1 more" in checked.as_text()


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_experts_may_be_fused_or_apart(tmp_path, family):
    """transformers 5 holds them fused; a file that does is taken and said."""
    from transformers import AutoModelForCausalLM

    model = saved(tmp_path / "apart", family)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = load_file(tmp_path / "fused" / "model.safetensors")
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    checked = check_model(tmp_path / "fused")
    assert checked.passed, checked.as_text()
    assert any("fused" in note for note in checked.notes)
    assert not any("fused" in note for note in check_model(model).notes)
    gone = "model.layers.1.mlp.experts.down_proj"
    save_file({k: v for k, v in names.items() if k != gone}, tmp_path / "fused/model.safetensors")
    assert check_model(tmp_path / "fused").differences == {"missing": [gone]}


def test_a_stored_head_that_is_tied_does_no_harm_unless_its_shape_is_wrong(tmp_path):
    model = saved(tmp_path / "model", "llama-tied")
    head = torch.ones(50, 24)
    kept = changed(model, tmp_path, lambda t: t.update({"lm_head.weight": head}))
    checked = check_model(kept)
    assert checked.passed
    assert "1 x copy of a tied tensor" in checked.notes
    wrong = changed(kept, tmp_path / "b", lambda t: t.update({"lm_head.weight": head[:49].clone()}))
    assert check_model(wrong).differences == {"unexpected": ["lm_head.weight"]}


def test_stored_positions_do_no_harm(tmp_path, llama):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    checked = check_model(changed(llama, tmp_path, lambda t: t.update({name: torch.ones(3)})))
    assert checked.passed
    assert "1 x stored positions, which are computed anew" in checked.notes


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_names_may_lack_the_prefix_of_the_model(tmp_path, family):
    """As GPT-2's first files do; what is missing then is still named."""
    model = saved(tmp_path / "model", family)
    start = {"gpt2": "transformer.", "llama": "model."}[family]

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix(start)] = tensors.pop(name)

    directory = changed(model, tmp_path, strip)
    checked = check_model(directory)
    assert checked.passed, checked.as_text()
    assert f"names lack the prefix {start}" in checked.notes
    name = next(name for name in load_file(directory / "model.safetensors") if "norm" in name
                or "ln_f" in name)  # fmt: skip
    less = changed(directory, tmp_path / "less", lambda t: t.pop(name))
    assert check_model(less).differences == {"missing": [start + name]}


def test_what_a_class_passes_over_is_said(tmp_path):
    model = saved(tmp_path / "model", "gpt2")
    name = "transformer.h.0.attn.bias"
    checked = check_model(changed(model, tmp_path, lambda t: t.update({name: torch.ones(3)})))
    assert checked.passed, checked.as_text()
    assert any("GPT2LMHeadModel passes over" in note for note in checked.notes)


def test_a12_further_layers_are_checked_although_transformers_does_not_build_them(tmp_path):
    """The last layer's tensors, its own and two copies must be there; without any, it is said."""
    model = saved(tmp_path / "model", "deepseek_v3")

    def further(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            tensors[name.replace("layers.1.", "layers.2.")] = tensors[name].clone()
        own = {"enorm": (24,), "hnorm": (24,), "shared_head.norm": (24,), "eh_proj": (24, 48),
               "embed_tokens": (50, 24), "shared_head.head": (50, 24)}  # fmt: skip
        for name, shape in own.items():
            tensors[f"model.layers.2.{name}.weight"] = torch.ones(shape)

    set_config(model, num_nextn_predict_layers=1)
    left = check_model(model)
    assert left.passed, left.as_text()
    assert "promises layers that predict further tokens, and none is stored" in left.notes[0]
    directory = changed(model, tmp_path, further)
    assert check_model(directory).notes == ()
    assert check_model(directory).passed, check_model(directory).as_text()
    gone = "model.layers.2.eh_proj.weight"
    less = changed(directory, tmp_path / "less", lambda t: t.pop(gone))
    assert check_model(less).differences == {"missing": [gone]}


def test_a27_element_types_are_reported_beside_what_the_config_says(tmp_path, llama):
    directory = changed(llama, tmp_path, lambda t: t.update({UP: t[UP].half()}))
    set_config(directory, dtype="bfloat16")
    checked = check_model(directory)
    assert checked.passed
    assert checked.facts["dtypes"] == {"F32": 20, "F16": 1}
    assert checked.notes == ("most bytes are float32, config.json says bfloat16",)


def test_a_class_that_transformers_lacks_is_said_and_the_index_still_checked(tmp_path, sharded):
    directory = copied(sharded, tmp_path)
    set_config(directory, architectures=["LlamaNextForCausalLM"])
    checked = check_model(directory)
    assert not checked.passed
    assert not checked.differences
    assert "has no class LlamaNextForCausalLM" in checked.notes[0]
    next(directory.glob("*.safetensors")).unlink()
    assert not check_model(directory).passed


def test_quantized_weights_are_not_compared_and_that_is_said(tmp_path, llama):
    directory = changed(llama, tmp_path, lambda t: t.update({UP + "_scale_inv": torch.ones(1)}))
    set_config(directory, quantization_config={"quant_method": "fp8"})
    assert any("quantized" in note for note in check_model(directory).notes)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "config.json: cannot read"),
        ({"config.json": "[1]"}, "not the settings of a model"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, "found pytorch_model.bin"),
        ({"config.json": "{}", "model.safetensors.index.json": "{}"}, "cannot read the index"),
    ],
)
def test_what_is_no_model_is_one_line(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError) as raised:
        check_model(tmp_path)
    assert words in str(raised.value)
    done = run(tmp_path)
    assert done.exit_code == 1
    assert len(done.stderr.splitlines()) == 1


def test_pickled_weights_beside_are_said_not_to_be_checked(tmp_path, llama):
    directory = copied(llama, tmp_path)
    (directory / "pytorch_model.bin").write_bytes(b"")
    checked = check_model(directory)
    assert checked.passed
    assert "only safetensors are checked, not pytorch_model.bin" in checked.notes
