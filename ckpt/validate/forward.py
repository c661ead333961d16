"""One forward pass of a Megatron model that its training job holds, without importing Megatron."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from ckpt.errors import ValidationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def megatron_forward(
    model: Callable[..., Any], input_ids: torch.Tensor, *, hidden_states: bool
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """This rank's logits [B, S, V/tp], and the residual stream [B, S, H] by layer if wanted.

    Megatron's masks are True where a position must not look. Raises ValidationError for
    what cannot be called so.
    """
    state = _parallel_state()
    if state is not None and (
        state.get_pipeline_model_parallel_world_size() > 1
        or state.get_context_parallel_world_size() > 1
    ):
        raise ValidationError(
            "the model is spread over pipeline stages or context-parallel ranks",
            hint="Pass forward=, a function that runs it and gives the whole logits on the last "
            "stage and None on the others",
        )
    length = input_ids.shape[1]
    positions = torch.arange(length, device=input_ids.device)[None].expand_as(input_ids)
    ones = torch.ones(length, length, dtype=torch.bool, device=input_ids.device)
    with _evaluating(model), _watching(model if hidden_states else None) as seen:
        answer = model(input_ids, positions, ones.triu(1)[None, None])
    if not isinstance(answer, torch.Tensor):
        raise ValidationError("the model gave no logits; pass forward= that does")
    hidden = {layer: stream.transpose(0, 1) for layer, stream in seen.items()}
    if any(stream.shape[:2] != input_ids.shape for stream in hidden.values()):
        raise ValidationError(
            "the residual stream is spread over ranks (sequence parallel)",
            hint="Record without hidden_states",
        )
    return answer, hidden


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:  # noqa: ANN401 - any module
    """Dropout off, and back as it was."""
    training = bool(getattr(model, "training", False))
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


@contextlib.contextmanager
def _watching(model: Any) -> Iterator[dict[int, torch.Tensor]]:  # noqa: ANN401 - any module
    """Keep the residual stream [S, B, H] behind the embedding (0) and each layer (from 1)."""
    seen: dict[int, torch.Tensor] = {}
    if model is None:
        yield seen
        return

    def keeper(number: int) -> Callable[..., None]:
        def keep(_module: object, _inputs: object, output: Any) -> None:  # noqa: ANN401
            state = output[0] if isinstance(output, tuple) else output
            seen[number] = state.detach().clone()

        return keep

    inner = unwrap(model)
    try:
        modules = [inner.embedding, *inner.decoder.layers]
    except AttributeError as error:
        raise ValidationError(f"not a Megatron GPTModel: {error}") from error
    hooks = [module.register_forward_hook(keeper(at)) for at, module in enumerate(modules)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def unwrap(model: Any) -> Any:  # noqa: ANN401 - any module
    """The model inside Megatron's wrappers (data parallel, half precision)."""
    while hasattr(model, "module"):
        model = model.module
    return model


def forward_dtype(model: Any) -> torch.dtype | None:  # noqa: ANN401 - any module
    """The type of the model's weights: Megatron's half-precision wrapper answers in float32."""
    parameters = getattr(model, "parameters", None)
    weights: list[torch.Tensor] = list(parameters()) if parameters else []
    return next((weight.dtype for weight in weights if weight.is_floating_point()), None)


def gather_columns(model: Any, logits: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """The logits of all tensor-parallel ranks, [B, S, V], unless the model gathers them itself."""
    state = _parallel_state()
    if state is None or not getattr(unwrap(model), "parallel_output", True):
        return logits
    group = state.get_tensor_model_parallel_group()
    local = logits.contiguous()
    parts = [torch.empty_like(local) for _ in range(group.size())]
    torch.distributed.all_gather(parts, local, group=group)
    return torch.cat(parts, dim=-1)


def data_rank() -> int:
    """0 on the one rank of those with the same logits that writes them."""
    state = _parallel_state()
    if state is None:
        return 0
    return int(
        state.get_tensor_model_parallel_rank()
        + state.get_data_parallel_rank(with_context_parallel=True)
    )


def _parallel_state() -> Any:  # noqa: ANN401 - Megatron's module
    """Megatron's parallel state, if Megatron is running in this process."""
    state = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None
