"""Time `ckpt convert` beside `cp` of the files that hold the weights, and what scripts do.

Each contestant is a process of its own, start-up included, and ends when what it wrote is on the
disk. They run in turn, on the same disk, with the source out of the page cache before each; the
ratio to `cp` is taken within a round, for the seconds depend on the machine and its hour. Every
output is compared with what the checkpoint's generator says, bit for bit. Nothing here fails for
being slow: it fails only when an output differs.

    python benchmarks/bench_convert.py --size 8GB --rounds 5 --markdown docs/performance.md
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from bench_measure import (
    Program,
    RunError,
    evict,
    interpreter_peak,
    measure,
    read_once,
)
from bench_report import Row, Table, machine, write_json, write_markdown
from full_scale import environment
from safetensors import safe_open
from synthetic import CASES, expected, weight_files, write_checkpoint

from ckpt.config import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from synthetic import Case

    Fingerprints = dict[str, tuple[str, tuple[int, ...], str]]

NAIVE = Path(__file__).resolve().parent / "bench_naive.py"
BRIDGE = NAIVE.with_name("bench_bridge.py")
DEFAULT_CASES = [name for name in CASES if name != "moe-torch-ep4"]
DEFAULT_SIZES = ["0.5GB", "2GB"]
BAR, HARD_BAR = 1.15, 1.3  # at 8 GB; the second for a cast and for thousands of small tensors
COPY = "cp"


@dataclass(frozen=True)
class Contestant:
    """A program in the race; ``command`` lacks source and output, ``slow`` ones run once.

    ``fresh`` finds nothing that an earlier run of it kept, ``packages`` is a directory of modules
    for it alone, which also wants a Hugging Face model of the same kind.
    """

    name: str
    command: tuple[str | Path, ...]
    options: tuple[str, ...] = ()
    ours: bool = False
    fresh: bool = False
    slow: bool = False
    packages: Path | None = None


@dataclass(frozen=True)
class Race:
    """One checkpoint, what it must become, and where outputs and ckpt's own cache lie."""

    case: Case
    truth: Fingerprints
    source: Path
    place: Path
    warm: bool

    @property
    def output(self) -> Path:
        """Where every contestant writes."""
        return self.place / "output"

    @property
    def cache(self) -> Path:
        """Where ckpt keeps what it has proved."""
        return self.place / "cache"

    @property
    def reference(self) -> Path:
        """The Hugging Face model without its weights."""
        return self.place / "reference"

    def keep_reference(self) -> None:
        """Take configuration and index of the first converted model."""
        if not self.reference.exists():
            self.reference.mkdir()
            for file in self.output.glob("*.json"):
                if file.name in {"config.json", "model.safetensors.index.json"}:
                    shutil.copy(file, self.reference)

    def program(self, contestant: Contestant) -> Program:
        """The command of a contestant for this checkpoint."""
        if contestant.name == COPY:
            command = [*contestant.command, self.output, *self.files(), self.output]
            return Program(command, self.output, os.environ)
        command = [*contestant.command, self.source, self.output, *contestant.options]
        own = {"XDG_CACHE_HOME": str(self.cache), "HF_HUB_OFFLINE": "1"}
        if contestant.packages:
            command.append(self.reference)
            paths = (str(contestant.packages.resolve()), os.environ.get("PYTHONPATH", ""))
            own["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        limit = 0 if contestant.ours else _available() * 8 // 10
        return Program(command, self.output, {**environment(), **own}, limit)

    def files(self) -> list[Path]:
        """The files of the weights."""
        return weight_files(self.source)

    def prepare(self, contestant: Contestant) -> None:
        """Bring the caches into the state that a run begins with."""
        if contestant.fresh:
            shutil.rmtree(self.cache, ignore_errors=True)
        files = [file for file in self.source.rglob("*") if file.is_file()]
        read_once(self.files()) if self.warm else evict(files)


def contestants(case: Case, workers: list[int], bridge: Path | None) -> list[Contestant]:
    """Who runs, in this order; mbridge where it can: it reads one format and casts nothing."""
    never = "--reflink=never" if sys.platform == "linux" else ""
    copy = ("sh", "-c", f'mkdir "$1" && shift && exec cp --parents {never} "$@"', "cp")
    convert = (sys.executable, "-m", "ckpt", "convert")
    cast = ("--dtype", "bf16") if case.fp32 else ()
    plain = ("--quiet", *cast)
    several = [
        Contestant(f"ckpt, {n} workers", convert, (*plain, "--workers", str(n)), ours=True)
        for n in (workers if _has_workers() else [])
    ]
    naive = ("--bf16",) if case.fp32 else ()
    can = bridge and case.format == "torch_dist" and not case.fp32
    bridged = Contestant("mbridge", (sys.executable, BRIDGE), slow=True, packages=bridge)
    return [
        Contestant(COPY, copy, ours=True),
        Contestant("ckpt, first run", convert, plain, ours=True, fresh=True),
        Contestant("ckpt", convert, plain, ours=True),
        *several,
        Contestant("torch + safetensors", (sys.executable, NAIVE), naive, slow=True),
        *([bridged] if can else []),
    ]


def _has_workers() -> bool:
    command = [sys.executable, "-m", "ckpt", "convert", "--help"]
    return "--workers" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _available() -> int:
    """Memory that programs can have now."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def fingerprints(tensors: Iterable[tuple[str, torch.Tensor]]) -> Fingerprints:
    """Type, shape and hash of the bytes of tensors, by name; one is held at a time."""
    return {
        name: (str(value.dtype), tuple(value.shape), _digest(value.contiguous()))
        for name, value in tensors
    }


def _digest(value: torch.Tensor) -> str:
    return sha256(value.view(-1).view(torch.uint8).numpy().data).hexdigest()


def check_output(output: Path, truth: Fingerprints) -> None:
    """Exit if a converted model is not what it must be, bit for bit."""
    opened: list[Any] = [safe_open(file, "pt") for file in output.glob("*.safetensors")]
    found = fingerprints((n, file.get_tensor(n)) for file in opened for n in list(file.keys()))
    wrong = [name for name in {**found, **truth} if found.get(name) != truth.get(name)]
    if wrong:
        first = f"{found.get(wrong[0], 'nothing')}, not {truth.get(wrong[0], 'nothing')}"
        sys.exit(f"{output}: {len(wrong)} tensors differ; {wrong[0]}: {first}")


def compete(race: Race, entered: list[Contestant], options: argparse.Namespace) -> list[Row]:
    """Run everyone in turn, some rounds long; the rows of the table."""
    rows = {
        entry.name: Row(entry.name, _bar(race.case, entry), _is_worker(entry)) for entry in entered
    }
    for turn in range(options.rounds):
        for entry in entered:
            row = rows[entry.name]
            if row.failure or (entry.slow and turn >= options.slow_rounds):
                continue
            race.prepare(entry)
            try:
                run = measure(race.program(entry))
            except RunError as error:
                if entry.ours or not error.out_of_memory:
                    sys.exit(f"{entry.name}: {error}")
                row.failure = "out of memory"
                continue
            row.runs.append(run)
            row.ratios.append(run.seconds / rows[COPY].runs[turn].seconds)
            print(f"  round {turn + 1}: {entry.name} {run.seconds:.2f} s", file=sys.stderr)
            if turn == 0 and entry.name != COPY:
                check_output(race.output, race.truth)
                race.keep_reference()
            shutil.rmtree(race.output)
    return [row for row in rows.values() if row.runs or row.failure]


def _is_worker(contestant: Contestant) -> bool:
    return contestant.ours and contestant.name != COPY and not contestant.fresh


def _bar(case: Case, contestant: Contestant) -> float | None:
    if contestant.name == COPY or not contestant.ours:
        return None
    return HARD_BAR if case.fp32 or case.kind == "moe" else BAR


def run_case(name: str, size: int, place: Path, options: argparse.Namespace) -> Table:
    """Write a checkpoint, let them run, take it away."""
    case, source = CASES[name], place / "source"
    started = time.monotonic()
    model = write_checkpoint(source, case, size)
    race = Race(case, fingerprints(expected(case, model)), source, place, options.warm)
    stored = sum(file.stat().st_size for file in race.files())
    rows = compete(race, contestants(case, options.workers, options.bridge), options)
    shutil.rmtree(source)
    a, parameters = model.values, sum(prod(shape) for _, shape, _ in race.truth.values())
    print(f"  {name}: {time.monotonic() - started:.0f} s in all", file=sys.stderr)
    title = (
        f"{name}, {stored / 1e9:.2f} GB: {a.num_layers} layers, "
        f"{f'{a.num_experts} experts each, ' if a.num_experts else ''}"
        f"{'fp32 to bf16' if case.fp32 else 'bf16'}, {_ranks(case)}"
    )
    return Table(title, name, 2 * parameters, interpreter_peak(), rows)  # all are bf16 at last


def _ranks(case: Case) -> str:
    ranks = case.ranks
    experts = f" x EP{ranks.ep}, expert TP{ranks.etp}" if ranks.ep > 1 else ""
    return f"TP{ranks.tp} x PP{ranks.pp}{experts}"


def parse(arguments: list[str]) -> Any:  # noqa: ANN401 - argparse's namespace
    """The script's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--size", action="append", help="bytes of weights; may be repeated")
    add("--case", action="append", choices=CASES, help="may be repeated")
    add("--rounds", type=int, default=3, help="runs of each contestant")
    add("--slow-rounds", type=int, default=1, help="runs of those that load everything")
    add("--workers", type=int, action="append", help="may be repeated; as many as cores")
    add("--warm", action="store_true", help="read the source before each run")
    add("--bridge", type=Path, metavar="DIR", help="mbridge runs too; DIR as bench_bridge.py says")
    add("--directory", type=Path, help="where the files are written; 2.2 times the size")
    add("--json", type=Path, metavar="FILE", help="write every run there")
    add("--markdown", type=Path, metavar="FILE", help="write the tables there")
    options = parser.parse_args(arguments)
    options.sizes = [parse_size(size) for size in options.size or DEFAULT_SIZES]
    options.workers = options.workers or [max(2, os.cpu_count() or 1)]
    return options


def main() -> None:
    """Run every case of every size."""
    options, tables = parse(sys.argv[1:]), []
    torch.set_num_threads(1)  # what compares is not what is measured
    rounds = f"{options.rounds} rounds, source {'warm' if options.warm else 'cold'}"
    print(f"{machine()}; {rounds}; load {os.getloadavg()[0]:.1f}\n", flush=True)
    for size in options.sizes:
        for name in options.case or DEFAULT_CASES:
            with tempfile.TemporaryDirectory(dir=options.directory) as place:
                if shutil.disk_usage(place).free < 2.2 * size:
                    sys.exit(f"{place}: less than {2.2 * size / 1e9:.1f} GB are free")
                table = run_case(name, size, Path(place), options)
            tables.append(table)
            print(table.as_text(), end="\n\n", flush=True)
            write_json(options.json, rounds, tables)
            write_markdown(options.markdown, rounds, tables)


if __name__ == "__main__":
    main()
