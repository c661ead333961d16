"""A crew on a Ray cluster: one task for each job, tried again where a worker or a node dies.

Ray is told where its cluster is as always: by RAY_ADDRESS, else the one on this machine, else
one that begins and ends with this run.
"""

from __future__ import annotations

import json
import os
import socket
import time
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt import __version__
from ckpt.convert.crew import Done, timed
from ckpt.errors import CkptError, EngineError, OutputError, extra_hint
from ckpt.storage import MARK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import BrokenExecutor

    from ckpt.convert.crew import Job

MAX_RETRIES = 3
_ALL = 10_000  # tasks at a time: Ray knows best how many run
_CANCEL_SECONDS = 10.0
_VISIBLE_SECONDS = 10.0  # caches of network file systems hold old entries for a few seconds


class OnRay(Executor):
    """Gives each job to a cluster as one task."""

    def __init__(
        self, advance: Callable[[int], None], marker: Path | None, most: int | None = None
    ) -> None:
        """Connect; ``marker`` is a file that all nodes must see as it is here.

        At most ``most`` tasks run at a time. Raises EngineError without Ray, or where it
        cannot be reached.
        """
        self.width = most or _ALL
        self._advance = advance
        self._marker = (str(marker), marker.read_text(encoding="utf-8")) if marker else None
        self._ray, self._ours = _connect()
        task = self._ray.remote(_do)
        self._task = task.options(max_retries=MAX_RETRIES, scheduling_strategy="SPREAD")
        self._running: dict[Future[Done], Any] = {}

    def submit(self, job: Job) -> Future[Done]:  # type: ignore[override]
        """Give a job to whichever node has room."""
        reference = self._task.remote(job.work, job.needs, self._marker, __version__)
        future: Future[Done] = Future()
        self._running[future] = reference
        reference.future().add_done_callback(partial(self._pass_on, future, job))
        return future

    def _pass_on(self, future: Future[Done], job: Job, inner: Future[Any]) -> None:
        """What a task gave or raised, without Ray's wrappings."""
        error = inner.exception()
        if error is None:
            future.set_result(inner.result())
            return
        cause = getattr(error, "cause", None)
        future.set_exception(cause if isinstance(cause, CkptError) else _explain(job, error))

    def report(self, job: Job | None) -> None:
        """Tasks tell nothing until they end."""
        if job is not None:
            self._running = {each: ref for each, ref in self._running.items() if not each.done()}
            self._advance(job.nbytes)

    def stop(self) -> None:
        """Cancel what runs; leave the cluster, or end the one that was begun here."""
        rest = [ref for future, ref in self._running.items() if not future.done()]
        for reference in rest:
            self._ray.cancel(reference, force=True)
        if rest:
            self._ray.wait(rest, num_returns=len(rest), timeout=_CANCEL_SECONDS)
        if self._ours:
            self._ray.shutdown()

    def explain(self, error: BrokenExecutor, unfinished: Sequence[Job]) -> CkptError:
        """Ray breaks job by job, not as a whole."""
        del unfinished
        return OutputError(f"Ray broke: {error}")


def _connect() -> tuple[Any, bool]:
    """Ray, and whether the connection is this run's own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise EngineError(
            "--executor ray needs Ray", hint=f"On every node: {extra_hint('ray')}"
        ) from error
    if ray.is_initialized():
        return ray, False
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise EngineError(
            f"cannot reach a Ray cluster: {error}",
            hint="RAY_ADDRESS names it; without it, a cluster of this machine alone is started",
        ) from error
    return ray, True


def _do(
    work: Callable[[Callable[[int], None]], Any],
    needs: Sequence[str],
    marker: tuple[str, str] | None,
    version: str,
) -> Done:
    """The task: check that this node can do the work, and do it."""
    import ray  # noqa: PLC0415 - an extra

    where = f"{socket.gethostname()} {ray.get_runtime_context().get_node_id()}"
    if version != __version__:
        raise EngineError(
            f"another version of ckpt on node {where}", expected=version, found=__version__
        )
    for path in needs:
        if MARK not in path and not Path(path).exists():
            raise _unseen(path, where)
    if marker is not None and not _sees(*marker):
        raise _unseen(marker[0], where)
    done = timed(work, lambda _count: None)
    return Done(done.result, done.seconds, where)


def _sees(path: str, content: str) -> bool:
    end = time.monotonic() + _VISIBLE_SECONDS
    while True:
        try:
            if json.loads(Path(path).read_text(encoding="utf-8")) == json.loads(content):
                return True
        except (OSError, ValueError):
            pass
        if time.monotonic() > end:
            return False
        time.sleep(0.2)


def _unseen(path: str, where: str) -> OutputError:
    return OutputError(
        f"node {where} does not see this path as this machine does",
        file=path,
        hint="With --executor ray, source and output lie on a file system that all nodes share, "
        "at the same paths",
    )


def _explain(job: Job, error: BaseException) -> CkptError:
    text = " ".join(str(error).split())
    if "No module named 'ckpt" in text or "failed to import" in text:
        return EngineError(
            "a node of the Ray cluster cannot import ckpt",
            expected=f"ckpt {__version__} on every node",
            found=text[-300:],
        )
    return OutputError(
        f"Ray could not do {job.name}: {text[:300]}",
        hint=f"After {MAX_RETRIES} more tries; what is finished is kept, the same command goes on",
    )
