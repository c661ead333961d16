"""Finished parts of a conversion: which are there, which lack, and the report of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.convert import staging
from ckpt.convert.conversion import PartReport
from ckpt.convert.run import Run, unit_bytes
from ckpt.convert.share import Share, deal, finalize_command
from ckpt.convert.units import Written, look_ahead, read_receipt, receipt_file
from ckpt.errors import OutputError
from ckpt.terminal import plural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_SHOWN = 4


def check_finished(run: Run) -> None:
    """Raise OutputError unless every file of every part is there, of this very plan."""
    stage = run.stage
    state = staging.read_state(stage, run.purpose)
    if not state:
        raise OutputError(
            "no finished parts of this conversion are here",
            file=stage,
            found=staging.describe(stage, run.purpose),
            hint="Give --finalize with the source and options that the parts were given",
        )
    lacking = _lacking(run, stage, staging.parts_of(state))
    names = {unit.name for unit in run.units}
    foreign = sorted(file.name for file in stage.glob("*.safetensors") if file.name not in names)
    if lacking or foreign:
        told = [
            f"{name} ({share}: {share.options()}; {_why(stage, name)})" for name, share in lacking
        ]
        told += [f"{name} (of no part)" for name in foreign]
        more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        raise OutputError(
            _parts_lacking(lacking)
            + f"{len(lacking)} of {plural(len(run.units), 'file')} are not finished"
            + (f", {len(foreign)} do not belong here" if foreign else ""),
            file=stage,
            found=", ".join(told[:_SHOWN]) + more,
            hint="Run these parts again and then --finalize; without it, the same command "
            "writes what lacks by itself",
        )


def _parts_lacking(lacking: Sequence[tuple[str, Share]]) -> str:
    """Which parts to run again, first of all."""
    found = sorted({share.index for _, share in lacking})
    if not found:
        return ""
    of, word = lacking[0][1].of, "parts" if len(found) > 1 else "part"
    people, options = (", ".join(str(each + more) for each in found) for more in (1, 0))
    verb = "lack" if len(found) > 1 else "lacks"
    return (
        f"{word} {people} of {of} {verb} {plural(len(lacking), 'file')} "
        f"(--shard-index {options} with --num-shards {of}): "
    )


def _why(stage: Path, name: str) -> str:
    if not (stage / name).is_file():
        return "not there"
    has_receipt = receipt_file(stage, name).is_file()
    return "its receipt is of another file or plan" if has_receipt else "no receipt"


def _lacking(run: Run, stage: Path, of: int) -> list[tuple[str, Share]]:
    """Files without a fitting receipt, in order, each with its part."""
    look_ahead(stage, [unit.name for unit in run.units])
    parts = deal(run.units, unit_bytes, of)
    owner = {unit.name: Share(index, of) for index, part in enumerate(parts) for unit in part}
    return [
        (unit.name, owner[unit.name]) for unit in run.units if read_receipt(stage, unit) is None
    ]


def part_report(run: Run, stage: Path, written: Sequence[Written], seconds: float) -> PartReport:
    """What a part says when it has ended."""
    return PartReport(
        output=run.output,
        stage=stage,
        share=run.share,
        written=written,
        lacking=_lacking(run, stage, run.share.of),
        total=len(run.units),
        finalize=finalize_command(run.conversion.checkpoint.directory, run.output, run.options),
        seconds=seconds,
    )
