"""One program measured: seconds until its files are on the disk, bytes moved, peak memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Starts a program from a small process, for one that is started from a large one is charged with
# the memory of that. A process's own counters in /proc take in those of the children that it has
# waited for, so the difference is that of the whole tree, as is the peak of the largest process.
LAUNCH = """
import json, os, resource, subprocess, sys

def moved():
    try:
        with open("/proc/self/io") as stream:
            return {k: int(v) for k, v in (line.split(": ") for line in stream)}
    except OSError:
        return {}

limit, report, *command = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
before = moved()
process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
after = moved()
found = {name: after[name] - before[name] for name in after}
found["cpu_seconds"] = usage.ru_utime + usage.ru_stime
found["peak_bytes"] = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
found["code"] = os.waitstatus_to_exitcode(status)
with open(report, "w") as stream:
    json.dump(found, stream)
"""
_DROP = getattr(os, "POSIX_FADV_DONTNEED", None)


@dataclass(frozen=True)
class Run:
    """One measured run; bytes are 0 where the system does not count them.

    ``read`` and ``written`` are what system calls moved, ``disk_read`` what came from the disk;
    ``peak_bytes`` is the resident memory of the largest process.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    read: int
    written: int
    disk_read: int


class RunError(Exception):
    """The program failed; ``code`` is its exit code and the text its last lines."""

    def __init__(self, code: int, text: str) -> None:
        """Keep both."""
        super().__init__(f"exit code {code}: {text}")
        self.code, self.text = code, text

    @property
    def out_of_memory(self) -> bool:
        """Whether it says so, or was killed for it."""
        words = ("out of memory", "MemoryError", "memory allocation", "allocate memory")
        return any(word in self.text for word in words) or self.code == -9  # noqa: PLR2004 - SIGKILL


@dataclass(frozen=True)
class Program:
    """A command that writes ``output``; it may be held to ``limit`` bytes of memory of its own."""

    command: Sequence[str | Path]
    output: Path
    environment: Mapping[str, str]
    limit: int = 0


def measure(program: Program) -> Run:
    """Run a program until all that it wrote is on the disk; raises RunError if it fails."""
    shutil.rmtree(program.output, ignore_errors=True)
    os.sync()
    with tempfile.TemporaryDirectory() as place:
        report, errors = Path(place) / "report", Path(place) / "errors"
        launch: list[str | Path] = [sys.executable, "-I", "-S", "-c", LAUNCH]
        launch += [str(program.limit), report, *program.command]
        started = time.monotonic()
        with errors.open("wb") as stream:
            subprocess.run(launch, check=True, stderr=stream, env=program.environment)
        for path in program.output.rglob("*"):
            _flush(path)
        seconds = time.monotonic() - started
        found = json.loads(report.read_text(encoding="utf-8"))
        if found["code"]:
            raise RunError(found["code"], errors.read_text(errors="replace")[-2000:])
    moved = [found.get(name, 0) for name in ("rchar", "wchar", "read_bytes")]
    return Run(seconds, found["cpu_seconds"], found["peak_bytes"], *moved)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def interpreter_peak() -> int:
    """The peak memory of a Python that does nothing."""
    nowhere = Path(tempfile.gettempdir()) / "nothing-is-written-here"
    return measure(Program([sys.executable, "-c", "pass"], nowhere, os.environ)).peak_bytes


def evict(files: Iterable[Path]) -> None:
    """Take files out of the page cache, so that they are read from the disk."""
    if _DROP is None:
        sys.exit("this system cannot take files out of its cache: run with --warm")
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, _DROP)
        os.close(descriptor)


def read_once(files: Iterable[Path]) -> None:
    """Put files into the page cache, as far as it takes them."""
    buffer = bytearray(2**24)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
