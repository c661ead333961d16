"""Killed at any moment: absent or whole, and the same command ends in the same bytes."""

from __future__ import annotations

import random
import re
import shutil
import signal

import pytest
from faults import check_left, contents

from ckpt.convert.staging import stage_path

KILL = "os.kill(os.getpid(), 9)"
ROUNDS = [12, pytest.param(200, marks=pytest.mark.slow)]
BF16 = ("--overwrite", "--dtype", "bf16")


def finish(forks, whole, out, *options):
    """The same command, undisturbed: it ends in the same bytes and leaves nothing else."""
    done = forks.run(whole.source, out, *whole.options, *options)
    assert done.code == 0, done.said
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a23_kills_at_random_moments_never_leave_half_a_file(forks, whole, tmp_path, rounds):
    """SIGKILL somewhere in each run, resumed ones too; every second chain starts from nothing."""
    dice, out = random.Random(23), tmp_path / "out"  # noqa: S311 - no secret
    kills = finished = 0
    while kills < rounds:
        delay = dice.uniform(0, 1.05 * whole.seconds)
        done = forks.run(whole.source, out, *whole.options, delay=delay, signal=signal.SIGKILL)
        assert done.code in {0, -signal.SIGKILL}, done.said
        kills += done.code != 0
        check_left(out, whole.contents)
        if out.exists():
            finished += 1
            shutil.rmtree(out)
        elif finished % 2:
            shutil.rmtree(stage_path(out), ignore_errors=True)
            finished += 1
    finish(forks, whole, out)
    assert contents(out) == whole.contents


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("rounds", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_a23_being_asked_to_end_is_no_worse_than_being_killed(
    forks, whole, tmp_path, number, rounds
):
    """Ctrl-C says one line and removes what is half written."""
    dice, out = random.Random(5), tmp_path / "out"  # noqa: S311 - no secret
    for _ in range(rounds):
        delay = dice.uniform(0.02, 1.05 * whole.seconds)
        done = forks.run(whole.source, out, *whole.options, delay=delay, signal=number)
        check_left(out, whole.contents)
        if number == signal.SIGINT and done.code:
            assert (done.code, done.said.strip()) == (130, "interrupted")
            assert not list(stage_path(out).glob("*.part"))
        else:
            assert done.code in {0, -number}, done.said
        shutil.rmtree(out, ignore_errors=True)
    finish(forks, whole, out)
    assert contents(out) == whole.contents


class Interrupted:
    """A place whose run was killed once all weights were written, to be had again and again."""

    def __init__(self, forks, whole, place, *options, first=""):
        self._forks, self._whole, self._saved = forks, whole, place.with_name("saved")
        self.place, self.out, self.stage = place, place / "out", stage_path(place / "out")
        self._options, self._first = (*whole.options, *options), first
        done = self._forks.run(whole.source, place / "dry", *self._options)
        at = next(n for n, event in enumerate(done.events, 1) if "index.json." in event)
        shutil.rmtree(place / "dry")
        assert self.run(at).code == -signal.SIGKILL
        shutil.copytree(place, self._saved)
        done = self.run(None)
        assert done.code == 0, done.said
        self.events = done.events

    def run(self, at):
        """Go on, and be killed before the event of this number."""
        return self._forks.run(
            self._whole.source, self.out, *self._options, first=self._first, at=at, do=KILL
        )

    def killed_at(self, step):
        """What lies there after a run that went on was killed before its event ``step``."""
        shutil.rmtree(self.place)
        shutil.copytree(self._saved, self.place)
        done = self.run(step)
        assert done.code == -signal.SIGKILL, (self.events[step - 1], done.said)

    def steps(self, first, *words):
        """Events after the first that has ``first``, those with one of the words if any."""
        begin = next(n for n, event in enumerate(self.events, 1) if first in event)
        later = range(begin, len(self.events) + 1)
        return [n for n in later if not words or any(w in self.events[n - 1] for w in words)]


@pytest.mark.slow
def test_a23_a_kill_before_every_step_on_the_disk_is_mended_by_the_same_command(
    forks, whole, tmp_path
):
    """Before each file that is opened, renamed or removed, one after another."""
    out = tmp_path / "out"
    middle = re.compile("model-0000[3-8]-of")  # weight files in the middle are all alike
    for step in [n for n, event in enumerate(whole.events, 1) if not middle.search(event)]:
        done = forks.run(whole.source, out, *whole.options, at=step, do=KILL)
        assert done.code == -signal.SIGKILL, (step, done.said)
        check_left(out, whole.contents)
        if not out.exists():  # else only a lock file may be left
            finish(forks, whole, out)
        assert contents(out) == whole.contents
        shutil.rmtree(out)


@pytest.mark.parametrize(
    "words", [("rename", "remove"), pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_kill_while_the_last_files_are_written_costs_none_of_the_weights(
    forks, whole, tmp_path, words
):
    """From the index to the last rename: what was written is kept, whatever was removed since."""
    left = Interrupted(forks, whole, tmp_path / "place")
    weights = [name for name in whole.contents if name.endswith(".safetensors")]
    steps = left.steps("index.json.", *words)
    for step in [*steps[:: 1 if not words else 7], steps[-1]]:
        left.killed_at(step)
        check_left(left.out, whole.contents)
        place = left.stage if left.stage.exists() else left.out
        stamps = {name: (place / name).stat().st_mtime_ns for name in weights}
        if not left.out.exists():
            finish(forks, whole, left.out)
        kept = {name: (left.out / name).stat().st_mtime_ns for name in weights}
        assert kept == stamps, left.events[step - 1]
        assert contents(left.out) == whole.contents


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("at_once", [True, False], ids=["exchanged", "renamed"])
def test_a_kill_while_an_output_is_replaced_leaves_the_old_or_the_new_model(
    forks, whole, tmp_path, at_once, every
):
    """Where names cannot be exchanged in one step, the old one may lie beside for a moment."""
    first = "" if at_once else "from ckpt.convert import publish; publish._exchange = lambda *_: 0"
    place = tmp_path / "place"
    place.mkdir()
    finish(forks, whole, place / "out")
    left = Interrupted(forks, whole, place, *BF16, first=first)
    new, old, absent = contents(left.out), place / ".out.ckpt-old", 0
    steps = left.steps(".ckpt-manifest.json.")
    if not every:
        steps = [n for n in steps if "os.rename" in left.events[n - 1]] + steps[-2:]
    for step in steps:
        left.killed_at(step)
        if left.out.exists():
            assert contents(left.out) in (whole.contents, new), step
        else:
            absent += 1
            assert contents(old) == whole.contents
            assert contents(left.stage) == new
        finish(forks, whole, left.out, *BF16)
        assert contents(left.out) == new
    assert absent == (0 if at_once else 1)
