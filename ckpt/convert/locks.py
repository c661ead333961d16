"""Who may write an output: one run alone, or several that each write a part of it.

Locks are flock(2) on ``.OUT.ckpt-lock`` beside the output, exclusive for a whole run and shared
by parts, and on one more file for each part. The kernel drops them when a process ends, however
it ends, so there are no stale ones. Lock files are removed by the last that holds them; whoever
locked a file that was removed meanwhile sees that its inode is not the path's, and tries again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import socket
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ckpt.errors import OutputError
from ckpt.storage import is_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckpt.convert.share import Share

_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
_PATIENCE_SECONDS = 1.0  # for locks that are held for a moment only
_SETTING_UP_SECONDS = 60.0  # for a part that removes what an earlier conversion left
_SETTING_UP = "setting up"
_PAUSE_SECONDS = 0.02


class Lock:
    """One lock file. ``supported`` is false where the file system has no locks."""

    def __init__(self, file: Path) -> None:
        """Nothing is opened or locked yet."""
        self._file = file
        self._fd: int | None = None
        self.supported = True

    def take(self, *, shared: bool) -> bool:
        """Try once to lock, or to lock otherwise than before; False if others are in the way.

        A lock that was held is lost when this fails. Raises OutputError where the lock file
        cannot be made.
        """
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        while True:
            if self._fd is None:
                self._fd = self._open()
            try:
                fcntl.flock(self._fd, kind)
            except BlockingIOError:
                self.drop()
                return False
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise _cannot(self._file, error) from error
                self.supported = False
                return True
            if self._is_current():
                return True
            self.drop()

    def sign(self, doing: str = "") -> None:
        """Write into the file who holds it, and for what."""
        if self._fd is not None:
            now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
            text = f"{doing} pid {os.getpid()} on {socket.gethostname()}, since {now}\n".lstrip()
            with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, text.encode(), 0)

    def holder(self) -> str:
        """Who signed last."""
        try:
            return self._file.read_text(encoding="utf-8").strip() or "an unnamed process"
        except (OSError, UnicodeDecodeError):
            return "an unnamed process"

    def drop(self) -> None:
        """Hold nothing any more; the file stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def remove(self) -> None:
        """Drop the lock, and the file with it unless others hold it."""
        if self._fd is None:
            return
        if not self.supported or self.take(shared=False):
            with contextlib.suppress(OSError):
                self._file.unlink()
        self.drop()

    def _open(self) -> int:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise _cannot(self._file, error) from error

    def _is_current(self) -> bool:
        """Whether the path still leads to the file that is locked."""
        mine = os.fstat(self._fd or 0)
        try:
            named = self._file.stat()
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)


class NoLock(Lock):
    """What an object store has instead of locks: nothing."""

    def __init__(self) -> None:
        """There is no file."""
        self.supported = False

    def take(self, *, shared: bool) -> bool:
        """Taken, as far as anybody can tell."""
        del shared
        return True

    def sign(self, doing: str = "") -> None:
        """Nobody reads it."""


def _cannot(file: Path, error: OSError) -> OutputError:
    output = file.with_name(file.name.removeprefix(".").partition(".ckpt-lock")[0])
    reason, hint = error.strerror, "Choose an output in a place that you may write"
    if error.errno in {errno.EEXIST, errno.ENOTDIR}:
        reason = "a part of its path is a file"
        hint = "Choose an output whose path leads through directories alone"
    return OutputError(f"cannot write here: {reason}", file=output, hint=hint)


@dataclass(frozen=True)
class Claim:
    """The right to write an output; ``alone`` where no other process may have it too."""

    output: Path
    run: Lock
    alone: bool
    share: Share | None = None

    @property
    def sure(self) -> bool:
        """Whether the file system keeps others away, and not only their good will."""
        return self.run.supported

    @contextmanager
    def set_up(self, is_ready: Callable[[], bool]) -> Iterator[None]:
        """Hold the output alone for a moment, unless ``is_ready()``; then as before.

        Parts that start together set up one after another: the first does it, the others find
        it done. Raises OutputError while other parts are at work.
        """
        if self.alone:
            yield
            return
        end = time.monotonic() + _PATIENCE_SECONDS
        while not is_ready() and not self.run.take(shared=False):
            if time.monotonic() > end:
                raise OutputError(
                    "parts of another conversion, or other parts of this one, are being written",
                    file=self.output,
                    found=", ".join(parts_at_work(self.output, but=self.share)) or None,
                    hint="Wait for them or stop them, or choose another output",
                )
            _pause()
            _take(self.run, self.output, shared=True)
        if is_ready():
            _take(self.run, self.output, shared=True)
            yield
            return
        self.run.sign(_SETTING_UP)
        try:
            yield
        finally:
            _take(self.run, self.output, shared=True)


@contextmanager
def claim(output: Path, share: Share, note: Callable[[str], None]) -> Iterator[Claim]:
    """Hold the output for a whole run or for one part of it.

    ``note`` hears of a file system without locks. Raises OutputError, naming the process and
    its host, while others are in the way.
    """
    parts = share.partial and not share.finalize
    if is_remote(output):
        note(f"note: no locks in a store: nothing else may write {output} now")
        yield Claim(output, NoLock(), alone=not parts)
        return
    run, locks = Lock(_run_file(output)), []
    try:
        _take(run, output, shared=parts)
        locks.append(run)
        if parts:
            locks.append(_take_part(output, share))
        else:
            run.sign()
        if not run.supported:
            note(f"note: no locks on this file system: nothing else may write {output} now")
        yield Claim(output, run, alone=not parts, share=share)
    finally:
        for lock in reversed(locks):
            lock.remove()


def parts_at_work(output: Path, *, but: Share | None = None) -> list[str]:
    """Each part that a process holds now, with that process; not the part of whoever asks."""
    found, own = [], _part_file(output, but) if but else None
    for file in sorted(output.parent.glob(f".{output.name}.ckpt-lock-*")):
        if file == own:
            continue
        lock = Lock(file)
        if not lock.take(shared=True):
            part = file.name.rpartition("ckpt-lock-")[2].replace("-", " ")
            found.append(f"part {part}: {lock.holder()}")
        lock.drop()
    return found


def _take(run: Lock, output: Path, *, shared: bool) -> None:
    """Lock the output, with patience for those that only set up."""
    start = time.monotonic()
    while not run.take(shared=shared):
        parts = [] if shared else parts_at_work(output)
        holder, waited = run.holder(), time.monotonic() - start
        patience = _SETTING_UP_SECONDS if _SETTING_UP in holder else _PATIENCE_SECONDS
        if parts or waited > patience:
            raise OutputError(
                "another ckpt is writing this output",
                file=output,
                found=", ".join(parts) or holder,
                hint="Wait for it, or stop it; then the same command goes on where it was",
            )
        _pause()


def _take_part(output: Path, share: Share) -> Lock:
    lock = Lock(_part_file(output, share))
    if not lock.take(shared=False):
        raise OutputError(
            f"{share} ({share.options()}) is being written by another ckpt",
            file=output,
            found=lock.holder(),
            hint="Give each process a part of its own",
        )
    lock.sign()
    return lock


def _part_file(output: Path, share: Share) -> Path:
    return output.with_name(f".{output.name}.ckpt-lock-{share.index + 1}-of-{share.of}")


def _run_file(output: Path) -> Path:
    return output.with_name(f".{output.name}.ckpt-lock")


def _pause() -> None:
    """A moment of random length: those that wait for each other must not keep step."""
    time.sleep(_PAUSE_SECONDS * (1 + random.random()))  # noqa: S311 - no secret
