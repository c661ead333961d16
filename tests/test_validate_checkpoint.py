"""The stage: which reference is taken, what is refused, and what the manifest then says."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace

import builders
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from ckpt import validate
from ckpt.cli import main
from ckpt.config import ConvertOptions, ValidateOptions
from ckpt.convert import convert_checkpoint
from ckpt.errors import EXIT_FAILED, ModelError, ValidationError
from ckpt.manifest import read_stage
from ckpt.progress import Silent
from ckpt.shards import REFERENCE_FILE
from ckpt.sources import locate
from ckpt.validate import validate_checkpoint, validation_is_current
from ckpt.validate.hf_run import run_hf
from ckpt.validate.megatron_run import input_ids, megatron_version
from ckpt.validate.recorded import REFERENCE_NAME, Reference, read_reference, write_reference

MODEL = builders.Model()


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """A checkpoint, its conversion, and what a model of the true tensors answers."""
    root = tmp_path_factory.mktemp("truth")
    builders.write_legacy(root / "run", MODEL, tp=2, pp=2)
    convert_checkpoint(root / "run", root / "out", ConvertOptions())
    truth = root / "truth"
    truth.mkdir()
    shutil.copyfile(root / "out" / "config.json", truth / "config.json")
    tensors = builders.hf_tensors(MODEL)
    save_file(tensors, truth / "model.safetensors", metadata={"format": "pt"})
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, MODEL.vocab, (3, 80), generator=generator)
    return root, Reference(ids, run_hf(truth, ids, Silent()).logits, dtype="float32")


@pytest.fixture
def place(truth, tmp_path):
    """Copies that a test may change: (run, out, reference)."""
    root, reference = truth
    for name in ("run", "out"):
        shutil.copytree(root / name, tmp_path / name)
    return tmp_path / "run", tmp_path / "out", reference


def verdict_of(out):
    section = read_stage(out, "validate")
    assert section is not None
    return section


def spoil(out):
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def test_a_right_conversion_passes_and_the_manifest_says_so(place):
    run, out, reference = place
    write_reference(run / "iter_0000010", reference)
    report = validate_checkpoint(run, out, ValidateOptions())
    assert report.passed
    assert report.agreement.max_abs_diff < 1e-5
    section = verdict_of(out)
    assert section["verdict"] == "passed"
    assert section["text"] == report.as_text()
    assert section["figures"]["positions"] == 240
    assert read_stage(out, "convert") is not None


def test_a_failed_verdict_is_recorded_too(place):
    run, out, reference = place
    write_reference(run / "iter_0000010", reference)
    spoil(out)
    assert not validate_checkpoint(run, out, ValidateOptions()).passed
    assert verdict_of(out)["verdict"] == "failed"
    assert not validation_is_current(run, out, ValidateOptions())


def test_it_is_current_until_something_changes(place):
    run, out, reference = place
    file = write_reference(run / "iter_0000010", reference)
    options = ValidateOptions()
    assert not validation_is_current(run, out, options)
    validate_checkpoint(run, out, options)
    assert validation_is_current(run, out, options)
    assert not validation_is_current(run, out, replace(options, min_cosine=0.99))
    file.write_bytes(file.read_bytes())
    assert not validation_is_current(run, out, options)


def test_a_directory_that_ckpt_did_not_write_is_checked_and_left_alone(place):
    run, out, reference = place
    write_reference(run / "iter_0000010", reference)
    (out / "ckpt-manifest.json").unlink()
    before = sorted(out.rglob("*"))
    assert validate_checkpoint(run, out, ValidateOptions()).passed
    assert sorted(out.rglob("*")) == before


def test_the_reference_is_kept_for_serving_in_small(place, tmp_path):
    run, out, reference = place
    (tmp_path / "elsewhere").mkdir()
    write_reference(tmp_path / "elsewhere", reference)
    options = ValidateOptions(recorded=tmp_path / "elsewhere")
    validate_checkpoint(run, out, options)
    kept = read_reference(out / REFERENCE_FILE)
    assert kept.logits.shape == (3, 64, MODEL.vocab)
    assert torch.equal(kept.logits, reference.logits[:, :64])
    assert (kept.dtype, kept.iteration) == ("float32", "10")


def test_a_kept_reference_is_replaced_by_the_one_used_last(place, tmp_path):
    run, out, reference = place
    for number, logits in enumerate([reference.logits * 3, reference.logits]):
        write_reference(tmp_path / str(number), replace(reference, logits=logits))
    bad, good = (ValidateOptions(recorded=tmp_path / number) for number in "01")
    assert not validate_checkpoint(run, out, bad).passed
    assert validate_checkpoint(run, out, good).passed
    assert torch.equal(read_reference(out / REFERENCE_FILE).logits, reference.logits[:, :64])


def test_one_that_came_along_with_the_conversion_stays(truth, tmp_path):
    """The manifest holds its size and digest."""
    root, reference = truth
    shutil.copytree(root / "run", tmp_path / "run")
    write_reference(tmp_path / "run" / "iter_0000010", reference)
    convert_checkpoint(tmp_path / "run", tmp_path / "out", ConvertOptions())
    before = (tmp_path / "out" / REFERENCE_FILE).read_bytes()
    assert validate_checkpoint(tmp_path / "run", tmp_path / "out", ValidateOptions()).passed
    assert (tmp_path / "out" / REFERENCE_FILE).read_bytes() == before


def test_bf16_weights_are_judged_in_fp32(tmp_path):
    """Both sides hold the same bf16 numbers; the verdict is not blurred by rounding."""
    model = replace(MODEL, dtype=torch.bfloat16)
    builders.write_legacy(tmp_path / "run", model, tp=2)
    convert_checkpoint(tmp_path / "run", tmp_path / "out", ConvertOptions())
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype.itemsize == 2
    ids = torch.randint(0, MODEL.vocab, (2, 40), generator=torch.Generator().manual_seed(3))
    answer = run_hf(tmp_path / "out", ids, Silent())
    assert answer.logits.dtype == torch.float32
    rounded = Reference(ids, answer.logits.bfloat16(), answer.hidden, dtype="bfloat16")
    write_reference(tmp_path / "run" / "iter_0000010", rounded)
    options = ValidateOptions(reference="recorded")
    report = validate_checkpoint(tmp_path / "run", tmp_path / "out", options)
    assert not report.passed
    assert "half precision" in report.likely_fault()
    assert "bfloat16" in report.as_text()
    wide = replace(options, max_abs_diff=0.2)
    assert validate_checkpoint(tmp_path / "run", tmp_path / "out", wide).passed


def test_without_a_reference_both_ways_are_named(place, monkeypatch):
    run, out, _ = place
    monkeypatch.setattr("ckpt.validate.megatron_run.megatron_version", lambda _python: None)
    with pytest.raises(ValidationError) as caught:
        validate_checkpoint(run, out, ValidateOptions())
    assert "record_reference" in str(caught.value)
    assert "[megatron]" in str(caught.value)
    with pytest.raises(ValidationError, match="no recorded logits"):
        validate_checkpoint(run, out, ValidateOptions(reference="recorded"))


def test_auto_runs_the_original_again_rather_than_take_half_precision(place, monkeypatch):
    """And takes it where nothing better can be had, or where it was named."""
    run, out, reference = place
    file = write_reference(run / "iter_0000010", replace(reference, dtype="bfloat16"))
    live = replace(reference, origin="live")
    monkeypatch.setattr(validate, "run_megatron", lambda *_: live)
    monkeypatch.setattr(validate, "can_run_megatron", lambda *_: True)
    assert validate_checkpoint(run, out, ValidateOptions()).origin == "live"
    named = ValidateOptions(recorded=file)
    assert validate_checkpoint(run, out, named).origin.startswith("recorded")
    monkeypatch.setattr(validate, "can_run_megatron", lambda *_: False)
    assert validate_checkpoint(run, out, ValidateOptions()).origin.startswith("recorded")


def test_the_same_directory_on_both_sides_is_refused(place):
    run, _, _ = place
    with pytest.raises(ValidationError, match="same directory"):
        validate_checkpoint(run, run / ".." / run.name, ValidateOptions())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: replace(r, logits=r.logits[..., :100]), "fewer columns"),
        (lambda r: replace(r, logits=torch.zeros_like(r.logits)), "constant"),
        (lambda r: replace(r, input_ids=r.input_ids[:, :1], logits=r.logits[:, :1]), "too few"),
        (lambda r: replace(r, input_ids=r.input_ids[:0], logits=r.logits[:0]), "no token ids"),
        (lambda r: replace(r, input_ids=r.input_ids + 100), "outside"),
        (lambda r: replace(r, input_ids=r.input_ids * 0), "one token"),
        (lambda r: replace(r, iteration="11"), "another iteration"),
    ],
)
def test_references_that_prove_nothing_are_refused(place, change, message):
    run, out, reference = place
    write_reference(run / "iter_0000010", change(reference))
    with pytest.raises(ValidationError, match=message):
        validate_checkpoint(run, out, ValidateOptions())
    assert read_stage(out, "validate") is None


def test_nan_in_a_recorded_file_is_refused(place):
    run, out, reference = place
    logits = reference.logits.clone()
    logits[1, 2, 3] = torch.nan
    tensors = {"input_ids": reference.input_ids, "logits": logits}
    save_file(tensors, run / "iter_0000010" / REFERENCE_NAME)
    with pytest.raises(ValidationError, match="NaN"):
        validate_checkpoint(run, out, ValidateOptions())


def test_a_reference_longer_than_the_context_is_refused(place):
    run, out, reference = place
    write_reference(run / "iter_0000010", reference)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    with pytest.raises(ValidationError, match="longer"):
        validate_checkpoint(run, out, ValidateOptions())


@pytest.mark.parametrize("content", [None, "[]", "{", "{}"])
def test_a_directory_without_a_models_config_is_refused(place, content):
    run, out, reference = place
    write_reference(run / "iter_0000010", reference)
    (out / "config.json").unlink()
    if content is not None:
        (out / "config.json").write_text(content)
    with pytest.raises(ModelError):
        validate_checkpoint(run, out, ValidateOptions())


def test_a_cut_off_weight_file_is_a_known_error(place):
    run, out, reference = place
    write_reference(run / "iter_0000010", reference)
    file = out / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ModelError, match="cannot load"):
        validate_checkpoint(run, out, ValidateOptions())


def test_a_python_that_is_not_there_is_a_known_error(tmp_path):
    with pytest.raises(ValidationError, match="cannot start"):
        megatron_version(tmp_path / "python")


def test_a_python_without_megatron_is_told(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    program.chmod(0o755)
    assert megatron_version(program) is None


@pytest.mark.parametrize(
    ("version", "runs"),
    [(None, False), ("0.15.3", False), ("0.16.0rc1", True), ("1.0", True), ("from source", True)],
)
def test_only_a_recent_megatron_is_the_reference(place, monkeypatch, version, runs):
    """Newer ones read older checkpoints, so nothing is lost."""
    from ckpt.validate import megatron_run

    run, out, _ = place
    monkeypatch.setattr(megatron_run, "megatron_version", lambda _python: version)
    assert megatron_run.can_run_megatron(locate(run), None) is runs
    if not runs:
        with pytest.raises(ValidationError, match=r"too old|not installed"):
            validate_checkpoint(run, out, ValidateOptions(reference="megatron"))


@pytest.mark.parametrize(
    ("longest", "shape"), [(4096, (2, 512)), (128, (4, 128)), (300, (2, 300)), (None, (2, 512))]
)
def test_token_ids_are_long_and_reach_both_ends_of_the_vocabulary(tmp_path, longest, shape):
    config = {"vocab_size": 131, "max_position_embeddings": longest}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = input_ids(tmp_path, 512)
    assert ids.shape == shape
    assert {0, 130} <= set(ids.flatten().tolist())
    assert torch.equal(ids, input_ids(tmp_path, 512))


def test_a_tokenizer_adds_a_row_of_text(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {chr(code): at for at, code in enumerate(range(32, 122))}
    tokenizer = Tokenizer(models.WordLevel(letters, " "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 131}))
    ids = input_ids(tmp_path, 512)
    assert ids.shape == (3, 512)
    assert ids[2, :3].tolist() == [letters[letter] for letter in "The"]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValidationError, match="not a tokenizer"):
        input_ids(tmp_path, 512)


def test_the_command_prints_the_report_and_its_exit_code_is_the_verdict(place):
    run, out, reference = place
    write_reference(run / "iter_0000010", reference)
    good = CliRunner().invoke(main, ["validate", str(run), str(out)])
    assert good.exit_code == 0, good.output
    assert good.stdout.startswith("validation passed: 240 positions in fp32")
    spoil(out)
    bad = CliRunner().invoke(main, ["validate", str(run), str(out), "--json", "--quiet"])
    assert bad.exit_code == EXIT_FAILED
    content = json.loads(bad.stdout)
    assert content["verdict"] == "failed"
    assert content["figures"]["max_abs_diff"] > 1e-3
