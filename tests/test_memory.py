"""Memory: a model larger than the memory that a conversion may have, and one of another size."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from bench_measure import interpreter_peak
from safetensors import safe_open
from synthetic import CASES, expected, write_checkpoint

from ckpt.inspection import weight_files

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the limit and the peak are Linux's"),
]
LIMIT_KIB = 2**20  # 1 GiB of addresses for each process, mapped libraries included
ROOM = 300_000_000  # resident, above an interpreter that does nothing
LIMITED = f'ulimit -v {LIMIT_KIB} && exec "$@"'
# The command, and then the most memory that its own process had, without what it had before
# it became this program.
PROGRAM = """
import sys
from ckpt.cli import main

report = sys.argv.pop(1)
try:
    main()
finally:
    with open("/proc/self/status") as stream, open(report, "w") as found:
        found.write(next(line.split()[1] for line in stream if line.startswith("VmHWM")))
"""


@pytest.fixture
def room(tmp_path):
    """A place whose gigabytes are gone after the test."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@dataclass(frozen=True)
class Outcome:
    """A conversion in a process of its own."""

    output: Path
    text: str
    peak_bytes: int


def convert(source, place, name):
    """``ckpt convert`` under the limit, without what an earlier run may have kept."""
    report, output = place / f"{name}-peak", place / name
    command = [sys.executable, "-c", PROGRAM, report, "convert", source, output, "--quiet"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(place / f"{name}-cache")}
    limited = ["/bin/sh", "-c", LIMITED, "sh", *command]
    result = subprocess.run(limited, check=False, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return Outcome(output, result.stdout, int(report.read_text()) * 1024)


def assert_as_said(output, case, model):
    """Every tensor, bit for bit, with one in memory at a time."""
    files = [safe_open(output / name, "pt") for name in weight_files(output)]
    places = {name: file for file in files for name in list(file.keys())}
    for name, value in expected(case, model):
        found = places.pop(name).get_tensor(name)
        assert torch.equal(found.view(torch.int16), value.view(torch.int16)), name
    assert not places


@pytest.mark.parametrize("name", ["moe-torch", "moe-torch_dist"])
def test_a28_two_gigabytes_convert_in_a_memory_of_one(room, name):
    """TP 4, PP 2, EP 2, states beside them: proved, bit for bit, in less than 300 MB."""
    case = CASES[name]
    model = write_checkpoint(room / "run", case, 2_000_000_000)
    done = convert(room / "run", room, "hf")
    assert done.peak_bytes - interpreter_peak() < ROOM
    if torch.version.cuda is None:  # a CUDA build's libraries alone do not fit
        assert "not proved" not in done.text
    assert_as_said(done.output, case, model)


@pytest.mark.parametrize("name", ["moe-torch", "dense-torch_dist"])
def test_a28_eight_times_the_model_needs_no_more_memory(room, name):
    """What grows is the list of tensors, not what is held of them."""
    peaks = []
    for size in (250_000_000, 2_000_000_000):
        source = room / str(size)
        write_checkpoint(source, CASES[name], size)
        peaks.append(convert(source, room, f"hf-{size}").peak_bytes)
    assert peaks[1] - peaks[0] < 2**25, peaks
