"""Damaged, hostile and interrupted: one clear line, exit code 1, and nothing that loads."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from builders import (
    WRITERS,
    Item,
    Model,
    foreign_module,
    hf_tensors,
    write_legacy,
    write_tokenizer,
    write_torch_dist,
)
from safetensors.torch import load_file

from ckpt.cli import main
from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint, publish, staging
from ckpt.convert import write as write_module
from ckpt.convert.staging import stage_path
from ckpt.errors import OutputError
from ckpt.manifest import read_stage

REPOSITORY = Path(__file__).parent.parent


def run_ckpt(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "ckpt", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
    )


def run_here(*arguments):
    """The same command in this process, which saves the start of another one."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text), pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code, text.getvalue()


def assert_refused(source, out, *words, alone=False):
    """One line, exit code 1, nothing left; ``alone`` starts a process of its own."""
    arguments = ("convert", source, out, "--quiet")
    if alone:
        done = run_ckpt(*arguments)
        code, text = done.returncode, done.stderr
    else:
        code, text = run_here(*arguments)
    lines = text.strip().splitlines()
    assert code == 1, text
    assert len(lines) == 1, text
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]
    assert not out.exists()
    assert not stage_path(out).exists()


def edited_legacy(root, change):
    def edit(state, _tp, pp):
        if pp == 1:
            change(state["model"])

    return write_legacy(root, Model(), tp=2, pp=2, edit=edit)


@pytest.mark.parametrize("format_", WRITERS)
def test_a20_a_renamed_key_stops_with_both_names(tmp_path, format_):
    """The unknown name comes with the nearest one that is missing."""
    old, new = "linear_proj.weight", "linear_projx.weight"

    def rename(state):
        for key in [key for key in state if old in key][:1]:
            state[key.replace(old, new)] = state.pop(key)

    if format_ == "torch":
        source = edited_legacy(tmp_path / "run", rename)
    else:
        source = write_torch_dist(tmp_path / "run", Model(), tp=2, edit=lambda i, _: rename(i))
    names = ("linear_projx.weight", "self_attention.linear_proj")
    assert_refused(source, tmp_path / "out", *names, alone=True)


@pytest.mark.parametrize("format_", WRITERS)
def test_a20_a_dropped_key_stops_with_its_name(tmp_path, format_):
    """No smaller model is written."""

    def drop(state):
        for key in [key for key in state if "linear_fc2.weight" in key][:1]:
            del state[key]

    if format_ == "torch":
        source = edited_legacy(tmp_path / "run", drop)
    else:
        source = write_torch_dist(tmp_path / "run", Model(), tp=2, edit=lambda i, _: drop(i))
    assert_refused(source, tmp_path / "out", "missing", "mlp.linear_fc2.weight", alone=True)


@pytest.mark.parametrize("format_", WRITERS)
def test_a18_a20_an_added_key_stops_with_its_name(tmp_path, format_):
    """Extra states are skipped by name; an unknown tensor is not."""

    def add(state):
        state["decoder.layers.0.mlp.mystery.weight"] = torch.ones(3)

    def add_item(items, _common):
        items["decoder.layers.0.mlp.mystery.weight"] = Item(
            (3,), torch.float32, {(0,): torch.ones(3)}
        )

    if format_ == "torch":
        source = edited_legacy(tmp_path / "run", add)
    else:
        source = write_torch_dist(tmp_path / "run", Model(), tp=2, edit=add_item)
    assert_refused(source, tmp_path / "out", "mlp.mystery.weight", alone=True)


@pytest.mark.parametrize("format_", WRITERS)
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.98])
def test_a_file_cut_short_stops_with_its_name(tmp_path, format_, kept):
    """However much of it is left."""
    source = WRITERS[format_](tmp_path / "run", Model(), tp=2)
    pattern = "iter_*/mp_rank_01/*.pt" if format_ == "torch" else "iter_*/__1_0.distcp"
    (file,) = source.glob(pattern)
    os.truncate(file, int(file.stat().st_size * kept))
    assert_refused(source, tmp_path / "out", file.name, alone=kept == 0.3)


class Evil:
    """Pickles as a call of any function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def evils(canary):
    command = f"touch {canary}"
    code = f"open({str(canary)!r}, 'w')"
    return {
        "os.system": Evil(os.system, command),
        "eval": Evil(eval, code),
        "exec": Evil(exec, code),
        "Popen": Evil(subprocess.Popen, ["touch", str(canary)]),
        "hub": Evil(torch.hub.load, "x/y", "z"),
        "torch.load": Evil(torch.load, str(canary)),
        "getattr": Evil(getattr, Evil(__import__, "os"), "system"),
        "import": Evil(__import__, "antigravity"),
    }


@pytest.mark.parametrize("place", ["args", "model", "common.pt", ".metadata", "item"])
@pytest.mark.parametrize("kind", list(evils("x")))
def test_a17_a_hostile_pickle_runs_nothing(tmp_path, place, kind):
    """Wherever the pickle lies, one line says what it asked for."""
    canary = tmp_path / "canary"
    evil = evils(canary)[kind]
    if place in {"args", "model"}:

        def edit(state, tp, _pp):
            if tp == 1:
                state[place if place == "args" else "model"] = evil

        source = write_legacy(tmp_path / "run", Model(), tp=2, edit=edit)
    else:
        source = write_torch_dist(tmp_path / "run", Model(), tp=2, edit=hostile(place, evil))
        if place == ".metadata":
            (file,) = source.glob("iter_*/.metadata")
            file.write_bytes(pickle.dumps(evil))
    alone = kind == "os.system"
    assert_refused(source, tmp_path / "out", "no checkpoint needs", alone=alone)
    assert not canary.exists()


def hostile(place, evil):
    def edit(items, common):
        if place == "common.pt":
            common["args"] = evil
        elif place == "item":
            item = items["decoder.final_layernorm.weight"]
            start = next(iter(item.parts))
            item.parts[start] = evil

    return edit


def test_a17_an_unknown_class_is_read_as_a_stub_and_reported(tmp_path):
    """Classes of the training code are no reason to stop, and none of their code runs."""

    class Thing:
        def __init__(self):
            self.size = 3

        def __setstate__(self, state):
            raise AssertionError(state)

    def edit(state, _tp, _pp):
        state["args"].thing = Thing()

    with foreign_module("my_fork.parts", Thing=Thing):
        source = write_legacy(tmp_path / "run", Model(), tp=2, edit=edit)
    done = run_ckpt("convert", source, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "my_fork.parts.Thing" in done.stderr


DRIVER = """
import sys, time
from ckpt.convert import read
from ckpt.cli import main
original = read.fill_window
def slow(*values):
    time.sleep(0.05)
    original(*values)
read.fill_window = slow
main(["convert", sys.argv[1], sys.argv[2], "--max-shard-size", "15kB", "--quiet"])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a23_a_killed_conversion_leaves_no_model_and_the_rerun_ends_in_the_same_bytes(
    tmp_path, number, code
):
    """What was finished is kept, what was not is nowhere to be loaded from."""
    from transformers import AutoModelForCausalLM

    source, out = write_legacy(tmp_path / "run", Model(), tp=2), tmp_path / "out"
    options = ConvertOptions(max_shard_size="15kB")
    convert_checkpoint(source, tmp_path / "undisturbed", options)
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(source), str(out)], cwd=REPOSITORY
    )
    deadline = time.monotonic() + 120
    while len(list(stage_path(out).glob("*.receipt.json"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == code
    assert not out.exists()
    assert not (stage_path(out) / "ckpt-manifest.json").exists()
    for place in (stage_path(out), out):
        with pytest.raises((OSError, ValueError)):
            AutoModelForCausalLM.from_pretrained(place, local_files_only=True)
    kept = {file: file.stat().st_mtime_ns for file in stage_path(out).glob("*.safetensors")}
    assert len(kept) >= 2
    convert_checkpoint(source, out, options)
    assert not stage_path(out).exists()
    again = sorted(file.name for file in out.iterdir())
    assert again == sorted(file.name for file in (tmp_path / "undisturbed").iterdir())
    for name in again:
        if name != "ckpt-manifest.json":
            assert (out / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()
    for file, stamp in kept.items():
        assert (out / file.name).stat().st_mtime_ns == stamp, "a finished file was written again"


def test_a_source_that_changed_since_the_kill_is_converted_anew(tmp_path, monkeypatch):
    """Files of two iterations never meet in one output."""
    source, out = write_legacy(tmp_path / "run", Model(), tp=2), tmp_path / "out"
    options = ConvertOptions(max_shard_size="15kB")
    calls = []

    def broken(*values):
        calls.append(values)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return written(*values)

    written = write_module.LocalFile
    monkeypatch.setattr(write_module, "LocalFile", broken)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, out, options)
    monkeypatch.undo()
    assert len(list(stage_path(out).glob("*.receipt.json"))) == 3
    for file in source.glob("iter_*/*/*.pt"):
        state = torch.load(file, weights_only=False)
        state["model"]["decoder.final_layernorm.weight"].fill_(0.5)
        torch.save(state, file)
    convert_checkpoint(source, out, options)
    values = {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}
    truth = hf_tensors(Model())
    assert torch.equal(values["model.norm.weight"], torch.full((60,), 0.5))
    assert torch.equal(values["model.embed_tokens.weight"], truth["model.embed_tokens.weight"])


def test_a23_a_full_disk_says_so_and_keeps_what_is_finished(tmp_path, monkeypatch):
    """The same command goes on once there is room."""
    source, out = write_legacy(tmp_path / "run", Model(), tp=2), tmp_path / "out"

    def full(*_values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write_module.LocalFile, "write", full)
    with pytest.raises(OutputError, match="the disk is full"):
        convert_checkpoint(source, out, ConvertOptions())
    monkeypatch.undo()
    assert not out.exists()
    convert_checkpoint(source, out, ConvertOptions())
    assert read_stage(out, "convert") is not None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
def test_a23_a_disk_that_is_full_at_the_small_files_says_so_too(tmp_path, monkeypatch, name):
    """The weights are there already; the rerun writes the rest only."""
    source, out = write_legacy(tmp_path / "run", Model(), tp=2), tmp_path / "out"
    tokenizer = write_tokenizer(tmp_path / "tokenizer", 131)
    options = ConvertOptions(max_shard_size="60kB", tokenizer=tokenizer)

    def full(original):
        def refuse(*values, **named):
            if any(Path(value).name.endswith(name) for value in values if isinstance(value, Path)):
                raise OSError(28, "No space left on device")
            return original(*values, **named)

        return refuse

    monkeypatch.setattr("ckpt.convert.staging.write_json", full(staging.write_json))
    monkeypatch.setattr(write_module, "LocalFile", full(write_module.LocalFile))
    with pytest.raises(OutputError, match="the disk is full"):
        convert_checkpoint(source, out, options)
    monkeypatch.undo()
    assert not out.exists()
    assert not (stage_path(out) / "ckpt-manifest.json").exists()
    stamps = {path.name: path.stat().st_mtime_ns for path in stage_path(out).glob("*.safetensors")}
    convert_checkpoint(source, out, options)
    for file, stamp in stamps.items():
        assert (out / file).stat().st_mtime_ns == stamp


@pytest.mark.parametrize("at_once", [True, False], ids=["exchanged", "renamed"])
def test_a_crash_while_outputs_change_places_is_mended_by_the_next_run(
    tmp_path, monkeypatch, at_once
):
    """Where the file system can exchange two names, one of the models is always there."""
    source, out = write_legacy(tmp_path / "run", Model(), tp=2), tmp_path / "out"
    convert_checkpoint(source, out, ConvertOptions())
    rename = Path.rename

    def killed(self, target):
        if self == stage_path(out):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    if not at_once:
        monkeypatch.setattr(publish, "_exchange", lambda *_: False)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, out, ConvertOptions(overwrite=True, dtype="bf16"))
    monkeypatch.undo()
    assert out.exists() == at_once
    old = stage_path(out) if at_once else tmp_path / ".out.ckpt-old"
    assert read_stage(old, "convert")["model"]["dtypes"].keys() == {"F32"}
    convert_checkpoint(source, out, ConvertOptions(overwrite=True, dtype="bf16"))
    assert read_stage(out, "convert")["model"]["dtypes"].keys() == {"BF16"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_too_little_room_stops_before_the_first_byte(tmp_path, monkeypatch):
    """The message has the bytes that are needed."""
    source, out = write_legacy(tmp_path / "run", Model(), tp=2), tmp_path / "out"
    monkeypatch.setattr(
        "ckpt.convert.staging.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})
    )
    with pytest.raises(OutputError, match="not enough room"):
        convert_checkpoint(source, out, ConvertOptions())
    assert not out.exists()
    assert not stage_path(out).exists()


def test_an_existing_output_is_never_replaced_unasked_nor_one_that_is_not_ours(tmp_path):
    """--overwrite replaces outputs of ckpt only."""
    source, out = write_legacy(tmp_path / "run", Model()), tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(OutputError):
            convert_checkpoint(source, out, ConvertOptions(overwrite=overwrite))
    assert (out / "thesis.tex").read_text() == "years of work"
    convert_checkpoint(source, tmp_path / "other", ConvertOptions())
    with pytest.raises(OutputError, match="--overwrite"):
        convert_checkpoint(source, tmp_path / "other", ConvertOptions())
    convert_checkpoint(source, tmp_path / "other", ConvertOptions(overwrite=True, dtype="bf16"))
    assert read_stage(tmp_path / "other", "convert")["model"]["dtypes"].keys() == {"BF16"}
