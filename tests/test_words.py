"""What a person reads: each thing once, in whole sentences, with a next step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import Model, write_legacy
from click.testing import CliRunner

from ckpt import cli
from ckpt.cli import main
from ckpt.config import ConvertOptions, ServeOptions, parse_options
from ckpt.convert import convert_checkpoint, plan_conversion
from ckpt.convert.needs import needs_of
from ckpt.errors import OptionsError
from ckpt.progress import Silent
from ckpt.terminal import Terminal, plural

CHECKING = "checking against transformers' model"


@pytest.fixture
def source(tmp_path):
    return write_legacy(tmp_path / "run", Model(), tp=2)


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


class Started(Silent):
    """Remembers what began."""

    def __init__(self):
        self.labels = []

    def start(self, label, total=None, unit="B", *, done=0):
        del total, unit, done
        self.labels.append(label)


@pytest.mark.parametrize("kind", ["device", "fifo", "file"])
def test_an_output_that_is_no_directory_is_said_to_be_none(tmp_path, source, kind):
    """Whatever kind of file it is, and before anything is written."""
    place = Path("/dev/full") if kind == "device" else tmp_path / "out"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "file":
        place.write_text("x")
    done = run("convert", source, place)
    assert done.exit_code == 1
    assert f"error: {place}: the output is not a directory. Choose another one" in done.output


def test_notes_are_printed_once_and_kept_in_the_json(tmp_path, source):
    """Those that progress showed are not in the summary again; the report for machines has all."""
    note = "note: 29 padding rows of the vocabulary left out"
    assert run("convert", source, tmp_path / "a").output.count(note) == 1
    assert run("convert", source, tmp_path / "b", "--quiet").output.count(note) == 1
    done = run("convert", source, tmp_path / "c", "--quiet", "--json")
    assert note.removeprefix("note: ") in json.loads(done.stdout.splitlines()[-1])["notes"]


def test_a_wait_for_the_proof_is_told_and_a_memo_is_not(tmp_path, source):
    """Once for a kind of model; without a memo each run waits, and promises nothing."""
    seen = {}
    for name, cache in (("cold", tmp_path / "c"), ("warm", tmp_path / "c"), ("none", None)):
        progress = Started()
        options = ConvertOptions(cache=cache)
        convert_checkpoint(source, tmp_path / name, options, progress=progress)
        seen[name] = [label for label in progress.labels if label.startswith(CHECKING)]
    assert seen == {"cold": [f"{CHECKING} (once for this kind of model)"], "warm": [],
                    "none": [CHECKING]}  # fmt: skip


def test_work_that_cannot_be_counted_is_shown_without_counts(capsys):
    progress = Terminal()
    progress.start("looking", unit="")
    progress.finish()
    assert capsys.readouterr().err == "looking ...\n"


def test_tensors_larger_than_a_file_may_be_are_counted_in_a_note(source):
    """How many, which is the largest, and its size; none where all fit."""
    planned = plan_conversion(source, ConvertOptions(max_shard_size=20_000))
    specs = [target.spec for target in planned.plan.targets]
    sizes = {spec.name: spec.nbytes for spec in specs if spec.nbytes > 20_000}
    (note,) = [note for note in planned.notes if "--max-shard-size" in note]
    most = max(sizes, key=lambda name: sizes[name])
    assert note.startswith(f"larger than --max-shard-size 20.0 kB: {plural(len(sizes), 'tensor')}")
    assert f"the largest is {most}, {sizes[most] / 1000:.1f} kB" in note
    assert not any("max-shard" in note for note in plan_conversion(source, ConvertOptions()).notes)


def test_a_size_whose_unit_was_forgotten_is_asked_for(tmp_path, source):
    done = run("convert", source, tmp_path / "out", "--max-shard-size", "20")
    assert done.exit_code == 2
    assert "20 bytes; did you mean 20GB? Write 20B if not" in done.output


def test_a_place_is_shown_without_detours_and_a_link_is_not_climbed_wrongly(tmp_path, source):
    """``x/..`` is left out where x is a directory; behind a link it leads elsewhere."""
    planned = plan_conversion(source, ConvertOptions())
    (tmp_path / "deep" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "below")
    plain = needs_of(planned, tmp_path / "deep" / ".." / "out", 1).room.place
    assert str(plain) == str(tmp_path)
    climbed = needs_of(planned, tmp_path / "link" / ".." / "out", 1).room.place
    assert climbed.samefile(tmp_path / "deep")


def test_a_plan_says_what_could_not_be_written(tmp_path, source):
    """A file in the output's path, as one line of the needs and in the JSON."""
    (tmp_path / "file").write_text("x")
    out = tmp_path / "file" / "out"
    done = run("convert", source, out, "--plan")
    reason = f"{tmp_path / 'file'} is not a directory"
    assert f"\noutput: cannot be written: {reason}\n" in done.output
    found = json.loads(run("convert", source, out, "--plan", "--json", "--quiet").stdout)
    assert found["needs"]["disk"]["cannot_write"] == reason


def test_copied_files_are_not_counted_among_the_weights(tmp_path, source):
    """The needs tell them apart, and why more room is needed than is written."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    words = {f"w{number}": number for number in range(100)}
    (tokenizer / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    planned = plan_conversion(source, ConvertOptions(tokenizer=tokenizer))
    found = needs_of(planned, tmp_path / "out", 1)
    assert found.copied_bytes == (tokenizer / "tokenizer.json").stat().st_size
    assert f", {found.copied_bytes / 1000:.1f} kB of copied files\n" in found.as_text()


@pytest.mark.parametrize("command", ["inspect", "validate"])
def test_an_unfinished_output_is_named_as_one(tmp_path, source, command):
    """By its own name and by the name that it waits for, with how many files are finished."""
    stage = tmp_path / ".out.ckpt-partial"
    stage.mkdir()
    (stage / "ckpt-stage.json").write_text("{}")
    (stage / "config.json").write_text("{}")
    for number in (1, 2):
        (stage / f"model-0000{number}-of-00007.safetensors.receipt.json").write_text("{}")
    first = [source] if command == "validate" else []
    for place in (stage, tmp_path / "out"):
        done = run(command, *first, place)
        assert done.exit_code == 1
        assert f"{stage}: unfinished output of ckpt (found 2 of 7 finished files" in done.output
        assert "Run the same convert command again" in done.output


@pytest.mark.parametrize(
    ("arguments", "copy"),
    [
        (["validate", "s3://bucket/run", "model"], "aws s3 sync s3://bucket/run run"),
        (["validate", "run", "gs://b/model"], "gcloud storage rsync -r gs://b/model model"),
        (["serve", "s3://bucket/a/model"], "aws s3 sync s3://bucket/a/model model"),
    ],
)
def test_what_reads_no_store_says_so_before_it_asks_for_a_library(arguments, copy, monkeypatch):
    """The library may be missing: it would not help."""
    monkeypatch.setitem(sys.modules, "fsspec", None)
    done = run(*arguments)
    assert done.exit_code == 1
    assert "files of this machine only, not an object store" in done.output
    assert f"Copy it first: {copy}\n" in done.output


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("s3://b/run", "pip install 'megatron-to-vllm[s3]', or in a clone of ckpt: pip"),
        ("gs://b/run", "pip install '.[gs]'"),
        ("hdfs://host/run", "copy it here first"),
        ("https://host/run", "copy it here first"),
    ],
)  # fmt: skip
def test_a_missing_library_is_named_for_its_own_store(url, wanted, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    done = run("inspect", url)
    assert done.exit_code == 1
    assert wanted in done.output
    assert ("[s3]" in done.output) == url.startswith("s3")


def test_a_pipeline_that_could_not_serve_stops_before_it_converts(tmp_path, source, monkeypatch):
    """An hour of converting must not end in the news that no engine is there."""
    monkeypatch.setattr("ckpt.serve.find_vllm", lambda *_: None)
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"source: {{path: {source}}}\noutput: out\nserve: {{engine: vllm}}\n")
    done = run("run", file)
    assert done.exit_code == 1
    assert "no vLLM is installed" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "expected"),
    [("/a/b", Path("/a/b")), ("0", None), ("OFF", None), ("no", None), ("on", "default"),
     ("", "default")],
)  # fmt: skip
def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path, value, expected):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CKPT_CACHE", value)
    assert cli._cache_root() == (tmp_path / "ckpt" if expected == "default" else expected)


@pytest.mark.parametrize("value", ["relative/place", "/dev/null"])
def test_a_cache_that_is_no_directory_is_refused(monkeypatch, tmp_path, source, value):
    monkeypatch.setenv("CKPT_CACHE", value)
    done = run("convert", source, tmp_path / "out")
    assert done.exit_code == 1
    assert "CKPT_CACHE is no directory" in done.output


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["convert", "/nope", "z"], "Give the run's directory"),
        (["--tokenizer", "/nope"], "Give --tokenizer the directory"),
        (["--reference", "/nope"], "Give --reference a Hugging Face directory"),
        (["engine", "remove", "vllm"], "ckpt engine list shows"),
    ],
)
def test_what_is_not_there_comes_with_a_next_step(tmp_path, source, arguments, hint, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    if arguments[0].startswith("--"):
        arguments = ["convert", source, tmp_path / "out", *arguments]
    done = run(*arguments)
    assert done.exit_code == 1
    assert hint in done.output
    assert "Errno" not in done.output


def test_a_place_behind_a_file_names_the_output_and_the_next_step(tmp_path, source):
    (tmp_path / "file").write_text("x")
    done = run("convert", source, tmp_path / "file" / "out", "--quiet")
    assert done.exit_code == 1
    assert done.output == (
        f"error: {tmp_path}/file/out: cannot write here: a part of its path is a file. "
        "Choose an output whose path leads through directories alone\n"
    )


def test_a_value_of_several_kinds_is_refused_in_one_sentence():
    with pytest.raises(OptionsError) as raised:
        parse_options(ServeOptions, {"tensor_parallel": "mtch"})
    text = "tensor_parallel: must be 'match' or a whole number (found 'mtch')"
    assert str(raised.value) == text


def test_the_library_does_not_warn_of_what_a_kill_leaves(tmp_path):
    """Its watcher is told beforehand; the warning names semaphores that it then removes."""
    program = (
        "import os, signal, multiprocessing as m\n"
        "from ckpt.convert.processes import Processes\n"
        "if __name__ == '__main__':\n"
        "    p = Processes(2, print)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    log = tmp_path / "log"
    with log.open("wb") as stream:
        subprocess.run([sys.executable, "-c", program], stderr=stream, check=False)
    time.sleep(1)
    assert log.read_text() == ""
