"""Jobs for workers: they are found by their names in other processes, so they need a module."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

from ckpt.convert.crew import Job
from ckpt.errors import SourceError


def _double(number, advance):
    for _ in range(number):
        advance(1)
    return 2 * number, os.getpid()


def double(number):
    """Gives twice the number and its process, and tells of as many bytes."""
    return Job(f"double {number}", number, partial(_double, number))


def _fail(text, advance):
    advance(1)
    raise SourceError(text, file="a.pt", tensor="w", expected=1, found=(2, 3), hint="Mend it")


def fail(text):
    """Raises an error with all its facts."""
    return Job("fail", 1, partial(_fail, text))


def _sleep(place, seconds, _advance):
    (Path(place) / f"{os.getpid()}.pid").touch()
    time.sleep(seconds)


def sleep(place, seconds=120.0, number=0):
    """Leaves its process number as a file in ``place``, and sleeps."""
    return Job(f"sleep {number}", 1, partial(_sleep, str(place), seconds))


def _die_once(place, number, _advance):
    marker = Path(place) / "died"
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), number)
    return "done"


def die_once(place, number=9, name="die"):
    """Is killed by a signal at its first try, and does well at the next one."""
    return Job(name, 1, partial(_die_once, str(place), number))


def _modules(_advance):
    return sorted(sys.modules)


def modules():
    """What the process has imported."""
    return Job("modules", 1, _modules)
