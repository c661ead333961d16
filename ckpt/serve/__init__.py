"""The serve stage: an OpenAI-compatible server that has shown that it answers as the original."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.engines import find_vllm
from ckpt.errors import EngineError, ServeError, extra_hint
from ckpt.progress import Progress, Silent
from ckpt.serve.agreement import Agreement, Question, compare_with_original
from ckpt.serve.client import Answer, Client
from ckpt.serve.command import (
    Command,
    check_representable,
    embedded_command,
    embedded_is_there,
    shown_host,
    vllm_command,
)
from ckpt.serve.devices import find_devices
from ckpt.serve.preflight import Model, check_model, free_port
from ckpt.serve.process import GRACE_READY_SECONDS, ServerProcess
from ckpt.serve.running import RunningServer, wait_until_ready
from ckpt.serve.tensor_parallel import choose, legal_sizes
from ckpt.storage import require_local
from ckpt.unfinished import refuse_unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt.config import ServeOptions
    from ckpt.engines import Engine

__all__ = [
    "Agreement",
    "Answer",
    "RunningServer",
    "legal_sizes",
    "require_engine",
    "running_server",
    "serve_model",
]


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
    require_local(directory, "serve")
    refuse_unfinished(directory)
    model = check_model(directory, options)
    engine = _find_engine(options, engines_root)
    port = free_port(options.host, options.port)
    command, size, reasons = _command(model, options, engine, port)
    reasons = (*model.notes, *reasons)
    for reason in reasons:
        progress.note(f"note: {reason}")
    progress.note(f"running: {command.as_text()}")
    url = f"http://{shown_host(options.host)}:{port}"
    client = Client(url, command.model_name, api_key=options.api_key)
    place = Path(tempfile.mkdtemp(prefix="ckpt-serve-"))
    process = ServerProcess(command.argv, command.process_environment(), place)
    try:
        process.start()
        seconds = wait_until_ready(process, client, command, options, progress)
        process.grace_seconds = GRACE_READY_SECONDS
        agreement, comparison = _compare(client, model, command, options)
        yield RunningServer(
            url, model, command, process, client, size, reasons, seconds, agreement, comparison
        )
    finally:
        process.stop()
        client.close()


def serve_model(
    directory: Path,
    options: ServeOptions,
    *,
    engines_root: Path,
    progress: Progress | None = None,
    announce: Callable[[RunningServer], None] | None = None,
) -> None:
    """Serve until interrupted; ``announce`` is called once, when the server is ready.

    Raises ServeError when the server ends by itself, whatever its exit status.
    """
    with running_server(directory, options, progress=progress, engines_root=engines_root) as server:
        if announce is not None:
            announce(server)
        server.wait()


def require_engine(options: ServeOptions, engines_root: Path) -> None:
    """Raise EngineError unless an engine is there that would serve with these options."""
    _find_engine(options, engines_root)


def _find_engine(options: ServeOptions, root: Path) -> Engine | None:
    """VLLM, or None for the embedded engine; raises EngineError when neither is there."""
    engine = None if options.engine == "embedded" else find_vllm(root, options.python)
    if engine is not None:
        return engine
    if options.engine == "vllm":
        raise EngineError("no vLLM is installed", hint="Install it with ckpt engine install vllm")
    if not embedded_is_there():
        missing = "the embedded engine is not installed"
        raise EngineError(
            missing if options.engine == "embedded" else f"no vLLM is installed, and {missing}",
            hint="Install vLLM with ckpt engine install vllm, or the small embedded engine with "
            + extra_hint("serving"),
        )
    return None


def _command(
    model: Model, options: ServeOptions, engine: Engine | None, port: int
) -> tuple[Command, int, tuple[str, ...]]:
    if engine is None:
        command = embedded_command(model, options, port=port)
        return command, 1, command.reasons
    check_representable(model)
    devices = find_devices(engine)
    choice = choose(model.config, options.tensor_parallel, model.trained_tensor_parallel, devices)
    command = vllm_command(engine, model, options, size=choice.size, port=port, devices=devices)
    return command, choice.size, (choice.reason, *command.reasons)


def _compare(
    client: Client, model: Model, command: Command, options: ServeOptions
) -> tuple[Agreement | None, str]:
    """The comparison with the original and its text; raises ServeError if they differ."""
    if not command.takes_token_ids:
        return None, "not compared with the original: this engine gives no log-probabilities"
    if model.reference is None:
        return None, "not compared with the original: no recorded reference"
    recorded = model.reference
    length = options.max_model_len or model.longest or 0
    dtypes = (model.dtype, command.dtype)
    vocab_size = int(model.config["vocab_size"])
    question = Question(recorded, vocab_size, length, dtypes, command.raw_logits)
    agreement = compare_with_original(client, question)
    if not agreement.passed:
        raise ServeError(
            f"the served model {agreement.as_text()}",
            hint="It was stopped; check the directory with ckpt validate",
        )
    return agreement, agreement.as_text()
