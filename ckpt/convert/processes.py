"""A crew of processes on this machine.

They are spawned, import what writing needs and no more, and are told of nothing by the terminal:
Ctrl-C reaches this process, which ends them. When this process ends in any way, so do they.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import threading
import time
import types
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import parent_process, resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import TYPE_CHECKING, Any

from ckpt.convert.crew import timed
from ckpt.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import BrokenExecutor, Future
    from multiprocessing.connection import Connection

    from ckpt.convert.crew import Done, Job
    from ckpt.errors import CkptError

# Process, job, bytes: short enough that a pipe takes each at once, whoever else writes
# (PIPE_BUF, pipe(7)), so no lock is needed that a killed process might hold.
_NEWS = struct.Struct("<qqq")
_NEWS_SECONDS = 0.1
_TRACKER_WARNING = "ignore:resource_tracker:UserWarning"
_BEGUN, _ENDED = -1, -2
_ENDED_BY_POOL = {None, 0, -signal.SIGTERM}  # or not ended
_EXIT_SECONDS = 1.0  # until the system has told how a process ended


@contextlib.contextmanager
def _nothing_inherited() -> Iterator[None]:
    """Spawn without this program's main module, and deaf to Ctrl-C from the first moment on.

    A child would import the main module again: all of the command line, or a user's script.
    """
    main, empty = sys.modules["__main__"], types.ModuleType("__main__")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.modules["__main__"] = empty
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_quiet_tracker() -> None:
    """Start the library's watcher of semaphores, silent: a kill leaves some, which it removes."""
    sys.warnoptions.append(_TRACKER_WARNING)
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(_TRACKER_WARNING)


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: ANN401, N802 - the library's name and types
        with _nothing_inherited():
            return SpawnProcess._Popen(process_obj)  # noqa: SLF001


class _Context(SpawnContext):
    """Spawns such processes, and remembers them."""

    def __init__(self) -> None:
        self.processes: list[_Process] = []
        super().__init__()

    def Process(self, *args: Any, **kwargs: Any) -> _Process:  # type: ignore[override]  # noqa: ANN401, N802
        process = _Process(*args, **kwargs)
        self.processes.append(process)
        return process


class _News:
    """In a worker: tells the parent which job it does and how far it is, now and then."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._job = pipe, 0
        self._bytes, self._told = 0, 0.0

    def begin(self, job: int) -> None:
        self._job = job
        self._tell(_BEGUN)

    def advance(self, count: int) -> None:
        self._bytes += count
        if time.monotonic() - self._told > _NEWS_SECONDS:
            self.flush()

    def end(self) -> None:
        self.flush()
        self._tell(_ENDED)

    def flush(self) -> None:
        if self._bytes:
            self._tell(self._bytes)
            self._bytes, self._told = 0, time.monotonic()

    def _tell(self, value: int) -> None:
        os.write(self._pipe.fileno(), _NEWS.pack(os.getpid(), self._job, value))


_news: list[_News] = []  # of this process, if it is a worker


def _begin_worker(pipe: Connection) -> None:
    _news[:] = [_News(pipe)]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Also when it was killed: then nobody else can end this process."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(work: Callable[[Callable[[int], None]], Any], number: int) -> Done:
    (news,) = _news
    news.begin(number)
    done = timed(work, news.advance)
    news.end()
    return done


class Processes(ProcessPoolExecutor):
    """A pool of spawned processes that are ended at once when asked."""

    def __init__(self, workers: int, advance: Callable[[int], None]) -> None:
        """``workers`` processes, started as jobs come; ``advance`` is told bytes."""
        self.width = workers + 1  # one more waits, so that no worker does
        self._advance = advance
        _start_quiet_tracker()
        self._context = _Context()
        self._reader, writer = self._context.Pipe(duplex=False)
        os.set_blocking(self._reader.fileno(), False)
        self._jobs: list[Job] = []
        self._at: dict[int, Job] = {}
        self._rest = b""
        super().__init__(
            workers, mp_context=self._context, initializer=_begin_worker, initargs=(writer,)
        )

    def submit(self, job: Job) -> Future[Done]:  # type: ignore[override]
        """Give a job to the next process that is free."""
        self._jobs.append(job)
        return super().submit(_do, job.work, len(self._jobs) - 1)

    def report(self, job: Job | None) -> None:
        """Pass on the bytes that the processes have told of.

        Raises BrokenProcessPool for a process that was ended: the pool by itself does not see
        the end of the process that it started last before something else happens.
        """
        del job
        self._hear()
        if any(code not in _ENDED_BY_POOL for _, code in self._codes()):
            raise BrokenProcessPool("a process was ended from outside")

    def _hear(self) -> None:
        while content := self._read():
            self._rest += content
            whole = len(self._rest) // _NEWS.size * _NEWS.size
            for process, number, value in _NEWS.iter_unpack(self._rest[:whole]):
                if value == _BEGUN:
                    self._at[process] = self._jobs[number]
                elif value == _ENDED:
                    self._at.pop(process, None)
                else:
                    self._advance(value)
            self._rest = self._rest[whole:]

    def _read(self) -> bytes:
        try:
            return os.read(self._reader.fileno(), 1 << 16)
        except BlockingIOError:
            return b""

    def stop(self) -> None:
        """Kill all processes and wait for their end."""
        for process in self._context.processes:
            with contextlib.suppress(ValueError, AttributeError):  # never started
                process.kill()
        self.shutdown(wait=True, cancel_futures=True)

    def explain(self, error: BrokenExecutor, unfinished: Sequence[Job]) -> CkptError:
        """Name the process that was ended from outside, and what it was at."""
        del error
        self._hear()
        died = self._died()
        names = [self._at[pid].name for pid, _ in died if pid in self._at]
        how = ", ".join(dict.fromkeys(_describe_exit(code or 0) for _, code in died))
        return OutputError(
            f"a worker process {how or 'ended'} while it was at "
            + ", ".join(names or [job.name for job in unfinished]),
            hint="If memory ran out (signal 9), give fewer --workers; the same command goes on",
        )

    def _codes(self) -> list[tuple[int | None, int | None]]:
        return [(process.pid, process.exitcode) for process in self._context.processes]

    def _died(self) -> list[tuple[int | None, int | None]]:
        """Processes that something else than the pool has ended, with their exit codes."""
        end = time.monotonic() + _EXIT_SECONDS
        while True:
            died = [each for each in self._codes() if each[1] not in _ENDED_BY_POOL]
            if died or time.monotonic() > end:
                return died
            time.sleep(0.01)


def _describe_exit(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
