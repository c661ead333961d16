"""A server process as a context manager: its own session, a log file, a deadline, no orphans."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.errors import ServeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

STOP_SECONDS = 40.0
_LOG_TAIL_BYTES = 256 * 1024
_PREFIX = re.compile(r"^\([^)]*\)\s*|^(ERROR|INFO|WARNING) [\d:. -]+(\[[^\]]*\]\s*)?")
_CAUSE = re.compile(r"^[\w.]*(Error|Exception|Exit)\b.*: ?\S")
_GENERIC = ("Engine core initialization failed", "EngineDeadError", "WorkerProc initialization")


class ServerProcess(AbstractContextManager["ServerProcess"]):
    """Runs a command in a session of its own and ends the whole session on exit."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """The command, what is added to the environment, and where its output goes."""
        self._argv, self._environment, self.log = list(argv), dict(environment), log
        self._process: subprocess.Popen[bytes] | None = None
        self._shared_memory = _shared_memory()

    def __enter__(self) -> Self:
        """Start the process."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as stream:
            self._process = subprocess.Popen(  # noqa: S603 - built by command.py
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the process and all that it started."""
        self.stop()

    @property
    def pid(self) -> int:
        """The process's id, which is also that of its group."""
        return self._process.pid if self._process else 0

    def exit_code(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll() if self._process else None

    def check_alive(self) -> None:
        """Raise ServeError when the process has ended, with the cause that its log names."""
        code = self.exit_code()
        if code is not None:
            raise ServeError(
                f"the server ended by itself with exit status {code}: {self.cause()}",
                hint=f"Its whole output is in {self.log}",
            )

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        """SIGTERM to the group, SIGKILL to what is left after the deadline."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        while self._group_is_alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for file in _shared_memory() - self._shared_memory:
            with contextlib.suppress(OSError):
                file.unlink()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _group_is_alive(self) -> bool:
        """Whether any process of the group still runs; zombies do not count."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.pid and fields[0] != "Z":
                    return True
        return False

    def cause(self) -> str:
        """The first error that the log names, without the prefixes of vLLM's processes."""
        lines = self._tail()
        for line in lines:
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


def _shared_memory() -> set[Path]:
    """Files that vLLM's CPU ranks leave in shared memory."""
    return set(Path("/dev/shm").glob("vllm_dist_*"))  # noqa: S108 - the kernel's own place
