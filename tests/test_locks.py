"""Locks of an output: one whole run, or parts of one conversion, and what others are told."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from ckpt.convert import locks
from ckpt.convert.locks import Lock, claim
from ckpt.convert.share import WHOLE, Share
from ckpt.errors import OutputError

FINALIZE = Share(finalize=True)
HERE = f"pid {os.getpid()} on {socket.gethostname()}, since 20"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(locks, "_PATIENCE_SECONDS", 0.2)


def no_note(text):
    raise AssertionError(text)


@pytest.mark.parametrize("first", [WHOLE, FINALIZE])
@pytest.mark.parametrize("second", [WHOLE, FINALIZE, Share(1, 3)])
def test_a_whole_run_shares_its_output_with_nobody(out, first, second):
    """The refusal names the process, its host and what to do; later the same is allowed."""
    with claim(out, first, no_note):
        with pytest.raises(OutputError) as caught, claim(out, second, no_note):
            pass
        assert "another ckpt is writing this output" in str(caught.value)
        assert str(caught.value.found).startswith(HERE)
        assert "Wait for it, or stop it" in str(caught.value)
    with claim(out, second, no_note):
        pass
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("second", [WHOLE, FINALIZE])
def test_a_whole_run_waits_for_parts_and_says_which(out, second):
    with claim(out, Share(1, 3), no_note), claim(out, Share(2, 3), no_note):
        with pytest.raises(OutputError) as caught, claim(out, second, no_note):
            pass
        assert f"part 2 of 3: {HERE}" in str(caught.value)
        assert f"part 3 of 3: {HERE}" in str(caught.value)
    assert list(out.parent.iterdir()) == []


def test_the_same_part_twice_is_refused_with_its_process(out):
    with claim(out, Share(1, 3), no_note):
        with pytest.raises(OutputError) as caught, claim(out, Share(1, 3), no_note):
            pass
        assert (
            "part 2 of 3 (--shard-index 1 --num-shards 3) is being written by another ckpt"
            in str(caught.value)
        )
        assert HERE in str(caught.value)
        with claim(out, Share(0, 3), no_note):
            pass
    with claim(out, Share(1, 3), no_note):
        pass
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("share", [WHOLE, Share(1, 3)])
def test_a_process_that_was_killed_leaves_nothing_in_the_way(out, share):
    """The kernel drops its locks; what it wrote into the lock file is only text."""
    program = (
        "import sys, time, pathlib\n"
        "from ckpt.convert.locks import claim\nfrom ckpt.convert.share import Share\n"
        f"with claim(pathlib.Path({str(out)!r}), {share!r}, print):\n"
        "    print('held', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(OutputError, match=f"pid {process.pid} on "), claim(out, share, no_note):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(out.parent.iterdir()) != []
    with claim(out, share, no_note):
        pass


def test_a_lock_file_that_was_removed_while_waiting_locks_nothing(out, monkeypatch):
    """Its inode is no longer that of the path, so the next file is locked instead."""
    file, real = out.with_name("lock"), fcntl.flock
    held = Lock(file)
    assert held.take(shared=False)

    def slow(fd, kind):
        monkeypatch.setattr(fcntl, "flock", real)
        held.remove()  # between opening the file and locking it
        real(fd, kind)

    monkeypatch.setattr(fcntl, "flock", slow)
    other = Lock(file)
    assert other.take(shared=False)
    assert file.exists()
    assert not Lock(file).take(shared=False)
    other.remove()
    assert not file.exists()


def test_many_runs_at_once_never_hold_the_output_together(out, monkeypatch):
    """Lock files come and go all the time; each holder finds itself alone."""
    monkeypatch.setattr(locks, "_PATIENCE_SECONDS", 30)
    holders, most, done = [], [], []

    def work(number):
        for _ in range(20):
            with claim(out, WHOLE, no_note):
                holders.append(number)
                most.append(len(holders))
                time.sleep(0.0005)
                holders.remove(number)
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1, 2, 3]
    assert max(most) == 1


def test_parts_that_start_together_set_up_once(out):
    """The first sets up alone, the others find it done, and all go on together."""
    ready, done = [], []
    barrier = threading.Barrier(6)

    def work(index):
        with claim(out, Share(index, 6), no_note) as mine:
            barrier.wait()
            with mine.set_up(lambda: bool(ready)):
                if not ready:
                    time.sleep(0.05)
                    ready.append(index)
            barrier.wait()  # all hold their parts at the same time
            done.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(6))
    assert len(ready) == 1
    assert list(out.parent.iterdir()) == []


def test_nothing_is_set_up_under_parts_at_work(out):
    with claim(out, Share(0, 2), no_note), claim(out, Share(1, 2), no_note) as mine:
        with pytest.raises(OutputError) as caught, mine.set_up(lambda: False):
            pass
        assert "parts of another conversion" in str(caught.value)
        assert "part 1 of 2: pid" in str(caught.value)
        assert "part 2 of 2" not in str(caught.value)  # itself
        with mine.set_up(lambda: True):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.parametrize("share", [WHOLE, Share(1, 3)])
def test_a_file_system_without_locks_is_said_once_and_used(out, monkeypatch, share, number):
    def refuse(_fd, _kind):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    notes = []
    with claim(out, share, notes.append) as mine:
        assert not mine.sure
        with mine.set_up(lambda: False):
            pass
    (note,) = notes
    assert "no locks on this file system" in note
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("place", ["a file/out", "/proc/out"])
def test_a_place_that_cannot_be_written_is_an_error(tmp_path, place):
    (tmp_path / "a file").touch()
    wrong = pytest.raises(OutputError, match="cannot write here")
    with wrong, claim(tmp_path / place, WHOLE, no_note):
        pass
