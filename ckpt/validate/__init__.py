"""The validate stage: the original's logits against the converted model's, in fp32."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt.errors import ValidationError
from ckpt.manifest import fingerprint, read_stage, write_stage
from ckpt.progress import Progress, Silent
from ckpt.shards import REFERENCE_FILE
from ckpt.sources import locate
from ckpt.storage import require_local
from ckpt.unfinished import refuse_unfinished
from ckpt.validate.hf_run import longest_context, read_config, run_hf
from ckpt.validate.logits import check_input_ids, compare, compare_layers
from ckpt.validate.megatron_run import can_run_megatron, run_megatron
from ckpt.validate.recorded import (
    REFERENCE_NAME,
    Reference,
    find_recorded,
    read_recorded,
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
_KEPT_SEQUENCES, _KEPT_POSITIONS = 8, 64


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
    for place in (source, model, options.recorded):
        require_local(place, "validate")
    for place in (source, model):
        refuse_unfinished(place)
    if source.resolve() == model.resolve():
        raise ValidationError("source and model are the same directory", file=model)
    located = locate(source, iteration)
    config = read_config(model)
    reference = _reference(located, model, options, progress)
    check_input_ids(reference.input_ids, config["vocab_size"])
    length, longest = reference.input_ids.shape[1], longest_context(config)
    if longest is not None and length > longest:
        raise ValidationError(
            "the reference is longer than the converted model's context",
            file=model / "config.json",
            expected=f"max_position_embeddings of at least {length}",
            found=longest,
        )
    answer = run_hf(model, reference.input_ids, progress)
    report = ValidationReport(
        agreement=compare(reference.logits, answer.logits),
        origin=reference.origin,
        min_cosine=options.min_cosine,
        max_abs_diff=options.max_abs_diff,
        padding_columns=reference.logits.shape[-1] - answer.logits.shape[-1],
        layers=compare_layers(reference.hidden, answer.hidden),
        half_reference=reference.is_half,
        notes=reference.notes,
        seconds=time.monotonic() - started,
    )
    _record(model, located, options, reference, report)
    return report


def _reference(
    located: Located, model: Path, options: ValidateOptions, progress: Progress
) -> Reference:
    """What was recorded in fp32, else a live model's answer, else what was recorded at all."""
    file = find_recorded(located, options.recorded)
    if options.reference != "megatron" and file is not None:
        recorded = read_recorded(file, located)
        named = options.reference == "recorded" or options.recorded is not None
        if named or not recorded.is_half or not can_run_megatron(located, options.python):
            return recorded
        progress.note(f"{file} is in {recorded.dtype}: the original is run again, in fp32")
    if options.reference == "recorded":
        raise ValidationError(
            "no recorded logits of this iteration",
            file=located.directory,
            expected=REFERENCE_NAME,
            hint="Record them in the training job with ckpt.validate.record_reference, "
            "or use the reference 'megatron'",
        )
    return run_megatron(located, model, options, progress)


def _record(
    model: Path,
    located: Located,
    options: ValidateOptions,
    reference: Reference,
    report: ValidationReport,
) -> None:
    converted = read_stage(model, "convert")
    if converted is None:
        return
    came_along = {item["name"] for item in converted.get("outputs", ())}
    if REFERENCE_FILE not in came_along:
        write_reference((model / REFERENCE_FILE).parent, _trimmed(reference, located))
    section = {
        **report.as_dict(),
        "fingerprint": _fingerprint(model, located, options),
        "text": report.as_text(),
    }
    write_stage(model, "validate", section)


def _trimmed(reference: Reference, located: Located) -> Reference:
    """As much of the reference as serving is held to: 8 x 64 positions and 64 MB at most."""
    sequences, length, columns = reference.logits.shape
    kept = min(length, _KEPT_POSITIONS, max(2, _KEPT_VALUES // columns))
    rows = max(1, min(sequences, _KEPT_SEQUENCES, _KEPT_VALUES // (columns * kept)))
    return replace(
        reference,
        input_ids=reference.input_ids[:rows, :kept],
        logits=reference.logits[:rows, :kept],
        hidden={},
        iteration=None if located.iteration is None else str(located.iteration),
    )


def _fingerprint(model: Path, located: Located, options: ValidateOptions) -> str:
    converted = read_stage(model, "convert") or {}
    recorded = find_recorded(located, options.recorded)
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
