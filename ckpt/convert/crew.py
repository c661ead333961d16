"""Jobs that need nothing of each other, done by a crew: here, in processes, or on a cluster.

A crew is a ``concurrent.futures.Executor`` with a way to say how far its jobs are and a way to
end at once. The first job that fails ends all others.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from ckpt.errors import CkptError

_WAIT_SECONDS = 0.1
_MOST_WORKERS = 8
_CPUS_EACH = 2  # one copies, one hashes
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_LEAST_BYTES_EACH = 4 * 10**9  # less is written in the time that processes take to start


@dataclass(frozen=True)
class Job:
    """A piece of work: its name for people, its size, and a function that can be pickled.

    The function is given another one, which it tells the bytes as they are done. ``needs`` are
    paths that must be seen wherever it runs.
    """

    name: str
    nbytes: int
    work: Callable[[Callable[[int], None]], Any]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Done:
    """What a job gave, the seconds that it took, and where, if not on this machine."""

    result: Any
    seconds: float
    where: str = ""


class Crew(Protocol):
    """Whoever does jobs; ``width`` are given out at a time."""

    width: int

    def submit(self, job: Job) -> Future[Done]:
        """Begin a job, or do it at once."""

    def report(self, job: Job | None) -> None:
        """Pass on how far the jobs are; ``job`` is one that has just ended."""

    def stop(self) -> None:
        """End all jobs at once, and whatever did them."""

    def explain(self, error: BrokenExecutor, unfinished: Sequence[Job]) -> CkptError:
        """Why the crew broke, in words that help."""


class Here(Executor):
    """A crew of this process alone: a job is done when it is submitted."""

    width = 1

    def __init__(self, advance: Callable[[int], None]) -> None:
        """``advance`` is told bytes as they are done."""
        self._advance = advance

    def submit(self, job: Job) -> Future[Done]:  # type: ignore[override]
        """Do a job; whatever it raises is raised here."""
        future: Future[Done] = Future()
        future.set_result(timed(job.work, self._advance))
        return future

    def report(self, job: Job | None) -> None:
        """Nothing is left to say."""

    def stop(self) -> None:
        """Nothing is left to end."""

    def explain(self, error: BrokenExecutor, unfinished: Sequence[Job]) -> CkptError:
        """This process does not break."""
        del unfinished
        raise error


def timed(work: Callable[[Callable[[int], None]], Any], advance: Callable[[int], None]) -> Done:
    """What the work gives, with its seconds."""
    started = time.monotonic()
    result = work(advance)
    return Done(result, time.monotonic() - started)


def carry_through(jobs: Sequence[Job], crew: Crew) -> Generator[tuple[Job, Done], None, None]:
    """Do all jobs and give each as it ends; what the first failed one raised ends all.

    Raises what jobs raise, and CkptError for a crew that broke.
    """
    waiting, running = list(reversed(jobs)), dict[Future[Done], Job]()
    try:
        while waiting or running:
            while waiting and len(running) < crew.width:
                job = waiting.pop()
                running[crew.submit(job)] = job
            ended, _ = wait(running, timeout=_WAIT_SECONDS, return_when=FIRST_COMPLETED)
            crew.report(None)
            for future in ended:
                done, job = future.result(), running[future]
                del running[future]
                crew.report(job)
                yield job, done
    except BrokenExecutor as error:
        raise crew.explain(error, list(running.values())) from error
    finally:
        crew.stop()


def choose_workers(wanted: int | None, files: int, nbytes: int) -> int:
    """How many processes write so many files: as wanted, or what fits the machine and the work.

    ``wanted`` None leaves it to the number of CPUs and to the bytes. Never more than files.
    """
    if wanted is None:
        wanted = min(usable_cpus() // _CPUS_EACH, _MOST_WORKERS, nbytes // _LEAST_BYTES_EACH)
    return max(1, min(wanted, files))


def usable_cpus(limit: Path = _CPU_LIMIT) -> int:
    """CPUs that this process may use: those it is bound to, and no more than a container's limit.

    ``limit`` is the file of control groups with it (Linux, cgroup-v2.rst, "cpu.max").
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = map(int, limit.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # no limit is written as a word
        return cpus or 1
    return max(1, min(cpus or 1, quota // max(period, 1)))
