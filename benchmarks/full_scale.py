"""Time `ckpt inspect` and `ckpt convert --plan` on checkpoints of terabytes, which are all holes.

DeepSeek-V3 (671 billion parameters) and Llama 3 405B, in both of Megatron's formats, with the
distributed optimizer's files beside them. Each run is a process of its own, start-up included,
on a warm page cache and with compiled modules. The machine's load is printed beside the times,
for they mean little on a busy one. Nothing here fails for being slow.

    python benchmarks/full_scale.py --rounds 3
    python benchmarks/full_scale.py --directory /data/full-scale --only deepseek-v3-torch
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

_NAMES = ("deepseek-v3", "llama-3-405b")
CASES = tuple(f"{model}-{format_}" for model in _NAMES for format_ in ("torch", "torch_dist"))
COMMANDS = {
    "inspect": ["inspect", "{source}"],
    "inspect --json": ["inspect", "{source}", "--json"],
    "convert --plan": ["convert", "{source}", "{source}-hf", "--plan"],
    "convert --plan --json": ["convert", "{source}", "{source}-hf", "--plan", "--json"],
    "convert --plan, first": ["convert", "{source}", "{source}-hf", "--plan"],
}
# Without what earlier runs have kept: transformers builds the model in a process of its own.
FIRST = "convert --plan, first"


@dataclass(frozen=True)
class Run:
    """One measured process."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def measure(arguments: list[str], *, cache: bool = True) -> Run:
    """Run ``ckpt`` with these arguments, its own processes counted; its output goes nowhere."""
    started = time.monotonic()
    command = [sys.executable, "-m", "ckpt", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment(cache=cache))
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    process.returncode = status
    if status:
        sys.exit(f"failed: {' '.join(command)}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit)


def environment(*, cache: bool = True) -> dict[str, str]:
    """That of this process, but with compiled modules kept, as for an installed package.

    Models that transformers built are kept among them, or not at all.
    """
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    place = tempfile.gettempdir() + "/ckpt-compiled"
    kept = {"PYTHONPYCACHEPREFIX": place, "XDG_CACHE_HOME": place} | kept
    return kept if cache else kept | {"CKPT_CACHE": "off"}


def prepare(case: str, directory: Path) -> Path:
    """The checkpoint of that name, written unless it is there."""
    source = directory / case
    if not source.exists():
        print(f"writing {source} ...", flush=True)
        # In a process of its own: a child's peak memory counts from that of its parent.
        writer = get_context("spawn").Process(target=write, args=(case, source))
        writer.start()
        writer.join()
        if writer.exitcode:
            sys.exit(f"cannot write {source}")
    return source


def write(case: str, source: Path) -> None:
    """Write the checkpoint of that name."""
    from sparse_megatron import MODELS, RANKS, WRITERS  # noqa: PLC0415 - it imports torch

    model, _, format_ = case.rpartition("-")
    source.mkdir(parents=True)
    WRITERS[format_](source, MODELS[model], RANKS[model])


def report(case: str, source: Path, rounds: int, labels: list[str]) -> None:
    """One line for each command: the best of some rounds."""
    states = [file.stat() for file in source.rglob("*") if file.is_file()]
    apparent, used = sum(s.st_size for s in states), sum(s.st_blocks * 512 for s in states)
    print(f"{case}: {len(states)} files, {apparent / 1e12:.2f} TB in {used / 1e6:.0f} MB of disk")
    for label in labels:
        arguments = [part.format(source=source) for part in COMMANDS[label]]
        cache = label != FIRST
        measure(arguments, cache=cache)  # fills the page cache, and compiles
        runs = [measure(arguments, cache=cache) for _ in range(rounds)]
        best, cpu = min(run.seconds for run in runs), min(run.cpu_seconds for run in runs)
        peak = max(run.peak_bytes for run in runs) / 2**20
        figures = f"{best:7.2f} s  {cpu:7.2f} s of CPU  {peak:6.0f} MiB"
        print(f"  {label:22} {figures}  load {os.getloadavg()[0]:.1f}", flush=True)


def main() -> None:
    """Write what is missing, then measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, help="where checkpoints lie and are kept")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command")
    parser.add_argument("--only", action="append", choices=CASES, help="may be repeated")
    parser.add_argument("--command", action="append", choices=COMMANDS, help="may be repeated")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for case in options.only or CASES:
            source = prepare(case, options.directory or Path(temporary))
            report(case, source, options.rounds, options.command or list(COMMANDS))


if __name__ == "__main__":
    main()
