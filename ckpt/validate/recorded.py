"""The original's logits, recorded in the training job and read back here.

In the training job, on a model that is already loaded::

    from ckpt.validate.recorded import record_reference
    record_reference(model, input_ids, "checkpoints/iter_0050000")

The file ``ckpt-reference.safetensors`` holds ``input_ids`` [B, S] int64, ``logits``
[B, S, V] float32 and, where they were recorded, ``hidden_states.N`` [B, S, H], the
residual stream behind layer N (0: the embedding's output).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckpt.errors import ValidationError
from ckpt.manifest import write_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

REFERENCE_NAME = "ckpt-reference.safetensors"
_HIDDEN = "hidden_states."


@dataclass(frozen=True)
class Reference:
    """What the original model answered, and where that is from."""

    input_ids: torch.Tensor
    logits: torch.Tensor
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    origin: str = ""
    notes: tuple[str, ...] = ()


def record_reference(
    model: Callable[..., Any],
    input_ids: torch.Tensor,
    directory: str | Path,
    *,
    forward: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
) -> Path | None:
    """Run ``model`` on ``input_ids`` [B, S] and save what it answers beside its checkpoint.

    ``forward(model, input_ids)`` gives the logits [B, S, V]; by default the model is called
    as a Megatron GPTModel is (tokens, positions, causal mask) and tensor-parallel ranks'
    columns are gathered. Every rank calls this; the file is written by rank 0 of the group
    that holds the logits, and its path is returned there, None elsewhere. The logits are
    those of the model's own precision: for a verdict in fp32 give a model in fp32.
    """
    with torch.no_grad():
        logits = (forward or _megatron_forward)(model, input_ids)
    parallel = _tensor_parallel()
    if parallel is not None and forward is None and parallel[1] > 1:
        logits = _gather(logits, *parallel)
    if parallel is not None and parallel[2] != 0:
        return None
    return write_reference(Path(directory), input_ids, logits)


def write_reference(
    directory: Path,
    input_ids: torch.Tensor,
    logits: torch.Tensor,
    hidden: dict[int, torch.Tensor] | None = None,
) -> Path:
    """Save a reference into ``directory``; see the module's text for the file's content."""
    from safetensors.torch import save  # noqa: PLC0415 - only where a file is written

    tensors = {
        "input_ids": input_ids.cpu().long().contiguous(),
        "logits": logits.detach().float().cpu().contiguous(),
    }
    for layer, state in (hidden or {}).items():
        tensors[f"{_HIDDEN}{layer}"] = state.detach().float().cpu().contiguous()
    file = directory / REFERENCE_NAME
    precision = str(logits.dtype).removeprefix("torch.")
    write_bytes(file, save(tensors, metadata={"dtype": precision}))
    return file


def _megatron_forward(model: Callable[..., Any], input_ids: torch.Tensor) -> torch.Tensor:
    length = input_ids.shape[1]
    positions = torch.arange(length, device=input_ids.device)[None].expand_as(input_ids)
    ones = torch.ones(length, length, dtype=torch.bool, device=input_ids.device)
    answer = model(input_ids, positions, ones.triu(1)[None, None])
    if not isinstance(answer, torch.Tensor):
        raise ValidationError("the model gave no logits; pass forward= that does")
    return answer


def _tensor_parallel() -> tuple[Any, int, int] | None:
    """Megatron's tensor-parallel group, its size and this rank, if Megatron is running."""
    import sys  # noqa: PLC0415 - looks for a module that others loaded

    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    group = state.get_tensor_model_parallel_group()
    return group, group.size(), group.rank()


def _gather(logits: torch.Tensor, group: Any, size: int, rank: int) -> torch.Tensor:  # noqa: ANN401
    del rank
    local = logits.contiguous()
    parts = [torch.empty_like(local) for _ in range(size)]
    torch.distributed.all_gather(parts, local, group=group)
    return torch.cat(parts, dim=-1)


def find_recorded(checkpoint: Path, given: Path | None) -> Path | None:
    """The recorded logits: those that were named, or those beside the iteration, or None."""
    if given is None:
        file = checkpoint / REFERENCE_NAME
        return file if file.is_file() else None
    if given.is_dir():
        names = (REFERENCE_NAME, "logits.safetensors")
        found = next((given / name for name in names if (given / name).is_file()), None)
        if found is None:
            raise ValidationError("no recorded logits here", file=given, expected=REFERENCE_NAME)
        return found
    if not given.is_file():
        raise ValidationError("no such file of recorded logits", file=given)
    return given


def read_reference(file: Path) -> Reference:
    """The reference in ``file``; token ids may lie beside it in ``inputs.safetensors``.

    Raises ValidationError for a file without token ids or logits, or of wrong shapes.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - heavy
    from safetensors.torch import load_file  # noqa: PLC0415 - heavy

    try:
        tensors = load_file(file)
        inputs = file.with_name("inputs.safetensors")
        if "input_ids" not in tensors and inputs.is_file():
            tensors |= load_file(inputs)
    except (OSError, SafetensorError) as error:
        raise ValidationError(f"cannot read: {error}", file=file) from error
    missing = {"input_ids", "logits"} - tensors.keys()
    if missing:
        raise ValidationError(f"lacks {', '.join(sorted(missing))}", file=file)
    exact = tensors.get("logits_fp32")
    logits = tensors["logits"] if exact is None else exact
    ids = tensors["input_ids"]
    if logits.dim() != 3 or ids.dim() != 2 or logits.shape[:2] != ids.shape:  # noqa: PLR2004
        raise ValidationError(
            "shapes do not fit",
            file=file,
            expected="input_ids [B, S], logits [B, S, V]",
            found=f"{list(ids.shape)}, {list(logits.shape)}",
        )
    hidden = {
        int(name.removeprefix(_HIDDEN)): state
        for name, state in tensors.items()
        if name.startswith(_HIDDEN)
    }
    return Reference(ids.long(), logits.float(), hidden, origin=f"recorded in {file.name}")
