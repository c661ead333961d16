"""What people see on stderr while a stage works, and the log that a bug of ours leaves."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 5.0
_MOST_SECONDS_BETWEEN_LINES = 60.0


class Terminal:
    """Progress on stderr: a bar where a person watches, a line now and then in a log.

    A terminal that is gone or a log on a full disk loses lines, and never ends the work.
    Events go to stdout, a line of JSON each, for whoever asked for JSON.
    """

    def __init__(self, *, quiet: bool = False, as_json: bool = False) -> None:
        """Say nothing at all on stderr if ``quiet``; print events if ``as_json``."""
        self._quiet, self._as_json = quiet, as_json
        self.told: set[str] = set()  # notes that people have seen
        self._live = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self._bar: RichProgress | None = None
        self._task: Any = None
        self._label, self._unit = "", "B"
        self._total: int | None = None
        self._done, self._earlier = 0, 0
        self._started = self._last_line = 0.0

    def start(
        self, label: str, total: int | None = None, unit: str = "B", *, done: int = 0
    ) -> None:
        """Begin a bar (or print a line) for a piece of work."""
        self._label, self._total, self._unit = label, total, unit
        self._done = self._earlier = done
        self._started = self._last_line = time.monotonic()
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
        elif not self._quiet and now - self._last_line > self._pause(now):
            self._last_line = now
            self._print(self._line(now - self._started))

    def _pause(self, now: float) -> float:
        """Seconds until the next line: longer in longer work, so that logs stay short."""
        tenth = (now - self._started) / 10
        return max(SECONDS_BETWEEN_LINES, min(tenth, _MOST_SECONDS_BETWEEN_LINES))

    def _line(self, seconds: float) -> str:
        """How much is done, at which rate of this run, and how long the rest takes."""
        line = f"{self._label}: {_amount(self._done, self._unit)}"
        if self._total:
            line += f" of {_amount(self._total, self._unit)}"
        rate = (self._done - self._earlier) / seconds if seconds > 0 else 0.0
        if rate and self._unit == "B":
            line += f", {format_bytes(int(rate))}/s"
        if rate and self._total and self._total > self._done:
            line += f", {format_seconds((self._total - self._done) / rate)} left"
        return line

    def finish(self) -> None:
        """End the bar of the work that began last."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()
            self._bar = None

    def note(self, text: str) -> None:
        """Print one line, above a bar that is running."""
        if not self._quiet:
            self.told.add(text)
        if self._bar is not None:
            with suppress(OSError):
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            self._print(text)

    def event(self, name: str, facts: Mapping[str, Any]) -> None:
        """Print a line of JSON at once, if these were asked for."""
        if self._as_json:
            line = json.dumps({"event": name, **facts}, default=str)
            with suppress(OSError):
                print(line, flush=True)  # noqa: T201 - this is the terminal

    def _print(self, text: str) -> None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)  # noqa: T201 - this is the terminal

    def _begin_bar(self) -> None:
        from rich.console import Console  # noqa: PLC0415 - only where a bar is drawn
        from rich.progress import (  # noqa: PLC0415  # noqa: PLC0415
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar  # noqa: PLC0415

        in_bytes = (DownloadColumn(), TransferSpeedColumn())
        amounts = in_bytes if self._unit == "B" else (MofNCompleteColumn(),)
        text = TextColumn("{task.description}")
        columns = (text, BarColumn(), *amounts, TimeRemainingColumn())
        if not self._unit:  # nothing that could be counted
            columns = (SpinnerColumn(), text, TimeElapsedColumn())
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._label, total=self._total, completed=self._done)
        with suppress(OSError):
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


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "file"), plural(1200, "tensor")
    ('1 file', '1,200 tensors')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_seconds(seconds: float) -> str:
    """A time for people.

    >>> format_seconds(7.2), format_seconds(75), format_seconds(7260)
    ('7 s', '1 min 15 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:  # noqa: PLR2004 - a minute
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"  # noqa: PLR2004


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
