"""A server process is started once, told apart from its log, and never left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import fake_engine
import pytest
from fake_engine import known

from ckpt.errors import ServeError
from ckpt.serve.process import ServerProcess, _signals_held

DEAF = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "signal.signal(signal.SIGINT, signal.SIG_IGN);"
)


def started(tmp_path, program, **environment):
    process = ServerProcess([sys.executable, "-c", program], environment, tmp_path)
    process.start()
    return process


def wait_for(text, process, seconds=10.0):
    deadline = time.monotonic() + seconds
    while text not in process.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_that_obeys_is_stopped_at_once(tmp_path):
    process = started(tmp_path, "import time; print('up', flush=True); time.sleep(600)")
    wait_for("up", process)
    process.check_alive()
    begin = time.monotonic()
    process.stop()
    assert time.monotonic() - begin < 2
    assert fake_engine.living_in_session(process.pid) == []


def test_a_deaf_process_and_its_deaf_child_are_killed(tmp_path):
    child = f"{DEAF} import time; time.sleep(600)"
    process = started(
        tmp_path,
        f"{DEAF} import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]);"
        "print('up', flush=True); time.sleep(600)",
    )
    wait_for("up", process)
    process.grace_seconds = 0.3
    process.stop()
    assert fake_engine.living_in_session(process.pid) == []


def test_a_child_in_a_group_of_its_own_is_found_by_its_session(tmp_path):
    process = started(
        tmp_path,
        "import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(600)'], preexec_fn=os.setpgrp); print('up', flush=True); time.sleep(600)",
    )
    wait_for("up", process)
    assert len(fake_engine.living_in_session(process.pid)) == 2
    process.grace_seconds = 0.3
    process.stop()
    assert fake_engine.living_in_session(process.pid) == []


def test_children_of_a_dead_server_are_ended_too(tmp_path):
    process = started(
        tmp_path,
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(600)'])",
    )
    known(process._process).wait()
    assert fake_engine.living_in_session(process.pid)
    process.grace_seconds = 0.1
    process.stop()
    assert fake_engine.living_in_session(process.pid) == []


@pytest.mark.parametrize("code", [0, 1, 7])
def test_any_exit_is_an_error_whatever_its_status(tmp_path, code):
    process = started(tmp_path, f"raise SystemExit({code})")
    known(process._process).wait()
    with pytest.raises(ServeError, match=f"ended by itself with exit status {code}"):
        process.check_alive()
    process.stop()


def test_the_cause_is_the_first_error_without_the_prefixes(tmp_path):
    log = """\
INFO 01-01 00:00:00 [a.py:1] fine
(EngineCore pid=5) ERROR 01-01 00:00:00 [b.py:2] Traceback (most recent call last):
(EngineCore pid=5) (Worker_TP0 pid=6) ERROR 01-01 00:00:00 [b.py:2] pkg.mod.KeyError: 'layers.0'
RuntimeError: Engine core initialization failed. See root cause above.
"""
    process = started(tmp_path, f"print({log!r})")
    known(process._process).wait()
    assert process.cause() == "pkg.mod.KeyError: 'layers.0'"
    process.stop()


def test_warnings_are_no_cause_and_a_dead_worker_is(tmp_path):
    log = """\
(APIServer pid=4) WARNING 01-01 00:00:00 [a.py:1] ValueError: only a warm-up
(EngineCore pid=5) ERROR 01-01 00:00:00 [b.py:2] Worker proc 0 died unexpectedly (exit code: -4)
(EngineCore pid=5) ERROR 01-01 00:00:00 [b.py:2] RuntimeError: cancelled
"""
    process = started(tmp_path, f"print({log!r})")
    known(process._process).wait()
    assert process.cause() == "Worker proc 0 died unexpectedly (exit code: -4)"
    process.stop()


def test_without_a_named_error_the_last_lines_are_shown(tmp_path):
    process = started(tmp_path, "print('one'); print('two')")
    known(process._process).wait()
    assert process.cause() == "one / two"
    process.stop()


def test_temporary_files_and_shared_memory_of_this_run_alone_are_removed(scratch):
    own = f"vllm_dist_fakeown{os.getpid()}"
    program = (
        f"import os, pathlib; pathlib.Path(os.environ['TMPDIR'], {own!r}).touch();"
        f"pathlib.Path('/dev/shm', {own + '-cpushm'!r}).touch()"
    )
    other = Path("/dev/shm", f"vllm_dist_fakeother{os.getpid()}-cpushm")
    other.touch()
    process = ServerProcess([sys.executable, "-c", program], {}, scratch)
    process.start()
    known(process._process).wait()
    assert Path("/dev/shm", own + "-cpushm").exists()
    process.stop()
    assert not Path("/dev/shm", own + "-cpushm").exists()
    assert not process._scratch.exists()
    assert process.log.exists()
    assert other.exists()
    other.unlink()


def test_an_interruption_while_stopping_kills_at_once(tmp_path):
    process = started(tmp_path, f"{DEAF} import time; print('up', flush=True); time.sleep(600)")
    wait_for("up", process)
    process.grace_seconds = 60.0
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        process.stop()
    assert time.monotonic() - begin < 10
    assert fake_engine.living_in_session(process.pid) == []


def test_an_interruption_while_starting_comes_after_the_start():
    steps = []
    with pytest.raises(KeyboardInterrupt), _signals_held():  # noqa: PT012 - both must happen
        signal.raise_signal(signal.SIGINT)
        steps.append("started")
    assert steps == ["started"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_server_can_be_run_from_a_thread(tmp_path):
    seen = []

    def work():
        process = started(tmp_path, "import time; time.sleep(600)")
        process.stop()
        seen.append(fake_engine.living_in_session(process.pid))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[]]


def test_stopping_what_never_started_does_nothing(tmp_path):
    ServerProcess(["none"], {}, tmp_path).stop()
