"""The command line: results on stdout, one line on stderr, exit codes, and no traceback."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builders import Model, hf_tensors, write_legacy, write_tokenizer, write_torch_dist
from click.testing import CliRunner

import ckpt
from ckpt.cli import main

COUNT = sum(value.numel() for value in hf_tensors(Model()).values())


def run(*arguments):
    """The command in this process; click before 8.2 mixes the streams unless told not to."""
    mixes = "mix_stderr" in inspect.signature(CliRunner).parameters
    runner = CliRunner(mix_stderr=False) if mixes else CliRunner()
    return runner.invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def source(tmp_path):
    return write_legacy(tmp_path / "run", Model(), tp=2)


def test_convert_prints_one_summary_and_its_notes(tmp_path, source):
    done = run("convert", source, tmp_path / "out", "--quiet")
    assert done.exit_code == 0
    assert done.stderr == ""
    text = re.sub(r"\d+\.\d s$", "0.0 s", done.stdout, count=1, flags=re.MULTILINE)
    size = f"{COUNT:,} parameters, {4 * COUNT:,} bytes in 2 files, 0.0 s"
    assert text.splitlines() == [
        f"wrote {tmp_path}/out: LlamaForCausalLM, {size}",
        "  note: iteration 10, which latest_checkpointed_iteration.txt names",
        "  note: 29 padding rows of the vocabulary left out",
        (
            "  note: no tokenizer: text requests will fail, and config.json names no begin and "
            "end of text; give one with --tokenizer"
        ),
    ]


def test_progress_goes_to_stderr_and_results_to_stdout(tmp_path, source):
    done = run("convert", source, tmp_path / "out", "--json")
    *shards, report = map(json.loads, done.stdout.splitlines())
    assert [(shard["event"], shard["name"]) for shard in shards] == [("shard", "model.safetensors")]
    assert report["event"] == "converted"
    assert report["output"] == str(tmp_path / "out")
    assert report["model"]["parameters"] == COUNT
    assert "writing weights" in done.stderr


def test_a_plan_is_printed_and_nothing_is_written(tmp_path, source):
    before = sorted(path.name for path in tmp_path.iterdir())
    done = run("convert", source, tmp_path / "out", "--plan", "--dtype", "fp16")
    assert done.exit_code == 0
    assert f"target: LlamaForCausalLM, {COUNT:,} parameters" in done.stdout
    assert "model.norm.weight  F16 [60] | cast to F16" in done.stdout
    as_json = json.loads(run("convert", source, tmp_path / "out", "--plan", "--json").stdout)
    assert as_json["parameters"] == COUNT
    assert as_json["files"][0]["name"] == "model.safetensors"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_inspect_prints_one_fact_a_line(source):
    done = run("inspect", source)
    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in done.stdout.splitlines()[:3])
    assert facts["format"] == "torch"
    assert facts["iteration"] == "10"
    assert json.loads(run("inspect", source, "--json").stdout)["family"] == "llama"


def test_inspect_says_what_a_converted_model_is_and_whether_it_is_finished(tmp_path, source):
    run("convert", source, tmp_path / "out", "--max-shard-size", "20kB")
    facts = json.loads(run("inspect", tmp_path / "out", "--json").stdout)
    assert facts["format"] == "huggingface"
    assert facts["parameters"] == COUNT
    assert facts["ckpt-manifest.json"] == "convert"
    (tmp_path / "out" / "ckpt-manifest.json").unlink()
    facts = json.loads(run("inspect", tmp_path / "out", "--json").stdout)
    assert "not a finished output" in facts["ckpt-manifest.json"]


def test_a06_a22_inspect_refuses_a_model_whose_index_lies(tmp_path, source):
    out = tmp_path / "out"
    run("convert", source, out, "--max-shard-size", "20kB")
    next(iter(out.glob("*.safetensors"))).unlink()
    done = run("inspect", out)
    assert done.exit_code == 1
    assert "index and files disagree" in done.stderr


def test_every_option_reaches_the_conversion(tmp_path, source):
    tokenizer = write_tokenizer(tmp_path / "tok", 140)
    done = run(
        "convert", source, tmp_path / "out", "--iteration", "10", "--dtype", "bf16",
        "--max-shard-size", "20kB", "--tokenizer", tokenizer, "--family", "mistral",
        "--vocab-size", "150", "--set", "rotary_base=7000", "--set", "norm_epsilon=1e-4",
        "--mtp", "drop", "--overwrite", "--quiet",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"
    assert config["vocab_size"] == 150
    assert config["rope_theta"] == 7000
    assert config["rms_norm_eps"] == 1e-4
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "nonsense"], "--set needs NAME=VALUE"),
        (["--set", "num_layers=many"], "num_layers"),
        (["--family", "lama"], "Did you mean llama? Known"),
        (["--vocab-size", "999"], "larger than the stored embedding"),
        (["--tokenizer", "/nowhere"], "no such tokenizer directory"),
        (["--iteration", "77"], "Complete iterations: 10"),
    ],
)
def test_a_known_error_is_one_line_with_exit_code_1(tmp_path, source, arguments, words):
    done = run("convert", source, tmp_path / "out", *arguments)
    assert done.exit_code == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert not (tmp_path / "out").exists()


def test_errors_are_facts_with_json(tmp_path):
    done = run("inspect", tmp_path / "absent", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {
        "event": "error",
        "error": "SourceError",
        "message": "no such directory",
        "file": str(tmp_path / "absent"),
        "hint": "Give the run's directory, with its tracker file, or one iteration's",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert"],
        ["convert", "a"],
        ["convert", "a", "b", "--dtype", "int8"],
        ["convert", "a", "b", "--max-shard-size", "big"],
        ["convert", "a", "b", "--iteration", "newest"],
        ["convert", "a", "b", "--vocab-size", "0"],
        ["convert", "a", "b", "--unknown"],
        ["destroy"],
    ],
    ids=" ".join,
)
def test_wrong_usage_has_exit_code_2(arguments):
    done = run(*arguments)
    assert done.exit_code == 2
    assert "Error:" in done.stderr


def test_a_bug_of_ours_is_one_line_and_a_log_ready_to_paste(tmp_path, monkeypatch, scratch):
    def broken(*_values, **_options):
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("ckpt.inspection.inspect_directory", broken)
    done = run("inspect", tmp_path)
    assert done.exit_code == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("bug in ckpt: ZeroDivisionError: by nothing; details in ")
    log = Path(line.rsplit(" ", 1)[1])
    assert log.parent == scratch
    content = log.read_text()
    assert f"ckpt {ckpt.__version__}" in content
    assert "Traceback" in content


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_interrupt_is_said_with_exit_code_130(tmp_path, monkeypatch, wrapped):
    """Python before 3.12 raises a RuntimeError over one that comes while a class is made."""

    def interrupted(*_values, **_options):
        if wrapped:
            raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()
        raise KeyboardInterrupt

    monkeypatch.setattr("ckpt.inspection.inspect_directory", interrupted)
    done = run("inspect", tmp_path)
    assert done.exit_code == 130
    assert done.stderr.strip() == "interrupted"


def test_the_program_runs_as_a_module_and_says_its_version(tmp_path):
    def start(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "ckpt", *map(str, arguments)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert start("--version").stdout.strip() == f"ckpt, version {ckpt.__version__}"
    source = write_torch_dist(tmp_path / "run", Model(), tp=2)
    done = start("convert", source, tmp_path / "out", "--json", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout.splitlines()[-1])["model"]["parameters"] == COUNT
    again = start("convert", source, tmp_path / "out")
    assert again.returncode == 1
    assert again.stderr.splitlines()[-1].startswith("error: ")
    assert "--overwrite" in again.stderr


def test_a_reader_that_stops_reading_is_no_bug(tmp_path, source):
    """As in ``ckpt convert ... --plan | head -1``."""
    command = f"{sys.executable} -m ckpt convert {source} {tmp_path}/out --plan | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)  # noqa: S607
    assert done.stdout.startswith("source: ")
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr
