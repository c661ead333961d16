"""The original's logits, recorded in the training job and read back here.

In the training job, on a model that is already loaded, on every rank::

    from ckpt.validate.recorded import record_reference
    record_reference(model, input_ids, "checkpoints/iter_0050000")

The file ``ckpt-reference.safetensors`` holds ``input_ids`` [B, S] int64, ``logits``
[B, S, V] float32 and, where they were recorded, ``hidden_states.N`` [B, S, H], the
residual stream behind layer N (0: the embedding's output). Its metadata name the tool
(``producer``), the precision of the forward pass (``dtype``) and the ``iteration``. It lies
in the iteration's directory, or in the one above if it names its iteration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckpt import __version__
from ckpt.errors import ValidationError
from ckpt.manifest import write_bytes
from ckpt.validate.forward import data_rank, forward_dtype, gather_columns, megatron_forward

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpt.sources.locate import Located

REFERENCE_NAME = "ckpt-reference.safetensors"
_LOGITS_NAME, _INPUTS_NAME = "logits.safetensors", "inputs.safetensors"
_HIDDEN = "hidden_states."
_HALF = ("bfloat16", "float16")
_ITERATION = re.compile(r"iter_0*(\d+)")


@dataclass(frozen=True)
class Reference:
    """What the original model answered, and where that is from.

    ``dtype`` is the precision of its forward pass and ``iteration`` that of the checkpoint,
    where they are known.
    """

    input_ids: torch.Tensor
    logits: torch.Tensor
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    origin: str = ""
    notes: tuple[str, ...] = ()
    dtype: str | None = None
    iteration: str | None = None

    @property
    def is_half(self) -> bool:
        """Whether it was computed in half precision, so that it is off by its rounding."""
        return self.dtype in _HALF


def record_reference(
    model: Callable[..., Any],
    input_ids: torch.Tensor,
    directory: str | Path,
    *,
    forward: Callable[[Any, torch.Tensor], torch.Tensor | None] | None = None,
    hidden_states: bool = False,
    iteration: int | None = None,
) -> Path | None:
    """Run ``model`` on ``input_ids`` [B, S] and save what it answers beside its checkpoint.

    ``forward(model, input_ids)`` gives the whole logits [B, S, V], or None on ranks that hold
    none; by default the model is called as a Megatron GPTModel is (tokens, positions, causal
    mask), in evaluation mode, and tensor-parallel ranks' columns are gathered.
    ``hidden_states`` also saves the residual stream behind each layer, which lets a validation
    name the layer that differs. The iteration is read from a directory named
    ``iter_N`` if it is not given.

    Every rank calls this; the file is written by one rank, and its path is returned there,
    None elsewhere. Its logits have the precision of the model: for a verdict in fp32 give
    one in fp32. Raises ValidationError for a model of several pipeline stages without
    ``forward``, and for ids or logits that would prove nothing.
    """
    hidden: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        if forward is None:
            logits, hidden = megatron_forward(model, input_ids, hidden_states=hidden_states)
            logits = gather_columns(model, logits)
        else:
            answer = forward(model, input_ids)
            if answer is None:
                return None
            logits = answer
    if data_rank():
        return None
    named = _ITERATION.fullmatch(Path(directory).name)
    return write_reference(
        Path(directory),
        Reference(
            input_ids,
            logits,
            hidden,
            dtype=str((forward_dtype(model) if forward is None else None) or logits.dtype),
            iteration=named[1] if iteration is None and named else _text(iteration),
        ),
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def write_reference(directory: Path, reference: Reference) -> Path:
    """Save a reference into ``directory``; see the module's text for the file's content."""
    from safetensors.torch import save  # noqa: PLC0415 - only where a file is written

    _check_shapes(reference.input_ids, reference.logits, REFERENCE_NAME)
    if not torch.isfinite(reference.logits).all():
        raise ValidationError("the logits to record hold NaN or infinity")
    tensors = {
        "input_ids": reference.input_ids.cpu().long().contiguous(),
        "logits": reference.logits.detach().float().cpu().contiguous(),
    }
    for layer, state in reference.hidden.items():
        tensors[f"{_HIDDEN}{layer}"] = state.detach().float().cpu().contiguous()
    metadata = {"producer": f"ckpt {__version__}"}
    if reference.dtype is not None:
        metadata["dtype"] = reference.dtype.removeprefix("torch.")
    if reference.iteration is not None:
        metadata["iteration"] = reference.iteration
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / REFERENCE_NAME
    write_bytes(file, save(tensors, metadata=metadata))
    return file


def find_recorded(located: Located, given: Path | None) -> Path | None:
    """The recorded logits: those that were named, or those beside the iteration, or None.

    Raises ValidationError when what was named is not there.
    """
    if given is None:
        return _beside(located)
    if given.is_dir():
        names = (REFERENCE_NAME, _LOGITS_NAME)
        found = next((given / name for name in names if (given / name).is_file()), None)
        if found is None:
            expected = f"{REFERENCE_NAME}, or {_LOGITS_NAME} and {_INPUTS_NAME}"
            raise ValidationError("no recorded logits here", file=given, expected=expected)
        return found
    if not given.is_file():
        raise ValidationError("no such file of recorded logits", file=given)
    return given


def _beside(located: Located) -> Path | None:
    inside = located.directory / REFERENCE_NAME
    if inside.is_file():
        return inside
    above = located.directory.absolute().parent / REFERENCE_NAME
    if above.is_file() and _metadata(above).get("iteration") == str(located.iteration):
        return above
    return None


def _metadata(file: Path) -> Mapping[str, str]:
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - heavy

    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ValidationError(f"cannot read: {error}", file=file) from error


def read_reference(file: Path) -> Reference:
    """The reference in ``file``; token ids may lie beside it in ``inputs.safetensors``.

    A tensor ``logits_fp32`` is taken before ``logits``. Raises ValidationError for a file
    without token ids or logits, or of wrong types or shapes.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - heavy
    from safetensors.torch import load_file  # noqa: PLC0415 - heavy

    metadata = _metadata(file)
    try:
        tensors = load_file(file)
        inputs = file.with_name(_INPUTS_NAME)
        if "input_ids" not in tensors and inputs.is_file():
            tensors |= load_file(inputs)
    except (OSError, SafetensorError) as error:
        raise ValidationError(f"cannot read: {error}", file=file) from error
    if "logits_fp32" in tensors:
        tensors["logits"], metadata = tensors["logits_fp32"], {**metadata, "dtype": "float32"}
    missing = {"input_ids", "logits"} - tensors.keys()
    if missing:
        raise ValidationError(f"lacks {', '.join(sorted(missing))}", file=file)
    ids, logits = tensors["input_ids"], tensors["logits"]
    _check_shapes(ids, logits, file)
    numbers = {name: name.removeprefix(_HIDDEN) for name in tensors if name.startswith(_HIDDEN)}
    stored = None if logits.dtype == torch.float32 else str(logits.dtype).removeprefix("torch.")
    return Reference(
        ids.long(),
        logits.float(),
        {int(number): tensors[name] for name, number in numbers.items() if number.isdigit()},
        origin=f"recorded in {file.name}",
        dtype=stored or metadata.get("dtype") or _half_that_holds(logits),
        iteration=metadata.get("iteration"),
    )


def _half_that_holds(logits: torch.Tensor) -> str | None:
    """The half precision that every one of float32 logits was rounded to, if there is one."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(logits.to(dtype).float(), logits):
            return str(dtype).removeprefix("torch.")
    return None


def read_recorded(file: Path, located: Located) -> Reference:
    """The reference in ``file``, refused when it was recorded for another iteration."""
    reference = read_reference(file)
    known, chosen = reference.iteration, located.iteration
    if known is not None and isinstance(chosen, int) and known != str(chosen):
        raise ValidationError(
            "recorded for another iteration", file=file, expected=chosen, found=known
        )
    if reference.is_half:
        note = f"the original answered in {reference.dtype}, so its own rounding is in the figures"
        return replace(reference, notes=(*reference.notes, note))
    return reference


def _check_shapes(ids: torch.Tensor, logits: torch.Tensor, file: object) -> None:
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    fits = ids.dim() == 2 and logits.dim() == 3 and logits.shape[:2] == ids.shape  # noqa: PLR2004
    if not (whole and fits and logits.is_floating_point()):
        raise ValidationError(
            "shapes or types do not fit",
            file=file,
            expected="input_ids [B, S] of integers, logits [B, S, V]",
            found=f"{ids.dtype} {list(ids.shape)}, {logits.dtype} {list(logits.shape)}",
        )
