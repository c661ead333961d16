"""`ckpt convert --reference`: a table of three columns, and a stop where tensors decide."""

from __future__ import annotations

import json
import shutil

import pytest
from builders import Model, hf_config, hf_tensors, write_legacy, write_tokenizer
from click.testing import CliRunner
from safetensors.torch import load_file
from tiny_megatron import Ranks, TinyModel
from tiny_megatron import write_legacy as write_experts

from ckpt.cli import main
from ckpt.config import ConvertOptions, load_pipeline
from ckpt.convert import convert_checkpoint, plan_conversion, plan_with_proof
from ckpt.convert.staging import stage_path
from ckpt.errors import FamilyError, OptionsError
from ckpt.manifest import read_stage

MODEL = Model()
SAME = {
    **hf_config(MODEL), "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rope_scaling": None,
    "initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
}  # fmt: skip


@pytest.fixture
def source(tmp_path):
    return write_legacy(tmp_path / "run", MODEL, tp=2)


def reference(place, drop=(), **changes):
    """A config.json; the same model but for the changes."""
    place.mkdir(exist_ok=True)
    config = {key: value for key, value in {**SAME, **changes}.items() if key not in drop}
    (place / "config.json").write_text(json.dumps(config))
    return place / "config.json"


def planned(source, file, **options):
    return plan_conversion(source, ConvertOptions(reference=file, **options))


def rows(conversion):
    return {row.key: row for row in conversion.reference.rows}


def test_the_same_model_gives_a_table_without_warnings(tmp_path, source):
    """Every key of both sides is in it."""
    conversion = planned(source, reference(tmp_path / "ref"))
    found = rows(conversion)
    plain = planned(source, None)
    assert conversion.reference.notes == ()
    assert conversion.config == plain.config
    unsaid = {"dtype", "torch_dtype", "bos_token_id", "eos_token_id"}
    assert {*plain.config, *SAME} - unsaid <= {*found}
    assert found["hidden_size"].values == {"reference": 60, "checkpoint": 60, "written": 60}
    assert found["hidden_size"].mark == "same"
    assert found["rope_theta"].mark == "same"
    assert found["transformers_version"].mark == "only here"


def test_a25_the_table_is_printed_and_stands_in_plan_report_and_manifest(tmp_path, source):
    file = reference(tmp_path / "ref", rope_theta=10000, max_position_embeddings=8192)
    done = CliRunner().invoke(
        main, ["convert", str(source), str(tmp_path / "out"), "--reference", str(file), "--quiet"]
    )
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["key", "reference", "checkpoint", "written", "mark"] in lines
    assert ["rope_theta", "10000", "500000", "500000", "differs"] in lines
    assert ["hidden_size", "60", "60", "60", "same"] in lines
    assert ["transformers_version", '"4.51.0"', "-", "-", "only", "here"] in lines
    note = "rope_theta: the reference says 10000, the checkpoint 500000, 500000 is written"
    assert f"{note} (--set rotary_base=VALUE changes it)" in done.stdout
    section = read_stage(tmp_path / "out", "convert")["reference"]
    assert section["file"] == str(file)
    row = {"key": "rope_theta", "reference": 10000, "checkpoint": 500000, "written": 500000}
    assert {**row, "mark": "differs"} in section["keys"]
    conversion = planned(source, file)
    assert conversion.as_dict()["reference"] == section
    assert "rope_theta" in conversion.as_text()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["rope_theta"], written["max_position_embeddings"]) == (500000, 4096)


def test_a25_a_set_argument_is_written_and_ends_the_warning(tmp_path, source):
    file = reference(tmp_path / "ref", rope_theta=10000)
    conversion = planned(source, file, overrides=("rotary_base=10000",))
    assert conversion.config["rope_theta"] == 10000
    assert conversion.reference.notes == ()


SIZES = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 12, "head_dim": 5, "intermediate_size": 40,
    "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
}  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
def test_a25_a_conflict_that_tensors_decide_stops_with_both_values(tmp_path, source, key):
    """Exit code 1, one line, nothing written."""
    file = reference(tmp_path / "ref", **{key: SIZES[key]})
    ours = SAME[key]
    with pytest.raises(OptionsError) as raised:
        planned(source, file)
    assert f"{key}: reference {SIZES[key]!r}, checkpoint {ours!r}" in str(raised.value)
    out = tmp_path / "out"
    done = CliRunner().invoke(
        main, ["convert", str(source), str(out), "--reference", str(file), "--quiet"]
    )
    assert done.exit_code == 1
    assert not out.exists()
    assert not stage_path(out).exists()


def test_every_conflict_is_named(tmp_path, source):
    with pytest.raises(OptionsError, match=r"hidden_size: .*; num_hidden_layers: .*and 1 more"):
        planned(source, reference(tmp_path / "ref", **SIZES))


def test_sizes_that_a_reference_leaves_to_its_class_are_no_conflict(tmp_path, source):
    assert planned(source, reference(tmp_path / "ref", drop=("mlp_bias",), head_dim=None))


def test_only_token_ids_and_what_changes_no_answer_are_taken_over(tmp_path, source):
    """The rest is named and left."""
    file = reference(
        tmp_path / "ref", bos_token_id=1, eos_token_id=[2, 130], pad_token_id=None,
        initializer_range=0.006, temperature=0.6, mystery=7, logit_scale=0.5,
    )  # fmt: skip
    conversion = planned(source, file)
    plain = planned(source, None).config
    assert conversion.config == {
        **plain,
        "bos_token_id": 1,
        "eos_token_id": [2, 130],
        "initializer_range": 0.006,
        "temperature": 0.6,
    }
    notes = "\n".join(conversion.notes)
    assert "taken from the reference: initializer_range = 0.006, bos_token_id = 1" in notes
    assert "only in the reference, not taken over: mystery, logit_scale" in notes


def test_rotary_settings_are_compared_in_either_spelling(tmp_path, source):
    """transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling."""
    new = {"rope_type": "default", "rope_theta": 500000.0}
    file = reference(tmp_path / "ref", drop=("rope_theta", "rope_scaling"), rope_parameters=new)
    conversion = planned(source, file)
    assert rows(conversion)["rope_theta"].mark == "same"
    assert rows(conversion)["rope_scaling"].mark == "same"
    scaled = reference(tmp_path / "ref", rope_scaling={"type": "linear", "factor": 4.0})
    notes = planned(source, scaled).reference.notes
    assert notes[0].startswith("rope_scaling: the reference says {'rope_type': 'linear'")
    factor = ("rotary_seq_len_interpolation_factor=4.0",)
    assert planned(source, scaled, overrides=factor).reference.notes == ()


@pytest.mark.parametrize(
    ("option", "said", "known", "expected"),
    [
        (None, 125, True, 125),
        (120, 125, True, 120),
        (None, None, True, 131),
        (None, 125, False, 125),
        (None, None, False, 128),
    ],
    ids=["reference", "option", "args", "reference-alone", "tokenizer"],
)
def test_the_vocabulary_is_the_options_the_references_the_arguments_the_tokenizers(
    tmp_path, option, said, known, expected
):
    """In this order; the padding is cut accordingly."""
    model = Model(args={} if known else {"vocab_size": ...})
    source = write_legacy(tmp_path / "run", model, tp=2)
    tokenizer = write_tokenizer(tmp_path / "tok", 128 if expected == 128 else 100)
    file = reference(tmp_path / "ref", vocab_size=said)
    conversion = planned(source, file, vocab_size=option, tokenizer=tokenizer)
    assert conversion.config["vocab_size"] == expected
    assert conversion.plan.targets[0].spec.shape == (expected, 60)
    if expected == 125 and known:
        assert "vocabulary size 125 taken from the reference, not 131" in conversion.notes


def test_a_vocabulary_larger_than_the_stored_rows_is_refused(tmp_path, source):
    with pytest.raises(OptionsError, match="larger than the stored embedding"):
        planned(source, reference(tmp_path / "ref", vocab_size=161))


def test_the_reference_chooses_the_family(tmp_path, source):
    file = reference(tmp_path / "ref", model_type="mistral", architectures=["MistralForCausalLM"])
    assert planned(source, None).architecture.name == "llama"
    assert planned(source, file).architecture.name == "mistral"
    assert planned(source, file, family="llama").architecture.name == "llama"
    assert plan_with_proof(source, ConvertOptions(reference=file)).proof.lacks == ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("qwen3", "of model_type qwen3: family qwen3 cannot represent this model: qk_norm"),
        ("mamba9", "of model_type mamba9: unknown family 'mamba9'"),
    ],
)
def test_a_family_that_does_not_fit_says_why(tmp_path, source, kind, words):
    with pytest.raises(FamilyError, match=words):
        planned(source, reference(tmp_path / "ref", model_type=kind))


def test_a_name_that_another_family_goes_by_maps_to_it(tmp_path):
    source = write_experts(tmp_path / "run", TinyModel("deepseek"), Ranks(tp=2))
    config = plan_conversion(source, ConvertOptions()).config
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    conversion = planned(source, tmp_path / "config.json")
    assert conversion.config["model_type"] == "deepseek_v3"


def test_a12_a_reference_with_a_further_layer_that_the_checkpoint_lacks_is_said(tmp_path):
    """0 is written, as the tensors say."""
    source = write_experts(tmp_path / "run", TinyModel("deepseek"), Ranks(tp=2))
    config = plan_conversion(source, ConvertOptions()).config
    assert config["num_nextn_predict_layers"] == 0
    config = {**config, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    conversion = planned(source, tmp_path / "config.json")
    assert conversion.config["num_nextn_predict_layers"] == 0
    note = "num_nextn_predict_layers: the reference says 1, the checkpoint 0, 0 is written"
    assert note in conversion.notes


def test_a12_layers_dropped_on_purpose_are_no_conflict(tmp_path):
    source = write_experts(tmp_path / "run", TinyModel("deepseek-mtp"), Ranks(tp=2))
    config = plan_conversion(source, ConvertOptions()).config
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert planned(source, tmp_path / "config.json").reference.notes == ()
    dropped = planned(source, tmp_path / "config.json", mtp="drop")
    assert dropped.config["num_nextn_predict_layers"] == 0
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 2}))
    with pytest.raises(OptionsError, match="num_nextn_predict_layers: reference 2, checkpoint 1"):
        planned(source, tmp_path / "config.json")


def model_directory(place):
    """A reference with everything that lies beside its weights."""
    write_tokenizer(place, 131)
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    reference(place, auto_map=code, eos_token_id=[2, 130])
    others = {
        "chat_template.jinja": "{{ messages }}\r\n",
        "special_tokens_map.json": '{"eos_token":  "<end>"}',
        "generation_config.json": '{"eos_token_id": [2, 130],\n "temperature": 0.6}',
        "configuration_own.py": "raise SystemExit('never run')\n",
        "modeling_own.py": "raise SystemExit('never run')\n",
        "README.md": "not for the model",
        "model.safetensors": "other weights",
    }
    for name, text in others.items():
        (place / name).write_bytes(text.encode())
    return place


def test_a24_files_of_the_reference_are_copied_byte_for_byte(tmp_path, source):
    """Tokenizer, template, generation settings and code; neither its weights nor its README."""
    place = model_directory(tmp_path / "ref")
    out = tmp_path / "out"
    report = convert_checkpoint(source, out, ConvertOptions(reference=place))
    for name in (
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "chat_template.jinja", "generation_config.json", "configuration_own.py",
        "modeling_own.py",
    ):  # fmt: skip
        assert (out / name).read_bytes() == (place / name).read_bytes()
    assert not (out / "README.md").exists()
    config = json.loads((out / "config.json").read_text())
    assert config["eos_token_id"] == [2, 130]
    assert config["bos_token_id"] == 1
    assert config["auto_map"]["AutoModel"] == "modeling_own.OwnModel"
    assert load_file(out / "model.safetensors").keys() == hf_tensors(MODEL).keys()
    assert "no tokenizer" not in report.as_text()
    named = {item["name"] for item in report.section["outputs"]}
    assert {"modeling_own.py", "generation_config.json", "tokenizer.json"} <= named


def test_a24_a_tokenizer_of_the_users_own_comes_before_the_references(tmp_path, source):
    place, own = model_directory(tmp_path / "ref"), write_tokenizer(tmp_path / "own", 120)
    out = tmp_path / "out"
    convert_checkpoint(source, out, ConvertOptions(reference=place, tokenizer=own))
    assert (out / "tokenizer.json").read_bytes() == (own / "tokenizer.json").read_bytes()
    assert (out / "generation_config.json").read_bytes() == (
        place / "generation_config.json"
    ).read_bytes()
    assert not (out / "chat_template.jinja").exists()


def test_a24_code_that_is_not_there_is_not_promised(tmp_path, source):
    place = model_directory(tmp_path / "ref")
    (place / "modeling_own.py").unlink()
    assert "auto_map" not in planned(source, place).config
    without = planned(source, place / "config.json")
    assert any("no tokenizer" in note for note in without.notes)


def test_another_reference_starts_the_conversion_anew(tmp_path, source):
    place = model_directory(tmp_path / "ref")
    before = planned(source, place).fingerprint
    assert planned(source, place).fingerprint == before
    other = shutil.copytree(place, tmp_path / "other")
    assert planned(source, other).fingerprint != before
    (place / "chat_template.jinja").write_text("{{ another }}")
    assert planned(source, place).fingerprint != before


@pytest.mark.parametrize("text", [None, "{", "[]", '{"hidden_size": 60}'])
def test_what_is_no_reference_is_named(tmp_path, source, text):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(OptionsError, match=r"config\.json: .*reference"):
        planned(source, file)


def test_a_pipeline_names_a_reference_beside_itself(tmp_path):
    file = tmp_path / "pipeline.yaml"
    file.write_text("source: {path: run}\noutput: out\nconvert: {reference: models/ref}\n")
    assert load_pipeline(file).convert.reference == tmp_path / "models" / "ref"
