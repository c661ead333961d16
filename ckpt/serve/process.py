"""A server process: its own session, a log file, a deadline, no orphans."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.errors import ServeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# vLLM ignores SIGTERM through most of its start, and lets requests end (for 30 s) once it is up.
GRACE_STARTING_SECONDS = 5.0
GRACE_READY_SECONDS = 40.0
GRACE_ORPHANS_SECONDS = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SOCKET_PATH_LIMIT = 60
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's own place
_PROC = Path("/proc")
_LOG_TAIL_BYTES = 256 * 1024
_PREFIX = re.compile(r"^\([^)]*\)\s*|^(ERROR|INFO|WARNING) [\d:. -]+(\[[^\]]*\]\s*)?")
_CAUSE = re.compile(r"^[\w.]*(Error|Exception|Exit)\b.*: ?\S|^Worker proc .* died unexpectedly")
_HARMLESS = re.compile(r"^(\([^)]*\)\s*)*(INFO|WARNING) ")
_GENERIC = ("Engine core initialization failed", "EngineDeadError", "WorkerProc initialization")


class ServerProcess:
    """Runs a command in a session of its own, and ends that whole session.

    ``directory`` gets ``server.log`` and, while the process lives, its temporary files.
    """

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], directory: Path
    ) -> None:
        """The command, what is added to the environment, and where its files go."""
        self._argv, self._environment = list(argv), dict(environment)
        self.log = directory / "server.log"
        self.grace_seconds = GRACE_STARTING_SECONDS
        self._scratch = directory / "tmp"
        self._process: subprocess.Popen[bytes] | None = None
        self._runs: set[str] = set()

    def start(self) -> None:
        """Start the process; call :meth:`stop` whatever happens afterwards."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self._environment}
        if len(str(self._scratch)) <= _SOCKET_PATH_LIMIT:
            # Its sockets and the names of its shared memory are then known, to be removed.
            environment["TMPDIR"] = str(self._scratch)
        with self.log.open("wb") as stream, _signals_held():
            self._process = subprocess.Popen(  # noqa: S603 - built by command.py
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process's id, which is also that of its session and group."""
        return self._process.pid if self._process else 0

    def check_alive(self) -> None:
        """Raise ServeError when the process has ended, with the cause that its log names."""
        self._note_runs()
        code = self._process.poll() if self._process else None
        if code is not None:
            raise ServeError(
                f"the server ended by itself with exit status {code}: {self.cause()}",
                hint=f"Its whole output is in {self.log}",
            )

    def stop(self) -> None:
        """SIGTERM, up to ``grace_seconds`` of time, then SIGKILL to all that is left.

        An interruption while this waits skips the waiting, not the killing.
        """
        if self._process is None:
            return
        self._note_runs()
        try:
            self._end(self._process)
        finally:
            with _signals_held():
                self._kill_session()
                self._process.wait()
                self._remove_leftovers()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Ask the server to end; it tells its own workers, in its own order."""
        if process.poll() is None:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.grace_seconds)
        deadline = time.monotonic() + min(self.grace_seconds, GRACE_ORPHANS_SECONDS)
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _kill_session(self) -> None:
        """SIGKILL to every process of the session, also to those with a group of their own."""
        deadline = time.monotonic() + GRACE_STARTING_SECONDS
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not _PROC.is_dir():
                os.killpg(self.pid, signal.SIGKILL)
        while (members := self.members()) and time.monotonic() < deadline:
            for pid in members:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def members(self) -> list[int]:
        """Ids of the session's processes that still run; zombies do not count."""
        found = []
        for stat in _PROC.glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, _, group, session = stat.read_text().rpartition(")")[2].split()[:4]
                if self.pid in (int(group), int(session)) and state != "Z":
                    found.append(int(stat.parent.name))
        return found

    def _remove_leftovers(self) -> None:
        """Remove sockets and shared memory of this run, of no other server's."""
        self._note_runs()
        for run in self._runs:
            for file in _SHARED_MEMORY.glob(f"{run}*"):
                with contextlib.suppress(OSError):
                    file.unlink()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _note_runs(self) -> None:
        """Remember how vLLM names its shared memory: the file that says so is gone at its end."""
        self._runs |= {marker.name for marker in self._scratch.glob("vllm_dist_*")}

    def cause(self) -> str:
        """The first error that the log names, without the prefixes of vLLM's processes."""
        lines = self._tail()
        for line in lines:
            if _HARMLESS.match(line):
                continue
            plain = line
            while (shorter := _PREFIX.sub("", plain)) != plain:
                plain = shorter
            plain = plain.strip()
            if _CAUSE.match(plain) and not any(text in plain for text in _GENERIC):
                return plain[:500]
        return " / ".join(line.strip() for line in lines[-5:] if line.strip()) or "no output"

    def _tail(self) -> list[str]:
        try:
            with self.log.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(0, size - _LOG_TAIL_BYTES))
                return stream.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold interruptions back, so that none falls between a process and the record of it."""
    caught: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if callable(signal.getsignal(number)):
                before[number] = signal.signal(number, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        signal.raise_signal(caught[0])
