"""A server that has answered, and the way to that first answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.errors import ServeError

if TYPE_CHECKING:
    from ckpt.config import ServeOptions
    from ckpt.progress import Progress
    from ckpt.serve.agreement import Agreement
    from ckpt.serve.client import Answer, Client
    from ckpt.serve.command import Command
    from ckpt.serve.preflight import Model
    from ckpt.serve.process import ServerProcess

DEMO_PROMPT = "What is a checkpoint?"
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class RunningServer:
    """A server that has answered; ``reasons`` say what was chosen and what is lost."""

    url: str
    model: Model
    command: Command
    process: ServerProcess
    client: Client
    tensor_parallel: int
    reasons: tuple[str, ...]
    startup_seconds: float
    agreement: Agreement | None
    comparison: str

    def as_dict(self) -> dict[str, Any]:
        """The server for machines."""
        return {
            "url": f"{self.url}/v1",
            "model": self.command.model_name,
            "engine": self.command.engine,
            "dtype": self.command.dtype,
            "tensor_parallel": self.tensor_parallel,
            "reasons": list(self.reasons),
            "startup_seconds": round(self.startup_seconds, 3),
            "comparison": self.comparison,
            "agreement": self.agreement.as_dict() if self.agreement else None,
            "log": str(self.process.log),
            "pid": self.process.pid,
        }

    def as_text(self) -> str:
        """The server for people: where it is, what it is, and what it has shown."""
        return "\n".join(
            [
                f"ready: {self.url}/v1  model {self.command.model_name}",
                f"{self.command.engine}, {self.command.dtype}",
                f"first answer {self.startup_seconds:.1f} s after its start",
                *self.reasons,
                self.comparison,
                f"log: {self.process.log}",
            ]
        )

    def chat(self, prompt: str, *, max_tokens: int = 64) -> Answer:
        """A streamed answer to one message; raises ServeError when none comes."""
        return self.client.chat(prompt, max_tokens=max_tokens)

    def demonstrate(self, progress: Progress) -> Answer | None:
        """One streamed chat answer, or None (with a note) for a model without a template."""
        if not (self.model.has_tokenizer and self.model.has_chat_template):
            progress.note("no chat answer: the model has no chat template")
            return None
        return self.chat(DEMO_PROMPT)

    def wait(self) -> None:
        """Return never while the server runs; raises ServeError when it ends by itself."""
        while True:
            self.process.check_alive()
            time.sleep(_POLL_SECONDS)


def wait_until_ready(
    process: ServerProcess,
    client: Client,
    command: Command,
    options: ServeOptions,
    progress: Progress,
) -> float:
    """Seconds until the server gave a real completion; ``/health`` alone proves nothing.

    Raises ServeError when the process ends, when time is up, or when it cannot answer.
    """
    started = time.monotonic()
    deadline = started + options.startup_timeout_seconds
    progress.start("starting the server", None, "s")
    try:
        _wait_healthy(process, client, deadline, progress)
        _answer_once(process, client, command, deadline)
        if options.chat_template:
            client.chat("Hello", max_tokens=1)
    finally:
        progress.finish()
    return time.monotonic() - started


def _wait_healthy(
    process: ServerProcess, client: Client, deadline: float, progress: Progress
) -> None:
    started, reported = time.monotonic(), 0
    while not client.is_healthy():
        process.check_alive()
        now = time.monotonic()
        if now > deadline:
            raise ServeError(
                f"not healthy after {now - started:.0f} s: {process.cause()}",
                hint=f"Its output is in {process.log}; a longer --startup-timeout may help",
            )
        progress.advance(int(now - started) - reported)
        reported = int(now - started)
        time.sleep(_POLL_SECONDS)


def _answer_once(process: ServerProcess, client: Client, command: Command, deadline: float) -> None:
    prompt: list[int] | str = [0, 1] if command.takes_token_ids else "a"
    remaining = max(1.0, deadline - time.monotonic())
    try:
        _check_name(client)
        client.complete(prompt, timeout_seconds=remaining)
        process.check_alive()
    except ServeError as error:
        process.check_alive()
        raise ServeError(
            f"the server says that it is healthy but cannot answer: {error}; {process.cause()}",
            hint=f"Its output is in {process.log}",
        ) from error


def _check_name(client: Client) -> None:
    names = client.model_names()
    if client.model not in names:
        raise ServeError(
            "another server answers here", expected=client.model, found=", ".join(names)
        )
