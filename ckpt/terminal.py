"""What people see on stderr while a stage works, and the log that a bug of ours leaves."""

from __future__ import annotations

import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt import __version__

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 5.0


class Terminal:
    """Progress on stderr: a bar where a person watches, a line now and then in a log."""

    def __init__(self, *, quiet: bool = False) -> None:
        """Say nothing at all if ``quiet``."""
        self._quiet = quiet
        self._live = sys.stderr.isatty() and not quiet
        self._bar: RichProgress | None = None
        self._task: Any = None
        self._label, self._unit = "", "B"
        self._total: int | None = None
        self._done, self._last_line = 0, 0.0

    def start(self, label: str, total: int | None = None, unit: str = "B") -> None:
        """Begin a bar (or print a line) for a piece of work."""
        self._label, self._total, self._unit, self._done = label, total, unit, 0
        self._last_line = time.monotonic()
        if self._live:
            self._begin_bar()
        elif not self._quiet:
            amount = f" ({_amount(total, unit)})" if total else ""
            self._print(f"{label}{amount} ...")

    def advance(self, amount: int) -> None:
        """Move the bar, or print a line if the last one is some seconds old."""
        self._done += amount
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif not self._quiet and now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            total = f" of {_amount(self._total, self._unit)}" if self._total else ""
            self._print(f"{self._label}: {_amount(self._done, self._unit)}{total}")

    def finish(self) -> None:
        """End the bar of the work that began last."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def note(self, text: str) -> None:
        """Print one line, above a bar that is running."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            self._print(text)

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - this is the terminal

    def _begin_bar(self) -> None:
        from rich.console import Console  # noqa: PLC0415 - only where a bar is drawn
        from rich.progress import (  # noqa: PLC0415  # noqa: PLC0415
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar  # noqa: PLC0415

        amount = DownloadColumn() if self._unit == "B" else MofNCompleteColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._label, total=self._total)
        self._bar.start()


def _amount(count: int | None, unit: str) -> str:
    if unit != "B" or count is None:
        return f"{count} {unit}"
    return format_bytes(count)


def format_bytes(count: int) -> str:
    """A size for people.

    >>> format_bytes(999), format_bytes(5_000_000_000)
    ('999 B', '5.0 GB')
    """
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:  # noqa: PLR2004 - SI steps
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def write_bug_log(error: BaseException) -> Path:
    """A file with versions and traceback, ready to paste into a bug report."""
    lines = [
        f"ckpt {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"arguments: {sys.argv[1:]}",
        "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    ]
    with tempfile.NamedTemporaryFile(
        "w", prefix="ckpt-bug-", suffix=".log", delete=False, encoding="utf-8"
    ) as stream:
        stream.write("\n".join(lines))
    return Path(stream.name)
