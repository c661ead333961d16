"""What the benchmark says: a table for people, JSON, and the same table for docs/performance.md."""

from __future__ import annotations

import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench_measure import Run

COLUMNS = (
    "", "median s", "x cp", "bar", "MB/s", "CPU s", "read GB", "written GB", "from disk GB",
    "peak MiB", "above Python",
)  # fmt: skip
BEGIN, END = "<!-- bench: begin -->\n", "<!-- bench: end -->\n"
RSS_BAR_BYTES = 300_000_000


@dataclass
class Row:
    """A contestant's runs, its ratios to the copy of the same round, or why it has none."""

    name: str
    bar: float | None = None
    worker: bool = False
    runs: list[Run] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    failure: str = ""

    def median(self, name: str) -> float:
        """The median of one figure over the rounds."""
        return float(statistics.median(getattr(run, name) for run in self.runs))

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios)

    @property
    def peak_bytes(self) -> int:
        """The highest of all rounds."""
        return max(run.peak_bytes for run in self.runs)


@dataclass(frozen=True)
class Table:
    """The rows of one checkpoint."""

    title: str
    case: str
    weight_bytes: int
    interpreter_bytes: int
    rows: list[Row]

    def cells(self) -> list[tuple[str, ...]]:
        """The table's lines, its head first."""
        return [COLUMNS, *(self._line(row) for row in self.rows)]

    def _line(self, row: Row) -> tuple[str, ...]:
        if row.failure:
            return (row.name, row.failure, *[""] * (len(COLUMNS) - 2))
        above = row.peak_bytes - self.interpreter_bytes
        memory = f"{above / 2**20:.0f}"
        if row.worker:  # the first run's largest process is not a worker: it builds the proof
            memory += " holds" if above < RSS_BAR_BYTES else " missed"
        return (
            row.name,
            f"{row.median('seconds'):.2f}",
            f"{row.ratio:.2f}",
            "" if row.bar is None else f"{row.bar} {_verdict(row)}",
            f"{self.weight_bytes / row.median('seconds') / 1e6:.0f}",
            f"{row.median('cpu_seconds'):.1f}",
            *(f"{row.median(name) / 1e9:.2f}" for name in ("read", "written", "disk_read")),
            f"{row.peak_bytes / 2**20:.0f}",
            memory,
        )

    def as_text(self) -> str:
        """For a terminal."""
        cells = self.cells()
        widths = [max(len(line[at]) for line in cells if at != 1 or line[2]) for at in range(11)]
        lines = [
            line[0].ljust(widths[0])
            + "".join(
                "  " + cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)
            )
            for line in cells
        ]
        return "\n".join([self.title, *(line.rstrip() for line in lines)])

    def as_markdown(self) -> str:
        """For the documents."""
        head, *lines = ("| " + " | ".join(line) + " |" for line in self.cells())
        rule = "|---" * len(COLUMNS) + "|"
        return "\n".join([f"### {self.title}", "", head, rule, *lines])

    def as_dict(self) -> dict[str, Any]:
        """For machines: every run."""
        return asdict(self)


def _verdict(row: Row) -> str:
    return "holds" if row.bar is not None and row.ratio <= row.bar else "missed"


def write_json(file: Path | None, rounds: str, tables: list[Table]) -> None:
    """Every run of every contestant, if a file is wanted."""
    if file:
        content = {"machine": machine(), "rounds": rounds, "tables": [t.as_dict() for t in tables]}
        file.write_text(json.dumps(content, indent=1), encoding="utf-8")


def write_markdown(file: Path | None, rounds: str, tables: list[Table]) -> None:
    """The tables, if a file is wanted: between the marks of one that has them, else alone."""
    if not file:
        return
    known = file.read_text(encoding="utf-8") if file.is_file() else BEGIN + END
    before, _, rest = known.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest:
        raise SystemExit(f"{file}: the line {BEGIN.strip()} is missing")
    parts = [f"{machine()}; {rounds}.", *(table.as_markdown() for table in tables)]
    text = before + BEGIN + "\n" + "\n\n".join(parts) + "\n\n" + END + after
    file.write_text(text, encoding="utf-8")


def machine() -> str:
    """The machine in a line."""
    return (
        f"{_cpu()}, {os.cpu_count()} cores, {_memory() / 2**30:.0f} GiB of memory, "
        f"{platform.system()} {platform.release().partition('-')[0]}, "
        f"Python {platform.python_version()}"
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
