"""The benchmark: it measures whole process trees, and fails only for outputs that differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench_convert import check_output, fingerprints
from bench_measure import Program, Run, RunError, measure
from bench_report import BEGIN, END, Row, Table, write_markdown
from synthetic import CASES, expected, write_checkpoint

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "bench_convert.py"
# A process that writes, and whose child reads and takes memory.
TREE = """
import os, subprocess, sys
os.mkdir(sys.argv[1])
open(sys.argv[1] + "/written", "wb").write(bytes(3_000_000))
child = "import sys; content = open(sys.argv[1], 'rb').read() * 20"
subprocess.run([sys.executable, "-c", child, sys.argv[1] + "/written"], check=True)
"""


def program(text, output, **options):
    command = [sys.executable, "-c", text, output]
    return Program(command, output, dict(os.environ), **options)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count")
def test_bytes_and_memory_are_those_of_all_processes(tmp_path):
    """A child's reading counts, and the largest process's memory."""
    run = measure(program(TREE, tmp_path / "out"))
    assert run.written == 3_000_000
    assert 3_000_000 < run.read < 30_000_000
    assert 60_000_000 < run.peak_bytes < 120_000_000
    assert run.seconds > 0


def test_a_program_over_its_limit_is_out_of_memory_and_one_with_a_bug_is_not(tmp_path):
    """So a limit is never taken for a fault, nor a fault for a limit."""
    with pytest.raises(RunError) as caught:
        measure(program("bytes(10**9)", tmp_path / "out", limit=200_000_000))
    assert caught.value.out_of_memory
    with pytest.raises(RunError, match="ZeroDivisionError") as caught:
        measure(program("1 / 0", tmp_path / "out"))
    assert not caught.value.out_of_memory


def run_of(seconds, peak):
    return Run(seconds, 2.5, peak, 3_000_000_000, 2_000_000_000, 1_000_000_000)


def table():
    rows = [
        Row("cp", runs=[run_of(2.0, 11)], ratios=[1.0]),
        Row("fast", 1.15, worker=True, runs=[run_of(2.2, 310_000_000)], ratios=[1.1]),
        Row(
            "slow",
            1.15,
            worker=True,
            runs=[run_of(n, 330_000_000) for n in (1, 8, 3)],
            ratios=[1, 3.0, 1.2],
        ),
        Row("huge", failure="out of memory"),
    ]
    return Table("Some model", "dense", 4_000_000_000, 20_000_000, rows)


def test_a_bar_is_held_to_the_median_of_the_rounds_ratios():
    """Not to the ratio of medians; memory above the interpreter has a bar of its own."""
    lines = [" ".join(line.split()) for line in table().as_text().splitlines()]
    assert lines[2:] == [
        "cp 2.00 1.00 2000 2.5 3.00 2.00 1.00 0 -19",
        "fast 2.20 1.10 1.15 holds 1818 2.5 3.00 2.00 1.00 296 277 holds",
        "slow 3.00 1.20 1.15 missed 1333 2.5 3.00 2.00 1.00 315 296 missed",
        "huge out of memory",
    ]


def test_tables_go_between_the_marks_of_a_document_and_leave_the_rest(tmp_path):
    """Twice gives the same document."""
    file = tmp_path / "performance.md"
    file.write_text(f"# Before\n\n{BEGIN}an earlier table\n{END}\nAfter\n")
    write_markdown(file, "3 rounds", [table()])
    first = file.read_text()
    write_markdown(file, "3 rounds", [table()])
    assert file.read_text() == first
    assert first.startswith("# Before\n\n")
    assert first.endswith("\nAfter\n")
    assert "earlier" not in first
    assert "| fast | 2.20 | 1.10 | 1.15 holds |" in first


def test_an_output_with_one_other_bit_ends_the_benchmark(tmp_path):
    """The comparison takes in every byte of every tensor."""
    case = CASES["dense-torch_dist"]
    model = write_checkpoint(tmp_path / "source", case, 20_000_000)
    truth, output = fingerprints(expected(case, model)), tmp_path / "output"
    convert_checkpoint(tmp_path / "source", output, ConvertOptions())
    check_output(output, truth)
    (file,) = output.glob("*.safetensors")
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read()[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))
    with pytest.raises(SystemExit, match=r"1 tensors differ; [\w.]+: .*bfloat16"):
        check_output(output, truth)
    with pytest.raises(SystemExit, match="2 tensors differ"):
        check_output(output, {**truth, "another": ("torch.bfloat16", (3,), "")})


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="GNU cp, and a cache that can be emptied")
def test_the_benchmark_prints_a_line_for_each_contestant(tmp_path):
    """All of them at a small size, cold and compared."""
    report = tmp_path / "report.json"
    options = ["--size", "20MB", "--case", "moe-torch", "--rounds", "1", "--json", report]
    command = [sys.executable, SCRIPT, *options, "--directory", tmp_path]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    (found,) = json.loads(report.read_text())["tables"]
    names = [row["name"] for row in found["rows"]]
    assert names[:3] == ["cp", "ckpt, first run", "ckpt"]
    assert names[-1] == "torch + safetensors"
    for row in found["rows"]:
        assert row["name"] in result.stdout
        assert row["runs"][0]["written"] >= 17_000_000
