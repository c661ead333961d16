"""The validate stage: the original's logits against the converted model's, in fp32."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ckpt.errors import ValidationError
from ckpt.manifest import fingerprint, read_stage, write_stage
from ckpt.progress import Progress, Silent
from ckpt.shards import REFERENCE_FILE
from ckpt.sources import locate
from ckpt.validate.hf_run import read_config, run_hf
from ckpt.validate.logits import compare, layer_cosines
from ckpt.validate.recorded import (
    REFERENCE_NAME,
    Reference,
    find_recorded,
    read_reference,
    record_reference,
    write_reference,
)
from ckpt.validate.report import ValidationReport

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.config import ValidateOptions
    from ckpt.sources.locate import IterationChoice, Located

__all__ = [
    "ValidationReport",
    "record_reference",
    "validate_checkpoint",
    "validation_is_current",
]
_KEPT_VALUES = 16 * 10**6


def validate_checkpoint(
    source: Path,
    model: Path,
    options: ValidateOptions,
    *,
    iteration: IterationChoice = "latest",
    progress: Progress | None = None,
) -> ValidationReport:
    """Hold the converted ``model`` to what the original in ``source`` answers.

    The reference is what was recorded beside the checkpoint, else a live Megatron-Core
    model. The verdict goes into the model's manifest, and the reference used beside it, for
    serving to be held to. Raises ValidationError when no comparison can be made.
    """
    progress, started = progress or Silent(), time.monotonic()
    if source.resolve() == model.resolve():
        raise ValidationError("source and model are the same directory", file=model)
    located = locate(source, iteration)
    read_config(model)
    reference = _reference(located, model, options, progress)
    answer = run_hf(model, reference.input_ids, progress)
    agreement = compare(reference.logits, answer.logits)
    first = compare_first(reference, answer.logits)
    report = ValidationReport(
        agreement=agreement,
        origin=reference.origin,
        min_cosine=options.min_cosine,
        max_abs_diff=options.max_abs_diff,
        first_position_diff=first,
        padding_columns=reference.logits.shape[-1] - answer.logits.shape[-1],
        layers=layer_cosines(reference.hidden, answer.hidden),
        notes=reference.notes,
        seconds=time.monotonic() - started,
    )
    _record(model, located, options, reference, report)
    return report


def compare_first(reference: Reference, logits: Any) -> float:  # noqa: ANN401 - a tensor
    """The largest difference at position 0, where rotary faults cannot be seen."""
    columns = logits.shape[-1]
    difference = reference.logits[:, 0, :columns] - logits[:, 0]
    return float(difference.abs().max())


def _reference(
    located: Located, model: Path, options: ValidateOptions, progress: Progress
) -> Reference:
    recorded = find_recorded(located.directory, options.recorded)
    if options.reference != "megatron" and recorded is not None:
        return read_reference(recorded)
    if options.reference == "recorded":
        raise ValidationError(
            "no recorded logits",
            file=located.directory,
            expected=REFERENCE_NAME,
            hint="Record them in the training job with ckpt.validate.record_reference, "
            "or use the reference 'megatron'",
        )
    from ckpt.validate.megatron_run import run_megatron  # noqa: PLC0415 - rarely needed

    return run_megatron(located, model, options, progress)


def _record(
    model: Path,
    located: Located,
    options: ValidateOptions,
    reference: Reference,
    report: ValidationReport,
) -> None:
    if read_stage(model, "convert") is None:
        return
    kept_file = model / REFERENCE_FILE
    if not kept_file.is_file():
        sequences, length, columns = reference.logits.shape
        rows = max(1, min(sequences, _KEPT_VALUES // (columns * length)))
        kept = min(length, max(2, _KEPT_VALUES // columns))
        kept_file.parent.mkdir(exist_ok=True)
        write_reference(
            kept_file.parent, reference.input_ids[:rows, :kept], reference.logits[:rows, :kept]
        )
    section = {
        **report.as_dict(),
        "fingerprint": _fingerprint(model, located, options),
        "text": report.as_text(),
    }
    write_stage(model, "validate", section)


def _fingerprint(model: Path, located: Located, options: ValidateOptions) -> str:
    converted = read_stage(model, "convert") or {}
    recorded = find_recorded(located.directory, options.recorded)
    stamp = None
    if recorded is not None:
        state = recorded.stat()
        stamp = (str(recorded), state.st_size, state.st_mtime_ns)
    settings = {key: str(value) for key, value in vars(options).items()}
    return fingerprint(converted.get("fingerprint"), converted.get("outputs"), settings, stamp)


def validation_is_current(
    source: Path, model: Path, options: ValidateOptions, *, iteration: IterationChoice = "latest"
) -> bool:
    """Whether the model's manifest already holds a passed validation of just this kind."""
    known = read_stage(model, "validate") if model.is_dir() else None
    if known is None or known.get("verdict") != "passed":
        return False
    located = locate(source, iteration)
    return bool(known.get("fingerprint") == _fingerprint(model, located, options))
