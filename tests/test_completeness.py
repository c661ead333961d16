"""A conversion proves before its first byte that it writes the model of its config.json."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from builders import Model, hf_config, hf_tensors, write_legacy
from click.testing import CliRunner
from tiny_megatron import Ranks, TinyModel, expected_hf
from tiny_megatron import write_legacy as write_experts

from ckpt.arch import ARCHITECTURES
from ckpt.cli import main
from ckpt.completeness import compare, further_layers, prove
from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint, plan_with_proof
from ckpt.convert.staging import stage_path
from ckpt.errors import ModelError, PlanError
from ckpt.manifest import read_stage
from ckpt.metamodel import ModelBuilder, build_meta_model

MODEL = Model()
CONFIG = {**hf_config(MODEL), "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
SHAPES = {name: tuple(value.shape) for name, value in hf_tensors(MODEL).items()}
LLAMA = ARCHITECTURES["llama"]
HEAD, UP = "lm_head.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def source(tmp_path):
    return write_legacy(tmp_path / "run", MODEL, tp=2)


@pytest.fixture(scope="module")
def further(tmp_path_factory):
    """A DeepSeek with one layer that predicts a further token."""
    model = TinyModel("deepseek-mtp")
    root = tmp_path_factory.mktemp("mtp")
    return model, write_experts(root / "run", model, Ranks(tp=2))


def renamed(shapes, old, new):
    return {new if name == old else name: shape for name, shape in shapes.items()}


def test_a06_the_right_tensors_are_proved_with_their_count():
    proof = prove(SHAPES, CONFIG, build_meta_model(CONFIG), LLAMA)
    count = sum(value.numel() for value in hf_tensors(MODEL).values())
    assert (proof.tensors, proof.parameters, proof.lacks) == (len(SHAPES), count, "")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({k: v for k, v in SHAPES.items() if k != UP}, f"1 missing: {UP}"),
        ({**SHAPES, "model.mystery.weight": (3, 5)}, "1 unexpected: model.mystery.weight"),
        (renamed(SHAPES, UP, UP + "0"), f"1 missing: {UP}; 1 unexpected: {UP}0"),
        ({**SHAPES, UP: (35, 60)}, f"{UP} (expected [36, 60], found [35, 60])"),
        ({**SHAPES, UP: (60, 36)}, f"{UP} (expected [36, 60], found [60, 36])"),
        ({k: v for k, v in SHAPES.items() if ".mlp." not in k}, "mlp.up_proj.weight and 1 more"),
    ],
    ids=["missing", "unexpected", "renamed", "shape", "transposed", "many"],
)
def test_a06_a20_any_difference_is_an_error_with_a_short_diff(found, words):
    """Names and both shapes, the first eight of each kind, and the counts."""
    with pytest.raises(PlanError) as raised:
        prove(found, CONFIG, build_meta_model(CONFIG), LLAMA)
    assert words in str(raised.value)
    assert str(raised.value.expected).endswith("parameters")


def test_a06_a20_an_argument_that_the_tensors_deny_stops_before_the_first_byte(tmp_path, source):
    """--set makes config.json say a size that no tensor has: nothing is written."""
    options = ConvertOptions(overrides=("ffn_hidden_size=40",))
    with pytest.raises(PlanError, match=r"9 of another shape.*expected \[40, 60\]"):
        convert_checkpoint(source, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
    assert not stage_path(tmp_path / "out").exists()
    with pytest.raises(PlanError, match="of another shape"):
        plan_with_proof(source, options)


def test_the_manifest_and_the_plan_say_what_was_proved(tmp_path, source):
    import transformers

    convert_checkpoint(source, tmp_path / "out", ConvertOptions())
    proof = read_stage(tmp_path / "out", "convert")["proof"]
    assert proof == {
        "proved": True,
        "class": "LlamaForCausalLM",
        "transformers": transformers.__version__,
        "what": ["names", "shapes", "parameter count"],
        "tensors": len(SHAPES),
        "parameters": sum(value.numel() for value in hf_tensors(MODEL).values()),
        "tensors_by_the_table": 0,
        "built": "now",
    }
    planned = plan_with_proof(source, ConvertOptions())
    assert planned.as_dict()["proof"] == proof
    assert "proved: names, shapes and parameter count are those of LlamaF" in planned.as_text()


def test_a12_layers_that_predict_further_tokens_follow_from_the_table(tmp_path, further):
    """transformers does not build them; each of their tensors is expected by name and shape."""
    model, source = further
    planned = plan_with_proof(source, ConvertOptions())
    truth = expected_hf(model)
    layer = f"model.layers.{model.values.num_layers}."
    found = {name: tuple(value.shape) for name, value in truth.items()}
    inside = {name for name in found if name.startswith(layer)}
    assert planned.proof.further_tensors == len(inside) > 10
    meta = build_meta_model(planned.config)
    expected = further_layers(planned.architecture, planned.config, meta.stored)
    assert expected == {name: found[name] for name in inside}
    for gone in (layer + "eh_proj.weight", layer + "mlp.experts.1.up_proj.weight"):
        less = {name: shape for name, shape in found.items() if name != gone}
        with pytest.raises(PlanError, match=f"1 missing: {gone}"):
            prove(less, planned.config, meta, planned.architecture)
    beside = {**found, layer + "other.weight": (3,)}
    with pytest.raises(PlanError, match=f"1 unexpected: {layer}other"):
        prove(beside, planned.config, meta, planned.architecture)


def test_a12_a_family_may_name_its_further_layer_otherwise():
    """Qwen3-Next's has no number among the decoder's layers."""
    config = {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 12,
        "num_key_value_heads": 2, "vocab_size": 50, "num_experts": 3, "num_experts_per_tok": 2,
        "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
        "num_nextn_predict_layers": 1,
    }  # fmt: skip
    stored = build_meta_model(config).stored
    found = further_layers(ARCHITECTURES["qwen3_next"], config, stored)
    assert found["mtp.fc.weight"] == (40, 80)
    assert found["mtp.pre_fc_norm_hidden.weight"] == found["mtp.norm.weight"] == (40,)
    assert found["mtp.layers.0.self_attn.k_proj.weight"] == (24, 40)
    assert found["mtp.layers.0.mlp.experts.2.down_proj.weight"] == (40, 20)
    assert len(found) == 4 + sum(name.startswith("model.layers.1.") for name in stored)
    assert all(name.startswith("mtp.") for name in found)


def test_a12_dropped_layers_are_not_expected(further):
    _, source = further
    planned = plan_with_proof(source, ConvertOptions(mtp="drop"))
    assert planned.proof.further_tensors == 0
    assert planned.config["num_nextn_predict_layers"] == 0


def test_a_class_that_transformers_lacks_is_said_and_written(tmp_path, source, monkeypatch):
    """Not proved is said in the plan, the report and the manifest, never silently."""
    new = replace(LLAMA, model_class="LlamaNextForCausalLM")
    monkeypatch.setattr("ckpt.convert.choose_architecture", lambda *_: new)
    out = tmp_path / "out"
    report = convert_checkpoint(source, out, ConvertOptions())
    reason = "has no class LlamaNextForCausalLM"
    assert f"note: not proved: transformers {_version()} {reason}" in report.as_text()
    proof = read_stage(out, "convert")["proof"]
    assert proof["proved"] is False
    assert proof["reason"].endswith(reason)
    assert "not proved" in plan_with_proof(source, ConvertOptions()).as_text()


def _version():
    import transformers

    return transformers.__version__


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 0}, "cannot build LlamaForCausalLM"),
        ({"model_type": "qwen3"}, "names a class of another model_type"),
    ],
)
def test_a_config_that_transformers_cannot_build_is_an_error(changes, words):
    with pytest.raises(ModelError, match=words):
        build_meta_model({**CONFIG, **changes})


def test_an_unknown_model_type_is_named():
    meta = build_meta_model({**CONFIG, "model_type": "lama5"})
    assert meta.lacks.endswith("has no model_type lama5")


def run_alone(program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent,
    ).stdout  # fmt: skip


@pytest.mark.slow
def test_a_process_of_its_own_builds_the_same_model():
    """The parent loads neither torch nor transformers; errors and absent classes arrive too."""
    program = (
        "import json, sys\nfrom dataclasses import asdict\n"
        "from ckpt.metamodel import ModelBuilder\nfrom ckpt.errors import ModelError\n"
        "for text in sys.argv[1:]:\n"
        "    with ModelBuilder() as builder:\n"
        "        try:\n            print(json.dumps(asdict(builder.build(json.loads(text)))))\n"
        "        except ModelError as error:\n            print(json.dumps(str(error)))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    broken = {**CONFIG, "num_attention_heads": 0}
    lines = run_alone(program, json.dumps(CONFIG), json.dumps(broken)).splitlines()
    assert json.loads(lines[0]) == json.loads(json.dumps(asdict(build_meta_model(CONFIG))))
    with pytest.raises(ModelError) as raised:
        build_meta_model(broken)
    assert json.loads(lines[1]) == str(raised.value)


def test_a_process_that_cannot_load_transformers_is_no_proof(monkeypatch):
    monkeypatch.setattr("ckpt.metamodel._LOADED", "no.such.module")
    monkeypatch.setattr("ckpt.metamodel._PROGRAM", "import sys; sys.exit('no memory left')")
    with ModelBuilder() as builder:
        assert builder.build(CONFIG).lacks == "transformers cannot be loaded: no memory left"


def test_a_builder_that_is_not_asked_leaves_no_process(monkeypatch):
    monkeypatch.setattr("ckpt.metamodel._LOADED", "no.such.module")
    with ModelBuilder() as builder:
        child = builder._child
        assert child.poll() is None
    assert child.returncode is not None


def test_the_command_line_prints_the_proof(source, tmp_path):
    done = CliRunner().invoke(main, ["convert", str(source), str(tmp_path / "out"), "--plan"])
    assert "\nproved: names, shapes and parameter count are those of LlamaForCausalLM\n" in (
        done.stdout
    )


def test_differences_are_listed_in_full_for_machines():
    found = compare({"a": (2, 3), "b": (5,)}, {"a": (3, 2), "c": (7,)})
    assert found.as_dict() == {
        "missing": ["b"],
        "unexpected": ["c"],
        "shapes": [{"name": "a", "expected": [2, 3], "found": [3, 2]}],
    }
    assert not compare({"a": (2,)}, {"a": (2,)})
