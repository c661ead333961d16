"""What people and machines see while a stage works."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builders import Model, write_legacy

from ckpt import terminal
from ckpt.terminal import Terminal, format_seconds

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""
    now = [1000.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def test_a_log_has_a_line_now_and_then_with_rate_and_time_left(capsys, clock):
    shown = Terminal()
    shown.start("writing weights", 10_000_000_000)
    for _ in range(4):
        clock[0] += 2.6
        shown.advance(500_000_000)
    shown.finish()
    assert capsys.readouterr().err.splitlines() == [
        "writing weights (10.0 GB) ...",
        "writing weights: 1.0 GB of 10.0 GB, 192.3 MB/s, 47 s left",
        "writing weights: 2.0 GB of 10.0 GB, 192.3 MB/s, 42 s left",
    ]


def test_bytes_of_an_earlier_run_count_as_done_and_not_for_the_rate(capsys, clock):
    """Else a resumed run would promise to end at once."""
    shown = Terminal()
    shown.start("writing weights", 10_000, done=8_000)
    clock[0] += 10
    shown.advance(100)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "writing weights: 8.1 kB of 10.0 kB, 10 B/s, 3 min 10 s left"


def test_lines_become_rarer_in_long_work(capsys, clock):
    """Five seconds apart at first, a minute at most."""
    shown = Terminal()
    shown.start("writing weights", 10**13)
    for _ in range(3600):
        clock[0] += 1
        shown.advance(10**8)
    lines = capsys.readouterr().err.splitlines()[1:]
    assert lines[0].startswith("writing weights: 600.0 MB of")  # after six seconds
    assert lines[1].startswith("writing weights: 1.2 GB of")
    assert 60 < len(lines) < 110  # 600 of them, if they came as often as at first


def test_other_units_have_no_byte_rate(capsys, clock):
    shown = Terminal()
    shown.start("sequences", 8, "sequences")
    clock[0] += 6
    shown.advance(2)
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == "sequences: 2 sequences of 8 sequences, 18 s left"
    )


def test_events_are_lines_of_json_on_stdout_only_if_asked_for(capfd):
    """Quiet silences what is for people, and nothing else."""
    Terminal().event("shard", {"name": "a"})
    assert capfd.readouterr() == ("", "")
    shown = Terminal(quiet=True, as_json=True)
    shown.start("writing weights", 5)
    shown.note("a note")
    shown.event("shard", {"name": "a", "size": 3})
    captured = capfd.readouterr()  # of the file descriptor: it was flushed
    assert captured.out == '{"event": "shard", "name": "a", "size": 3}\n'
    assert captured.err == ""


def run_json(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "ckpt", "convert", *map(str, arguments), "--json", "--quiet"],
        capture_output=True, text=True, check=False, cwd=REPOSITORY,
    )  # fmt: skip


def test_each_file_is_a_line_and_the_report_or_the_error_is_the_last(tmp_path):
    source, out = write_legacy(tmp_path / "run", Model(), tp=2), tmp_path / "out"
    done = run_json(source, out, "--max-shard-size", "60kB")
    assert (done.returncode, done.stderr) == (0, "")
    *shards, last = map(json.loads, done.stdout.splitlines())
    assert last["event"] == "converted"
    assert [each["number"] for each in shards] == list(range(1, len(shards) + 1))
    keys = {"event", "name", "size", "sha256", "seconds", "resumed", "number", "of"}
    assert all(each.keys() == keys for each in shards)
    found = {each["name"]: (each["size"], each["sha256"]) for each in shards}
    outputs = {each["name"]: (each["size"], each["sha256"]) for each in last["outputs"]}
    assert found.items() <= outputs.items()
    again = run_json(source, out, "--max-shard-size", "60kB")
    assert again.returncode == 1
    assert json.loads(again.stdout)["event"] == "error"
    assert json.loads(again.stdout)["message"] == "the output exists"


def test_a_bar_on_a_terminal_has_bytes_rate_and_time_left():
    """A real one, 120 columns wide."""
    program = (
        "import time\nfrom ckpt.terminal import Terminal\n"
        "shown = Terminal()\nshown.start('writing weights', 8_000_000_000, done=2_000_000_000)\n"
        "for _ in range(15):\n    time.sleep(0.05)\n    shown.advance(100_000_000)\n"
        "shown.note('above the bar')\nshown.finish()\n"
    )
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program], stderr=follower, stdin=follower, cwd=REPOSITORY,
        env={**os.environ, "COLUMNS": "120", "TERM": "xterm"},
    )  # fmt: skip
    os.close(follower)
    seen = b""
    try:
        while content := os.read(leader, 4096):
            seen += content
    except OSError:  # the other side was closed
        pass
    os.close(leader)
    assert process.wait(60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert "writing weights" in text
    assert "above the bar" in text
    amounts = re.findall(r"(\d\.\d)/8\.0 GB (\d\.\d) GB/s (\d:\d\d:\d\d)", text)
    assert amounts, text
    assert all(2.0 <= float(done) <= 3.5 for done, _, _ in amounts)
    assert all(0.5 < float(rate) < 2.1 for _, rate, _ in amounts)
    assert all("0:00:02" <= left <= "0:00:15" for _, _, left in amounts)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3599.9, "1 h 0 min")]
)
def test_times_are_for_people(seconds, text):
    assert format_seconds(seconds) == text
