"""A live Megatron-Core model as the reference, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ckpt
from ckpt.errors import ValidationError
from ckpt.sources import open_source
from ckpt.validate.hf_run import read_config
from ckpt.validate.recorded import REFERENCE_NAME, Reference, read_reference

if TYPE_CHECKING:
    from ckpt.config import ValidateOptions
    from ckpt.progress import Progress
    from ckpt.sources import Checkpoint
    from ckpt.sources.locate import Located

_SEED = 20240229
_TIMEOUT_SECONDS = 3600
_EMBEDDING = "embedding.word_embeddings.weight"
_PROBE = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('megatron.core') else 1)"


def run_megatron(
    located: Located, model: Path, options: ValidateOptions, progress: Progress
) -> Reference:
    """What the original answers, computed now from its own shards by Megatron-Core in fp32.

    Raises ValidationError when Megatron-Core is not installed, or fails.
    """
    python = options.python or Path(sys.executable)
    if subprocess.run([str(python), "-c", _PROBE], check=False).returncode:  # noqa: S603
        raise ValidationError(
            "no reference: nothing was recorded, and megatron-core is not installed",
            file=located.directory,
            expected=REFERENCE_NAME,
            hint="Record logits in the training job with ckpt.validate.record_reference, or "
            "pip install 'megatron-to-vllm[megatron]'",
        )
    checkpoint = open_source(located.directory)
    if checkpoint.format not in {"torch_dist", "torch"}:
        raise ValidationError(
            f"Megatron-Core cannot load the format {checkpoint.format}",
            file=located.directory,
            hint="Record the logits in the training job with ckpt.validate.record_reference",
        )
    ids = input_ids(read_config(model), options.max_positions)
    with tempfile.TemporaryDirectory(prefix="ckpt-validate-") as place:
        request = _write_request(Path(place), checkpoint, ids)
        progress.start("running the original by megatron-core", None, "")
        _run(python, request)
        progress.finish()
        answer = read_reference(Path(place) / "answer.safetensors")
    return Reference(answer.input_ids, answer.logits, answer.hidden, "live megatron-core, CPU")


def input_ids(config: dict[str, Any], positions: int) -> torch.Tensor:
    """Random token ids [B, S]: as long as the model takes, and at least ``positions`` in all."""
    longest = int(config.get("max_position_embeddings") or config.get("n_positions") or positions)
    length = min(longest, positions)
    sequences = max(2, -(-positions // length))
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, int(config["vocab_size"]), (sequences, length), generator=generator)


def _write_request(place: Path, checkpoint: Checkpoint, ids: torch.Tensor) -> Path:
    from safetensors.torch import save_file  # noqa: PLC0415 - only where a file is written

    save_file({"input_ids": ids}, place / "inputs.safetensors")
    request = place / "request.json"
    request.write_text(
        json.dumps(
            {
                "checkpoint": str(checkpoint.directory.resolve()),
                "inputs": str(place / "inputs.safetensors"),
                "output": str(place / "answer.safetensors"),
                "padded_vocab_size": _padded_rows(checkpoint),
                "te": checkpoint.args.get("transformer_impl") == "transformer_engine",
                "single": any(name.endswith("_w") for name in checkpoint.raw_names),
            }
        ),
        encoding="utf-8",
    )
    return request


def _padded_rows(checkpoint: Checkpoint) -> int:
    embedding = next(t for t in checkpoint.tensors if t.name == _EMBEDDING)
    if embedding.shape is not None:
        return embedding.shape[0]
    return sum(shard.view.shape[0] for shard in embedding.shards)


def _run(python: Path, request: Path) -> None:
    parent = str(Path(ckpt.__file__).parent.parent)
    known = os.environ.get("PYTHONPATH")
    done = subprocess.run(  # noqa: S603 - our own module
        [str(python), "-m", "ckpt.validate.megatron_worker", str(request)],
        env={**os.environ, "PYTHONPATH": f"{parent}{os.pathsep}{known}" if known else parent},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        cause = lines[-1].strip() if lines else done.stderr[-300:]
        raise ValidationError(f"megatron-core could not run the original: {cause}")
