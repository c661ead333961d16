"""The serve stage: an OpenAI-compatible server that has shown that it answers as the original."""

from __future__ import annotations

import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.engines import Engine, find_vllm, has_gpu
from ckpt.errors import EngineError, ServeError
from ckpt.progress import Progress, Silent
from ckpt.serve.command import (
    Command,
    check_representable,
    count_cores,
    embedded_command,
    embedded_is_there,
    vllm_command,
)
from ckpt.serve.preflight import Model, check_model, free_port
from ckpt.serve.probe import Agreement, Answer, Client, compare_with_original
from ckpt.serve.process import ServerProcess
from ckpt.serve.tensor_parallel import Devices, choose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.config import ServeOptions

__all__ = ["RunningServer", "running_server", "serve_model"]
DEMO_PROMPT = "What is a checkpoint?"
_POLL_SECONDS = 0.5
_ANY = ("0.0.0.0", "::")  # noqa: S104 - addresses that are listened on, not connected to


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
            "agreement": self.agreement.as_dict() if self.agreement else None,
            "log": str(self.process.log),
            "pid": self.process.pid,
        }

    def as_text(self) -> str:
        """The server for people: where it is, what it is, and what it has shown."""
        lines = [
            f"ready: {self.url}/v1  model {self.command.model_name}",
            f"{self.command.engine}, {self.command.dtype}, "  # noqa: ISC004 - one line of text
            f"answered {self.startup_seconds:.1f} s after its start",
            *self.reasons,
            self.agreement.as_text() if self.agreement else "not compared with the original",
            f"log: {self.process.log}",
        ]
        return "\n".join(lines)

    def demonstrate(self, progress: Progress) -> Answer | None:
        """One streamed chat answer, or None (with a note) for a model without a template."""
        if not (self.model.has_tokenizer and self.model.has_chat_template):
            progress.note("no chat answer: the model has no chat template")
            return None
        return self.client.chat(DEMO_PROMPT)

    def wait(self) -> None:
        """Return never while the server runs; raises ServeError when it ends by itself."""
        while True:
            self.process.check_alive()
            time.sleep(_POLL_SECONDS)


@contextmanager
def running_server(
    directory: Path,
    options: ServeOptions,
    *,
    engines_root: Path,
    progress: Progress | None = None,
) -> Iterator[RunningServer]:
    """A server for the model in ``directory`` that has answered and agrees with the original.

    It is stopped, with every process it started, when the block ends. Raises ModelError for
    a directory that must not be served, EngineError when there is no engine, ServeError
    when the server does not start, does not answer, or answers wrongly.
    """
    progress = progress or Silent()
    model = check_model(directory, foreign=options.foreign)
    engine = _find_engine(options, engines_root)
    port = free_port(options.host, options.port)
    command, size, reasons = _command(model, options, engine, port)
    for reason in (*model.notes, *reasons):
        progress.note(f"note: {reason}")
    progress.note("running: " + " ".join(command.argv))
    host = "127.0.0.1" if options.host in _ANY else options.host
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    client = Client(url, command.model_name)
    log = Path(tempfile.mkdtemp(prefix="ckpt-serve-")) / "server.log"
    try:
        with ServerProcess(command.argv, command.environment, log) as process:
            seconds = _wait_ready(process, client, model, options, progress)
            agreement = _agreement(client, model, command, engine)
            server = RunningServer(
                url, model, command, process, client, size, (*model.notes, *reasons), seconds,
                agreement,
            )  # fmt: skip
            if agreement is not None and not agreement.passed:
                raise ServeError(
                    f"the served model {agreement.as_text()}",
                    hint="It was stopped; validate the directory with ckpt validate",
                )
            yield server
    finally:
        client.close()


def serve_model(
    directory: Path,
    options: ServeOptions,
    *,
    engines_root: Path,
    progress: Progress | None = None,
    announce: Any = None,  # noqa: ANN401 - a function of the running server
) -> None:
    """Serve until interrupted; ``announce`` is called once with the server when it is ready.

    Raises ServeError when the server ends by itself, whatever its exit status.
    """
    with running_server(directory, options, progress=progress, engines_root=engines_root) as server:
        if announce is not None:
            announce(server)
        server.wait()


def _find_engine(options: ServeOptions, root: Path) -> Engine | None:
    """vLLM, or None for the embedded engine; raises EngineError when neither is there."""
    engine = None if options.engine == "embedded" else find_vllm(root, options.python)
    if engine is not None:
        return engine
    if options.engine == "vllm" or not embedded_is_there():
        raise EngineError(
            "no vLLM is installed" if options.engine != "embedded" else "no embedded engine",
            hint="Install it with 'ckpt engine install vllm', or the small embedded one with "
            "pip install 'transformers[serving]'",
        )
    return None


def _command(
    model: Model, options: ServeOptions, engine: Engine | None, port: int
) -> tuple[Command, int, tuple[str, ...]]:
    if engine is None:
        command = embedded_command(model, options, port=port)
        return command, 1, command.reasons
    check_representable(model)
    devices = _devices()
    choice = choose(model.config, options.tensor_parallel, model.trained_tensor_parallel, devices)
    command = vllm_command(engine, model, options, size=choice.size, port=port, devices=devices)
    return command, choice.size, (choice.reason, *command.reasons)


def _devices() -> Devices:
    if has_gpu():
        import subprocess  # noqa: PLC0415 - only on machines with a GPU

        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)  # noqa: S607
        return Devices("GPUs", listed.stdout.count("GPU "))
    return Devices("CPU cores", count_cores())


def _wait_ready(
    process: ServerProcess,
    client: Client,
    model: Model,
    options: ServeOptions,
    progress: Progress,
) -> float:
    """Wait for a real completion: ``/health`` alone is no sign that a request can be answered."""
    started = time.monotonic()
    progress.start("starting the server", int(options.startup_timeout_seconds), "s")
    reported = 0
    while not client.is_healthy():
        process.check_alive()
        elapsed = time.monotonic() - started
        if elapsed > options.startup_timeout_seconds:
            raise ServeError(
                f"not ready after {elapsed:.0f} s: {process.cause()}",
                hint=f"Its output is in {process.log}; a longer --startup-timeout may help",
            )
        progress.advance(int(elapsed) - reported)
        reported = int(elapsed)
        time.sleep(_POLL_SECONDS)
    progress.finish()
    _first_completion(process, client, model)
    return time.monotonic() - started


def _first_completion(process: ServerProcess, client: Client, model: Model) -> None:
    prompt: list[int] | str = [0, 1] if client.model != str(model.directory.resolve()) else "a"
    try:
        client.complete(prompt)
    except ServeError as error:
        process.check_alive()
        raise ServeError(
            f"the server says that it is healthy but cannot answer: {error}; {process.cause()}",
            hint=f"Its output is in {process.log}",
        ) from error


def _agreement(
    client: Client, model: Model, command: Command, engine: Engine | None
) -> Agreement | None:
    if model.reference is None or engine is None:
        return None
    return compare_with_original(
        client,
        model.reference,
        vocab_size=int(model.config["vocab_size"]),
        dtype=command.dtype,
        raw_logits=command.raw_logits,
    )
