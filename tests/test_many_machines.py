"""Parts of one conversion, written anywhere and in any order, and what collects them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builders import Model, hf_tensors, write_legacy, write_torch_dist
from converted import assert_equal, read_tensors

from ckpt.config import ConvertOptions
from ckpt.convert import Share, carry, convert_checkpoint, locks, staging
from ckpt.convert.share import finalize_command
from ckpt.convert.staging import stage_path
from ckpt.errors import OutputError, SourceError
from ckpt.manifest import read_stage
from ckpt.progress import Silent

REPOSITORY = Path(__file__).parent.parent
OPTIONS = ConvertOptions(max_shard_size=15_000)
FINALIZE = Share(finalize=True)


class Notes(Silent):
    def __init__(self):
        self.lines, self.started, self.events = [], [], []

    def start(self, label, total=None, unit="B", *, done=0):
        self.started.append((label, total, done))

    def note(self, text):
        self.lines.append(text)

    def event(self, name, facts):
        self.events.append(facts)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_legacy(tmp_path_factory.mktemp("source") / "run", Model(), tp=3)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """What one run writes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    convert_checkpoint(source, out, OPTIONS)
    return read_stage(out, "convert")["outputs"]


def run(source, out, share=None, options=OPTIONS):
    """One run, with what was heard of it."""
    notes = Notes()
    report = convert_checkpoint(
        source, out, options, progress=notes, **({"share": share} if share else {})
    )
    return report, notes


def test_parts_in_any_order_give_the_bytes_of_one_run(tmp_path, source, whole):
    """Each writes files of its own; only the run that finalizes makes an output of them."""
    out, seen, rest = tmp_path / "out", [], len(whole)
    for index in (2, 0, 1):
        report, notes = run(source, out, Share(index, 3))
        names = [written.name for written in report.written]
        assert names == [each["name"] for each in notes.events]
        seen += names
        rest -= len(names)
        assert len(report.lacking) == rest - 2 or not report.lacking  # index and config.json
        assert f"part {index + 1} of 3" in "\n".join(notes.lines)
        assert not out.exists()
    weights = [item["name"] for item in whole if item["name"].startswith("model-")]
    assert sorted(seen) == sorted(n for n in weights if n.endswith(".safetensors"))
    report, notes = run(source, out, FINALIZE)
    assert read_stage(out, "convert")["outputs"] == whole
    assert all(each["resumed"] for each in notes.events)
    assert_equal(read_tensors(out), hf_tensors(Model()))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {p.name for p in out.iterdir()} == {i["name"] for i in whole} | {"ckpt-manifest.json"}


def test_finalize_names_each_file_that_lacks_and_its_part(tmp_path, source, whole):
    """Missing, damaged, and such as belong to nobody; nothing is put in place."""
    out = tmp_path / "out"
    reports = [run(source, out, Share(index, 3))[0] for index in range(3)]
    stage = stage_path(out)
    gone, cut, bare = (report.written[1].name for report in reports)
    (stage / gone).unlink()
    with (stage / cut).open("r+b") as stream:
        stream.truncate(100)
    (stage / f"{bare}.receipt.json").unlink()
    (stage / "model-99999.safetensors").write_bytes(b"")
    with pytest.raises(OutputError) as caught:
        run(source, out, FINALIZE)
    text = str(caught.value)
    assert "parts 1, 2, 3 of 3 lack 3 files (--shard-index 0, 1, 2 with --num-shards 3): 3" in text
    assert "files are not finished, 1 do not belong here" in text
    assert f"{gone} (part 1 of 3: --shard-index 0 --num-shards 3; not there)" in text
    assert f"{cut} (part 2 of 3: --shard-index 1 --num-shards 3; its receipt is of" in text
    assert f"{bare} (part 3 of 3: --shard-index 2 --num-shards 3; no receipt)" in text
    assert "model-99999.safetensors (of no part)" in text
    assert not out.exists()
    (stage / "model-99999.safetensors").unlink()
    for index in range(3):
        again = run(source, out, Share(index, 3))[1]
        assert sum(not each["resumed"] for each in again.events) == 1
    run(source, out, FINALIZE)
    assert read_stage(out, "convert")["outputs"] == whole


def test_finalize_wants_the_parts_of_the_same_conversion(tmp_path, source):
    out = tmp_path / "out"
    with pytest.raises(OutputError, match=r"no finished parts .*found nothing"):
        run(source, out, FINALIZE)
    run(source, out, Share(0, 1 + 1))
    other = ConvertOptions(max_shard_size="15kB", dtype="bf16")
    with pytest.raises(OutputError, match=r"dtype was keep, is bf16.*Give --finalize with the"):
        run(source, out, FINALIZE, other)
    assert list(stage_path(out).glob("*.safetensors"))


def test_a_plain_run_goes_on_where_parts_have_ended(tmp_path, source, whole):
    out = tmp_path / "out"
    written = run(source, out, Share(1, 3))[0].written
    _, notes = run(source, out)
    size = sum(unit.size for unit in written)
    (line,) = [line for line in notes.lines if "kept" in line]
    weights = sum(item["name"].endswith(".safetensors") for item in whole)
    assert line.startswith(f"note: kept {len(written)} of {weights} finished files (")
    assert line.endswith("kB)")
    ((_, total, done),) = [each for each in notes.started if each[0] == "writing weights"]
    assert 0.9 * size < done < size  # without headers
    assert total == sum(value.nbytes for value in hf_tensors(Model()).values())
    assert read_stage(out, "convert")["outputs"] == whole


def test_parts_of_another_number_keep_what_is_finished(tmp_path, source, whole):
    """As when an array of other jobs is started after the first was ended."""
    out = tmp_path / "out"
    first = {written.name for written in run(source, out, Share(1, 3))[0].written}
    kept = set()
    for index in range(5):
        _, notes = run(source, out, Share(index, 5))
        kept |= {each["name"] for each in notes.events if each["resumed"]}
    assert kept == first
    run(source, out, FINALIZE)
    assert read_stage(out, "convert")["outputs"] == whole


@pytest.mark.parametrize("share", [None, Share(1, 2)])
def test_another_number_of_parts_is_said_with_the_way_to_run_one_again(tmp_path, source, share):
    """As where one failed task of an array is submitted again by itself."""
    out = tmp_path / "out"
    assert not [line for line in run(source, out, Share(1, 3))[1].lines if "written in" in line]
    (line,) = [line for line in run(source, out, share)[1].lines if "written in" in line]
    assert line.startswith("note: the unfinished output was written in 3 parts; this is ")
    assert ("part 2 of 2" if share else "a whole run over them") in line
    assert line.endswith("--shard-index I --num-shards 3")


def test_more_parts_than_files_are_no_fault(tmp_path, source):
    out, options = tmp_path / "out", ConvertOptions()
    reports = [run(source, out, Share(index, 4), options)[0] for index in range(4)]
    assert [len(report.written) for report in reports] == [1, 0, 0, 0]
    _, notes = run(source, out, Share(2, 4), options)
    assert "note: part 3 of 4 has no file: 1 file for 4 parts" in notes.lines
    run(source, out, FINALIZE, options)
    assert_equal(read_tensors(out), hf_tensors(Model()))


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """One rank's copy of one norm differs."""

    def spoil(state, tp_rank, _pp_rank):
        if tp_rank == 2:
            state["model"]["decoder.layers.1.input_layernorm.weight"][7] += 1

    return write_legacy(tmp_path_factory.mktemp("spoiled") / "run", Model(), tp=3, edit=spoil)


def test_stored_copies_are_compared_once_by_the_parts_together(tmp_path, source, spoiled):
    """A copy that differs is found by the one part that compares it."""
    said, passed = [], []
    for index in range(4):
        try:
            run(spoiled, tmp_path / "out", Share(index, 4))
            passed.append(index)
        except SourceError as error:
            said.append(str(error))
    assert len(passed) == 3
    assert "two stored copies of this tensor differ" in said[0]
    failed = [index for index in range(4) if index not in passed]
    assert not [
        file for file in stage_path(tmp_path / "out").glob("ckpt-checked-*")
        if f"{failed[0] + 1:05d}-of" in file.name
    ]  # fmt: skip
    compared = []
    for index in range(4):
        _, notes = run(source, tmp_path / "good", Share(index, 4))
        compared += [total for label, total, _ in notes.started if label.startswith("comparing")]
    _, notes = run(source, tmp_path / "one")
    assert sum(compared) == sum(t for label, t, _ in notes.started if label.startswith("comparing"))
    assert max(compared) < sum(compared) / 2
    again = run(source, tmp_path / "good", FINALIZE)[1]
    assert not [label for label, *_ in again.started if label.startswith("comparing")]


def test_finalize_compares_the_copies_that_no_part_has_compared(tmp_path, spoiled, monkeypatch):
    """So that files which another number of parts left prove nothing that was not looked at."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(carry, "compare_copies", lambda *_: {})
        for index in range(4):
            run(spoiled, out, Share(index, 4))
    for file in stage_path(out).glob("ckpt-checked-*"):
        file.unlink()
    with pytest.raises(SourceError, match="two stored copies of this tensor differ"):
        run(spoiled, out, FINALIZE)
    assert not out.exists()


def test_drift_that_parts_have_measured_is_told_by_the_one_that_finalizes(tmp_path, source):
    """The largest of each tensor counts."""
    out = tmp_path / "out"
    for index in range(2):
        run(source, out, Share(index, 2))
    found = {0: {"a.norm": 0.01, "b.norm": 0.03}, 1: {"b.norm": 0.02}}
    staging.record_checks(stage_path(out), 2, found)
    assert staging.recorded_checks(stage_path(out), 2) == found
    _, notes = run(source, out, FINALIZE)
    expected = "2 tensors are the mean of their ranks' copies, which had drifted apart: "
    expected += "by 0.03 of the largest value at most, in b.norm"
    assert f"note: {expected}" in notes.lines
    assert expected in read_stage(out, "convert")["notes"]


CHANGES = {
    "an option": (dict(dtype="bf16"), None, "dtype was keep, is bf16"),
    "a file": ({}, "touch", "changed since: mp_rank_01/model_optim_rng.pt"),
    "a new file": ({}, "add", "new in the source: mp_rank_01/model_optim_rng.pt"),
    "the version": ({}, "version", "ckpt 0.0.1 wrote it, this is "),
    "no state": ({}, "state", "nothing says what it is"),
}


@pytest.mark.parametrize("share", [None, Share(0, 3)])
@pytest.mark.parametrize("change", CHANGES)
def test_what_another_conversion_left_is_removed_by_whole_runs_alone(tmp_path, change, share):
    """With the reason said; a part refuses, and leaves other parts' finished files there."""
    values, what, words = CHANGES[change]
    source, out = write_legacy(tmp_path / "run", Model(), tp=3), tmp_path / "out"
    run(source, out, Share(0, 3))
    left = {path.name for path in stage_path(out).glob("*.safetensors")}
    file, state_file = "mp_rank_01/model_optim_rng.pt", stage_path(out) / "ckpt-stage.json"
    state = {**json.loads(state_file.read_text()), "fingerprint": "another"}
    if what == "touch":
        os.utime(source / "iter_0000010" / file, (1, 1))
    elif what == "state":
        state_file.write_text("[")
    elif what == "version":
        state_file.write_text(json.dumps({**state, "ckpt": "0.0.1"}))
    elif what == "add":
        state["source"]["files"].pop(file)
        state_file.write_text(json.dumps(state))
    options = ConvertOptions(max_shard_size="15kB", **values)
    if share:
        with pytest.raises(OutputError) as caught:
            run(source, out, share, options)
        assert words in str(caught.value)
        assert str(stage_path(out)) in str(caught.value)
        assert "Give the source and options" in str(caught.value)
        assert {path.name for path in stage_path(out).glob("*.safetensors")} == left
        return
    _, notes = run(source, out, share, options)
    (line,) = [line for line in notes.lines if "starting afresh" in line]
    assert line.startswith("note: starting afresh: an unfinished output of another conversion was")
    assert words in line
    assert left
    assert not any(each["resumed"] for each in notes.events)


def test_parts_never_remove_what_other_parts_may_be_writing(tmp_path, source, monkeypatch):
    """They say whose it is; once those have ended, only a whole run starts afresh."""
    monkeypatch.setattr(locks, "_PATIENCE_SECONDS", 0.2)
    out, other = tmp_path / "out", ConvertOptions(max_shard_size="15kB", dtype="bf16")
    run(source, out, Share(0, 3))
    left = sorted(path.name for path in stage_path(out).iterdir())
    with locks.claim(out, Share(2, 3), print):
        for share in (Share(1, 3), Share(0, 2)):
            options = other if share.of == 3 else OPTIONS
            with pytest.raises(OutputError, match=r"are being written.*part 3 of 3: pid"):
                run(source, out, share, options)
        with pytest.raises(OutputError, match=r"another ckpt is writing.*part 3 of 3: pid"):
            run(source, out, None, other)
        with pytest.raises(OutputError, match="another ckpt is writing"):
            run(source, out, FINALIZE)
    assert sorted(path.name for path in stage_path(out).iterdir()) == left
    with pytest.raises(OutputError, match="finished files of another conversion"):
        run(source, out, Share(1, 3), other)
    assert sorted(path.name for path in stage_path(out).iterdir()) == left
    for file in stage_path(out).glob("*.receipt.json"):
        file.unlink()
    _, notes = run(source, out, Share(1, 3), other)
    assert any("starting afresh" in line for line in notes.lines)
    written = {each["name"] for each in notes.events}
    assert {path.name for path in stage_path(out).glob("*.safetensors")} == written


def test_without_locks_parts_refuse_to_remove_and_whole_runs_go_on(tmp_path, source, monkeypatch):
    def refuse(_fd, _kind):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    out, other = tmp_path / "out", ConvertOptions(max_shard_size="15kB", dtype="bf16")
    _, notes = run(source, out, Share(0, 2))
    assert sum("no locks on this file system" in line for line in notes.lines) == 1
    with pytest.raises(OutputError, match=r"dtype was keep, is bf16.*remove it yourself"):
        run(source, out, Share(1, 2), other)
    run(source, out, Share(1, 2))
    run(source, out, FINALIZE)
    assert_equal(read_tensors(out), hf_tensors(Model()))


def test_a_run_beside_another_one_is_refused_with_its_process(tmp_path, source):
    """Where two runs to one output met before, the second ended in whatever it tripped over."""
    out = tmp_path / "out"
    with locks.claim(out, Share(), print):
        with pytest.raises(OutputError) as caught:
            run(source, out)
        assert f"found pid {os.getpid()} on " in str(caught.value)
    run(source, out)


def test_a_part_is_no_output_and_says_how_to_get_one(tmp_path, source):
    report, _ = run(source, tmp_path / "out", Share(1, 3))
    text = report.as_text().splitlines()
    assert re.fullmatch(
        r"part 2 of 3 \(--shard-index 1 --num-shards 3\) "
        rf"of {tmp_path}/out is written: \d+ files, 1\d\d\.\d kB, \d+\.\d s",
        text[0],
    )
    assert text[2] == "  lacking: parts 1, 3 (--shard-index 0, 2)"
    assert text[3].startswith(f"  when these are written: ckpt convert {source}/iter_0000010 ")
    assert text[3].endswith("--max-shard-size 15000 --finalize")
    facts = report.as_dict()
    assert (facts["shard_index"], facts["num_shards"], facts["files"]) == (1, 3, 24)
    assert {each["shard_index"] for each in facts["lacking"]} == {0, 2}


def test_the_command_that_finalizes_repeats_every_option(tmp_path):
    options = ConvertOptions(
        dtype="bf16", max_shard_size="2GB", tokenizer=tmp_path / "a b", family="llama",
        vocab_size=130, mtp="drop", overrides=("rotary_base=7", "norm_epsilon=1e-4"),
        allow_nonfinite=True, overwrite=True, workers=3, executor="ray", cache=tmp_path,
    )  # fmt: skip
    assert finalize_command(Path("run"), Path("my out"), options) == (
        f"ckpt convert run 'my out' --dtype bf16 --max-shard-size 2000000000 --tokenizer "
        f"'{tmp_path}/a b' --family llama --vocab-size 130 --mtp drop --set rotary_base=7 "
        "--set norm_epsilon=1e-4 --allow-nonfinite --overwrite --finalize"
    )


def test_the_command_that_finalizes_holds_for_names_with_a_leading_dash():
    command = finalize_command(Path("run"), Path("-y"), ConvertOptions(dtype="bf16"))
    assert command == "ckpt convert --dtype bf16 --finalize -- run -y"


def start(arguments, environ):
    return subprocess.Popen(
        [sys.executable, "-m", "ckpt", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environ},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
    )  # fmt: skip


@pytest.mark.slow
def test_processes_of_a_job_array_work_at_the_same_time(tmp_path):
    """Started together, over what another conversion left; the last word is --finalize."""
    source, out = write_torch_dist(tmp_path / "run", Model(), tp=2), tmp_path / "out"
    command = ["convert", source, out, "--max-shard-size", "15kB", "--quiet", "--json"]
    run(source, out, Share(0, 2), ConvertOptions(max_shard_size="15kB", dtype="bf16"))
    for file in stage_path(out).glob("*.receipt.json"):
        file.unlink()
    processes = []
    for task in range(3):
        environ = {"ID": task, "COUNT": 3, "MIN": 0, "MAX": 2, "STEP": 1}
        names = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in environ.items()}
        processes.append(start(command, names))
    reports = []
    for process in processes:
        output, said = process.communicate(timeout=120)
        assert (process.returncode, said) == (0, "")
        reports.append(json.loads(output.splitlines()[-1]))
    assert {report["event"] for report in reports} == {"part"}
    assert sorted(report["shard_index"] for report in reports) == [0, 1, 2]
    last = start([*command, "--finalize"], {})
    output, said = last.communicate(timeout=120)
    assert (last.returncode, said) == (0, "")
    assert json.loads(output.splitlines()[-1])["event"] == "converted"
    assert_equal(read_tensors(out), hf_tensors(Model()))
