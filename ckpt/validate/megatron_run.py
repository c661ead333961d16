"""A live Megatron-Core model as the reference, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ckpt
from ckpt.errors import ValidationError, extra_hint
from ckpt.sources import open_source
from ckpt.validate.hf_run import longest_context, read_config
from ckpt.validate.recorded import REFERENCE_NAME, Reference, read_reference

if TYPE_CHECKING:
    from ckpt.config import ValidateOptions
    from ckpt.progress import Progress
    from ckpt.sources import Checkpoint
    from ckpt.sources.locate import Located

_SEED = 20240229
_TIMEOUT_SECONDS = 3600
_OLDEST = (0, 16)  # it reads what older ones wrote
_FORMATS = ("torch_dist", "torch")
_EMBEDDING = "embedding.word_embeddings.weight"
# Megatron itself is not imported: that takes seconds.
_PROBE = """
from importlib import metadata, util
if util.find_spec("megatron") and util.find_spec("megatron.core"):
    try:
        print(metadata.version("megatron-core"))
    except metadata.PackageNotFoundError:
        print("from source")
"""
_TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969, 3.14 * 2 = 6.28; def f(x): return x\n"
    "Water boils at 100 degrees, and the train to Paris leaves at noon. Why does it rain?\n"
)


def can_run_megatron(located: Located, python: Path | None) -> bool:
    """Whether the format is one that Megatron-Core loads, and Megatron-Core is there."""
    version = megatron_version(python) if located.format in _FORMATS else None
    return version is not None and not _is_too_old(version)


def _is_too_old(version: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < _OLDEST


def megatron_version(python: Path | None) -> str | None:
    """The version of megatron-core in ``python``, by default this one, or None."""
    try:
        done = subprocess.run(  # noqa: S603 - the user's own Python
            [str(python or sys.executable), "-c", _PROBE],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise ValidationError(f"cannot start: {error}", file=python) from error
    return done.stdout.strip() or None


def run_megatron(
    located: Located, model: Path, options: ValidateOptions, progress: Progress
) -> Reference:
    """What the original answers, computed now from its own shards by Megatron-Core in fp32.

    Raises ValidationError when Megatron-Core is not installed, or fails.
    """
    if located.format not in _FORMATS:
        raise ValidationError(
            f"Megatron-Core cannot load the format {located.format}",
            file=located.directory,
            hint="Record the logits in the training job with ckpt.validate.record_reference",
        )
    version = megatron_version(options.python)
    if version is None:
        raise ValidationError(
            "no reference: nothing was recorded, and megatron-core is not installed",
            file=located.directory,
            expected=REFERENCE_NAME,
            hint="Record logits in the training job with ckpt.validate.record_reference, or name a "
            f"Python that has it, or install it: {extra_hint('megatron')}",
        )
    if _is_too_old(version):
        raise ValidationError(
            "this megatron-core is too old to be the reference",
            file=options.python or sys.executable,
            expected=f"{_OLDEST[0]}.{_OLDEST[1]} or newer, which reads older checkpoints too",
            found=version,
        )
    checkpoint = open_source(located.directory)
    ids = input_ids(model, options.max_positions)
    with tempfile.TemporaryDirectory(prefix="ckpt-validate-") as place:
        request = _write_request(Path(place), checkpoint, ids)
        progress.start("running the original by megatron-core", None, "")
        _run(options.python or Path(sys.executable), request)
        progress.finish()
        answer = read_reference(Path(place) / "answer.safetensors")
    return Reference(
        answer.input_ids,
        answer.logits,
        answer.hidden,
        f"live megatron-core {version}, CPU",
        dtype="float32",
    )


def input_ids(model: Path, positions: int) -> torch.Tensor:
    """Token ids [B, S] for ``model``: as long as it takes, and at least ``positions`` in all.

    Random ones, the first and the last of the vocabulary among them, and a row of text if the
    model has a tokenizer.
    """
    config = read_config(model)
    vocabulary = int(config["vocab_size"])
    length = min(longest_context(config) or positions, positions)
    sequences = max(2, -(-positions // length))
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(0, vocabulary, (sequences, length), generator=generator)
    ids[0, -2:] = torch.tensor([0, vocabulary - 1])[:length]
    text = [token for token in _text_ids(model) if token < vocabulary]
    if len(set(text)) > 1:
        row = (text * (length // len(text) + 1))[:length]
        ids = torch.cat([ids, torch.tensor([row])])
    return ids


def _text_ids(model: Path) -> list[int]:
    file = model / "tokenizer.json"
    if not file.is_file():
        return []
    from tokenizers import Tokenizer  # noqa: PLC0415 - rarely needed

    try:
        return list(Tokenizer.from_file(str(file)).encode(_TEXT).ids)
    except Exception as error:  # the library raises bare ones
        raise ValidationError(f"not a tokenizer: {error}", file=file) from error


def _write_request(place: Path, checkpoint: Checkpoint, ids: torch.Tensor) -> Path:
    from safetensors.torch import save_file  # noqa: PLC0415 - only where a file is written

    save_file({"input_ids": ids}, place / "inputs.safetensors")
    request = place / "request.json"
    content: dict[str, Any] = {
        "checkpoint": str(checkpoint.directory.resolve()),
        "inputs": str(place / "inputs.safetensors"),
        "output": str(place / "answer.safetensors"),
        "padded_vocab_size": _padded_rows(checkpoint),
        "te": checkpoint.args.get("transformer_impl") == "transformer_engine",
        "single": any(name.endswith("_w") for name in checkpoint.raw_names),
    }
    request.write_text(json.dumps(content), encoding="utf-8")
    return request


def _padded_rows(checkpoint: Checkpoint) -> int:
    embedding = next(t for t in checkpoint.tensors if t.name == _EMBEDDING)
    if embedding.shape is not None:
        return embedding.shape[0]
    return sum(shard.view.shape[0] for shard in embedding.shards)


def _run(python: Path, request: Path) -> None:
    """Run the worker; no rank of it outlives this call, however it ends."""
    parent = str(Path(ckpt.__file__).parent.parent)
    known = os.environ.get("PYTHONPATH")
    log = request.with_name("worker.log")
    with log.open("w") as output:
        worker = subprocess.Popen(  # noqa: S603 - our own module
            [str(python), "-m", "ckpt.validate.megatron_worker", str(request)],
            env={**os.environ, "PYTHONPATH": f"{parent}{os.pathsep}{known}" if known else parent},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = worker.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            hours = _TIMEOUT_SECONDS // 3600
            raise ValidationError(f"megatron-core did not answer within {hours} h") from error
        finally:
            if worker.returncode != 0:  # not ended, or by a fault that may have left ranks
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        named = [line.strip() for line in lines if "Error" in line]
        cause = named[-1] if named else " ".join(lines)[-300:] or f"exit code {code}"
        raise ValidationError(f"megatron-core could not run the original: {cause}")
