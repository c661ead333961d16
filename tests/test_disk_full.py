"""A disk that is full, at any moment, and one that loses its power: real file systems."""

from __future__ import annotations

import shutil
import signal
import subprocess

import pytest
from faults import assert_refused, check_left, contents, slow_but
from volumes import FILLER, after_power_loss, ext4, leave, tmpfs

from ckpt.convert.staging import stage_path

# Where the disk gets full: the first event of this form, and the bytes that are left then.
MOMENTS = {
    "the lock": ("open .*ckpt-lock", 0),
    "the stage": ("os.mkdir", 0),
    "its state": (r"open .*/\.ckpt-stage\.json\.", 0),
    "the first byte": (r"open .*/model-00001-.*\.part", 0),
    "the middle": (r"open .*/model-00004-.*\.part", 200_000),
    "a receipt": (r"open .*/\.model-00004-.*receipt", 0),
    "the tokenizer": (r"open .*/tokenizer\.json\..*part", 0),
    "the index": (r"open .*/\.model\.safetensors\.index\.json\.", 0),
    "config.json": (r"open .*/\.config\.json\.", 0),
    "the manifest": (r"open .*/\.ckpt-manifest\.json\.", 0),
}
FULL = ("the disk is full", "No space left", "not enough room")
WINDOWS = "from ckpt.convert import read; read.WINDOW_BYTES = 2**16"


@pytest.fixture(scope="module", params=[tmpfs, ext4])
def disk(request, tmp_path_factory):
    """A file system that holds the model and what is kept free, and little more."""
    with request.param(tmp_path_factory.mktemp("disk") / "place", 88) as place:
        yield place


@pytest.mark.parametrize("moment", slow_but(MOMENTS, "the middle", "a receipt"))
def test_a23_a_disk_that_gets_full_at_any_moment_costs_nothing_that_is_finished(
    forks, whole, disk, moment
):
    """One line says so; with room again the same command goes on to the same bytes."""
    out, (at, room) = disk / "out", MOMENTS[moment]
    stage = stage_path(out)
    fill = f"from volumes import leave; leave({str(disk)!r}, {room})"
    done = forks.run(whole.source, out, *whole.options, first=WINDOWS, at=at, do=fill)
    try:
        assert (disk / FILLER).exists(), "the moment did not come"
        if moment == "the lock":  # it has no content that counts
            assert done.code in {0, 1}
        if done.code:
            assert_refused(done)
            assert any(words in done.said for words in FULL), done.said
            assert str(disk) in done.said
        check_left(out, whole.contents)
        assert not list(stage.glob("*.part"))
        again = forks.run(whole.source, out, *whole.options)
        assert done.code == 0 or again.code == 1, "it is still full"
        check_left(out, whole.contents)
        kept = {file.name: file.stat().st_mtime_ns for file in stage.glob("*.safetensors")}
        if moment == "the middle":
            assert len(kept) == 3
        (disk / FILLER).unlink()
        if not out.exists():
            done = forks.run(whole.source, out, *whole.options)
            assert done.code == 0, done.said
        assert contents(out) == whole.contents
        if moment != "a receipt":
            assert kept.items() <= {f.name: f.stat().st_mtime_ns for f in out.iterdir()}.items()
        assert [path.name for path in disk.iterdir()] == ["out"]
    finally:
        for path in disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_too_little_room_is_found_before_the_first_byte(forks, whole, disk):
    """The line says how much is needed; nothing is left."""
    leave(disk, 60 * 2**20)
    done = forks.run(whole.source, disk / "out", *whole.options)
    assert_refused(done, "not enough room on the disk", "MB free")
    assert [path.name for path in disk.iterdir()] == [FILLER]
    (disk / FILLER).unlink()


@pytest.fixture(scope="module")
def unflushed(tmp_path_factory):
    """An ext4 that writes nothing back by itself for minutes, nor when a file is replaced."""
    place = tmp_path_factory.mktemp("power")
    with ext4(place / "disk", 120, ",noauto_da_alloc,commit=300,data=writeback") as disk:
        yield disk


@pytest.fixture
def powered(unflushed):
    """That file system, empty for good: what was removed does not come back with the power."""
    yield unflushed
    clear(unflushed)


def clear(place):
    for path in place.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    subprocess.run(["sync", "-f", place], check=True)  # noqa: S607 - as people call it


def test_a_model_that_was_reported_is_whole_after_a_power_failure(forks, whole, powered):
    """Exit code 0 means that all of it is on the disk, names and tokenizer too."""
    out = powered / "out"
    done = forks.run(whole.source, out, *whole.options)
    assert done.code == 0, done.said
    with after_power_loss(powered, powered.with_name("seen")) as seen:
        assert contents(seen / "out") == whole.contents


def test_a_run_that_flushes_nothing_is_seen_to_lose_its_model(forks, whole, powered):
    """The test above would notice; not each time, since anybody may flush all file systems."""
    out, lazy = powered / "out", "import os; os.fsync = lambda fd: None"
    lost = False
    for _ in range(8):
        assert forks.run(whole.source, out, *whole.options, first=lazy).code == 0
        with after_power_loss(powered, powered.with_name("seen")) as seen:
            lost = not (seen / "out").exists() or contents(seen / "out") != whole.contents
        clear(powered)
        if lost:
            break
    assert lost


@pytest.mark.slow
def test_a_power_failure_at_any_moment_leaves_what_the_same_command_goes_on_from(
    forks, whole, powered
):
    """Whatever has a receipt is whole; the run that goes on there ends in the same bytes."""
    for step in range(20, len(whole.events), 9):
        out = powered / "out"
        kill = "import os; os.kill(os.getpid(), 9)"
        done = forks.run(whole.source, out, *whole.options, at=step, do=kill)
        assert done.code == -signal.SIGKILL
        with after_power_loss(powered, powered.with_name("seen")) as seen:
            check_left(seen / "out", whole.contents)
            kept = len(list(stage_path(seen / "out").glob("*.receipt.json")))
            assert kept or step < len(whole.events) // 2
            if not (seen / "out").exists():
                done = forks.run(whole.source, seen / "out", *whole.options)
                assert done.code == 0, done.said
            assert contents(seen / "out") == whole.contents
        clear(powered)
