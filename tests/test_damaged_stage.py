"""An unfinished output that somebody touched: what was kept is whole, or is written again."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
from faults import assert_refused, contents, slow_but
from volumes import tmpfs

from ckpt.convert.staging import stage_path

SIXTH = r"open .*/model-00006-.*\.part"
KILL = "os.kill(os.getpid(), 9)"
NAME = "model-00003-of-00010.safetensors"


@pytest.fixture(scope="module")
def interrupted(forks, whole, tmp_path_factory):
    """A place in which five of ten files were finished when the run was killed."""
    place = tmp_path_factory.mktemp("interrupted")
    done = forks.run(whole.source, place / "out", *whole.options, at=SIXTH, do=KILL)
    assert done.code == -signal.SIGKILL
    return place


@pytest.fixture
def out(interrupted, tmp_path):
    """The same, to be damaged; times of files are kept."""
    return shutil.copytree(interrupted, tmp_path / "place") / "out"


def stamps(place):
    return {file.name: file.stat().st_mtime_ns for file in place.glob("*.safetensors")}


def edited(receipt, **fields):
    receipt.write_text(json.dumps({**json.loads(receipt.read_text()), **fields}))


def flipped(file, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)


def linked(file):
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


DAMAGES = {  # of a finished file and its receipt
    "another hash": lambda file, receipt: edited(receipt, sha256="0" * 64),
    "another size": lambda file, receipt: edited(receipt, size=7),
    "more casts": lambda file, receipt: edited(receipt, overflowed={"lm_head.weight": 3}),
    "no fields": lambda file, receipt: receipt.write_text("{}"),
    "a list": lambda file, receipt: receipt.write_text("[1]"),
    "no JSON": lambda file, receipt: receipt.write_bytes(b"\xff\x00"),
    "deep JSON": lambda file, receipt: receipt.write_text("[" * 100_000),
    "no receipt": lambda file, receipt: receipt.unlink(),
    "receipt of another": lambda file, receipt: shutil.copyfile(
        receipt.with_name(receipt.name.replace("00003", "00002")), receipt
    ),
    "cut short": lambda file, receipt: os.truncate(file, file.stat().st_size - 1),
    "emptied": lambda file, receipt: os.truncate(file, 0),
    "longer": lambda file, receipt: file.write_bytes(file.read_bytes() + b"x"),
    "a weight flipped": lambda file, receipt: flipped(file, -5),
    "a header flipped": lambda file, receipt: flipped(file, 60),
    "deleted": lambda file, receipt: file.unlink(),
    "a link": lambda file, receipt: linked(file),
}


@pytest.mark.parametrize(
    "damage", slow_but(DAMAGES, "another hash", "a weight flipped", "no receipt", "a link")
)
def test_a_finished_file_that_was_touched_is_written_again_and_no_other(forks, whole, out, damage):
    """A receipt counts with its seal, and a file with its size and time, or else its SHA-256."""
    stage, before = stage_path(out), stamps(stage_path(out))
    DAMAGES[damage](stage / NAME, stage / f"{NAME}.receipt.json")
    before |= stamps(stage)
    done = forks.run(whole.source, out, *whole.options)
    assert done.code == 0, done.said
    assert contents(out) == whole.contents
    after = stamps(out)
    assert after[NAME] != before.pop(NAME)
    assert before.items() <= after.items()


def test_a_finished_file_with_another_time_is_read_and_kept(forks, whole, out):
    """A copy of the place, or a touch, costs one read."""
    stage = stage_path(out)
    for file in stage.glob("*.safetensors"):
        os.utime(file, ns=(7, 7_000_000_000))
    done = forks.run(whole.source, out, *whole.options)
    assert done.code == 0, done.said
    assert list(stamps(out).values()).count(7_000_000_000) == 5
    assert contents(out) == whole.contents


@pytest.mark.parametrize("name", ["notes.txt", "model-00011-of-00010.safetensors", "a/b"])
def test_files_that_do_not_belong_there_are_named_and_not_published(forks, whole, out, name):
    """Once they are moved away, the same command goes on."""
    stranger = stage_path(out) / name
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("years of work")
    done = forks.run(whole.source, out, *whole.options)
    assert_refused(done, "files that do not belong here", name, "Move them away")
    assert not out.exists()
    assert stranger.read_text() == "years of work"
    stranger.rename(out.parent / "kept")
    written = stamps(stage_path(out))
    assert len(written) == 10
    done = forks.run(whole.source, out, *whole.options)
    assert done.code == 0, done.said
    shutil.rmtree(out / "a", ignore_errors=True)
    assert contents(out) == whole.contents
    assert stamps(out) == written


@pytest.mark.parametrize("state", ["gone", "garbage", "other"])
def test_a_stage_that_does_not_say_what_it_is_for_is_begun_afresh_and_that_is_said(
    forks, whole, out, state
):
    file = stage_path(out) / "ckpt-stage.json"
    if state == "gone":
        file.unlink()
    elif state == "garbage":
        file.write_text('{"fingerprint": 3, "options": []')
    else:
        edited(file, parts="many", options=[3])
    options = [option for option in whole.options if option != "--quiet"]
    done = forks.run(whole.source, out, *options)
    assert done.code == 0, done.said
    assert "starting afresh" in done.said
    assert contents(out) == whole.contents


@pytest.mark.parametrize("kind", ["file", "link", "dead link"])
def test_a_stage_that_is_no_directory_is_refused(forks, whole, tmp_path, kind):
    """Nothing is written through a link."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    if kind == "link":
        elsewhere.mkdir()
    if kind == "file":
        stage_path(out).write_text("x")
    else:
        stage_path(out).symlink_to(elsewhere)
    done = forks.run(whole.source, out, *whole.options)
    assert_refused(done, stage_path(out).name, "no directory", "Remove it")
    assert not elsewhere.exists() or not any(elsewhere.iterdir())
    assert not out.exists()


def test_what_came_under_the_name_of_the_output_meanwhile_stays(forks, whole, tmp_path):
    """Without --overwrite nothing is replaced, however late it came."""
    out = tmp_path / "out"
    work = f"os.mkdir({str(out)!r}); open({str(out / 'thesis.tex')!r}, 'w').write('years')"
    done = forks.run(
        whole.source, out, *whole.options, at=r"open .*/\.ckpt-manifest\.json\.", do=work
    )
    assert_refused(done, "the output exists")
    assert (out / "thesis.tex").read_text() == "years"
    out.rename(tmp_path / "work")
    written = stamps(stage_path(out))
    done = forks.run(whole.source, out, *whole.options)
    assert done.code == 0, done.said
    assert stamps(out) == written
    assert contents(out) == whole.contents


def test_an_output_that_is_a_mount_point_is_refused_before_anything_is_read(forks, whole, tmp_path):
    """A finished directory cannot be renamed to it, and would have grown on another disk."""
    with tmpfs(tmp_path / "out", 80) as out:
        done = forks.run(whole.source, out, *whole.options)
        assert_refused(done, "mount point", str(out / "model"))
        assert not list(out.iterdir())
        assert forks.run(whole.source, out / "model", *whole.options).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


DENIED = {  # what, its mode, and what is said
    "place": ("place", 0o555, "cannot write here"),
    "output": ("place/out", 0o000, "cannot look at it"),
    "stage": ("place/.out.ckpt-partial", 0o555, "cannot write"),
    "file": ("run/iter_0000010/mp_rank_01_001/model_optim_rng.pt", 0o000, "cannot"),
    "rank": ("run/iter_0000010/mp_rank_01_001", 0o000, "cannot read"),
    "iteration": ("run/iter_0000010", 0o000, "cannot read"),
    "run": ("run", 0o000, "cannot read"),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="made for root, who loses its rights")
@pytest.mark.parametrize("what", slow_but(DENIED, "place", "file"))
def test_what_modes_of_files_forbid_is_one_line(forks, whole, out, what):
    """The kernel says no: the run has none of root's rights."""
    name, mode, words = DENIED[what]
    shutil.copytree(whole.source, out.parent.parent / "run")
    if what == "output":
        out.mkdir()
    place = out.parent.parent / name
    before = place.stat().st_mode
    place.chmod(mode)
    done = forks.run(out.parent.parent / "run", out, *whole.options, mortal=True)
    place.chmod(before)
    assert_refused(done, words, "Permission denied")
    if what in {"place", "stage"}:  # with the rights it goes on
        done = forks.run(whole.source, out, *whole.options)
        assert done.code == 0, done.said


def test_notes_that_cannot_be_written_do_not_end_a_conversion(forks, whole, tmp_path):
    """A log on a full disk, or a terminal that is gone."""
    out, options = tmp_path / "out", [option for option in whole.options if option != "--quiet"]
    done = forks.run(whole.source, out, *options, stderr="/dev/full")
    assert done.code == 0
    assert contents(out) == whole.contents
