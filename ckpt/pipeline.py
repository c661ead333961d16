"""The stages of a pipeline file, one after another; those whose manifest is current are skipped."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt.convert import carry_out, plan_conversion
from ckpt.manifest import read_stage
from ckpt.progress import Progress, Silent
from ckpt.storage import require_local

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt.config import PipelineOptions
    from ckpt.validate import ValidationReport


@dataclass
class PipelineReport:
    """What each stage did: ``done`` or ``current`` (skipped), with its figures and seconds."""

    output: str
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    passed: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The report for machines."""
        return {
            "output": self.output,
            "passed": self.passed,
            "stages": self.stages,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }

    def as_text(self) -> str:
        """One block a stage."""
        lines = []
        for name, stage in self.stages.items():
            lines.append(f"{name}: {stage['state']} ({self.seconds.get(name, 0.0):.1f} s)")
            lines += [f"  {line}" for line in stage.get("text", "").splitlines()]
        return "\n".join(lines)


def run_pipeline(
    options: PipelineOptions,
    *,
    engines_root: Path,
    progress: Progress | None = None,
    force: bool = False,
    stay: bool = False,
) -> PipelineReport:
    """Convert, validate and serve as the options say.

    A stage whose manifest section is current is skipped unless ``force``. A failed
    validation stops the run: ``passed`` is then False and nothing is served. With ``stay``
    the server runs until it is interrupted. Raises whatever the stages raise.
    """
    progress = progress or Silent()
    _check_places(options)
    if options.serve.enabled:
        from ckpt.serve import require_engine  # noqa: PLC0415 - only where a server is wanted

        require_engine(options.serve, engines_root)
    report = PipelineReport(str(options.output))
    with _timed(report, "convert"):
        report.stages["convert"] = _convert(options, progress, force=force)
    if options.validate.enabled:
        with _timed(report, "validate"):
            report.stages["validate"] = _validate(options, progress, force=force)
        report.passed = report.stages["validate"]["passed"]
    if options.serve.enabled and report.passed:
        with _timed(report, "serve"):
            report.stages["serve"] = _serve(options, progress, engines_root, stay=stay)
    return report


def _check_places(options: PipelineOptions) -> None:
    """Raise OptionsError for a stage that needs local files and would be given a store."""
    if options.validate.enabled:
        require_local(options.source.path, "validate")
        require_local(options.output, "validate")
    if options.serve.enabled:
        require_local(options.output, "serve")


def _convert(options: PipelineOptions, progress: Progress, *, force: bool) -> dict[str, Any]:
    iteration = options.source.iteration
    planned = plan_conversion(options.source.path, options.convert, iteration=iteration)
    known = read_stage(options.output, "convert") if options.output.is_dir() else None
    current = known is not None and known.get("fingerprint") == planned.fingerprint
    if current and not force and _outputs_are_there(options.output, known or {}):
        progress.note("convert: current, skipped")
        return {"state": "current", "text": planned.summary()}
    chosen = replace(options.convert, overwrite=options.convert.overwrite or known is not None)
    done = carry_out(planned, options.output, chosen, progress=progress)
    return {"state": "done", "text": done.as_text(), **done.as_dict()}


def _outputs_are_there(output: Path, section: dict[str, Any]) -> bool:
    return all(
        (output / item["name"]).is_file() and (output / item["name"]).stat().st_size == item["size"]
        for item in section.get("outputs", [])
    )


def _validate(options: PipelineOptions, progress: Progress, *, force: bool) -> dict[str, Any]:
    from ckpt.validate import validate_checkpoint, validation_is_current  # noqa: PLC0415 - torch

    source, iteration = options.source.path, options.source.iteration
    if not force and validation_is_current(
        source, options.output, options.validate, iteration=iteration
    ):
        progress.note("validate: current, skipped")
        known = read_stage(options.output, "validate") or {}
        return {"state": "current", "passed": True, "text": known.get("text", ""), **known}
    done: ValidationReport = validate_checkpoint(
        source, options.output, options.validate, iteration=iteration, progress=progress
    )
    return {"state": "done", "passed": done.passed, "text": done.as_text(), **done.as_dict()}


def _serve(
    options: PipelineOptions, progress: Progress, engines_root: Path, *, stay: bool
) -> dict[str, Any]:
    from ckpt.serve import running_server  # noqa: PLC0415 - only where a server is wanted

    with running_server(
        options.output, options.serve, progress=progress, engines_root=engines_root
    ) as server:
        text = server.as_text()
        answer = server.demonstrate(progress)
        if answer is not None:
            text += f"\n{answer.as_text()}"
        if stay:
            progress.note(text)
            progress.note("serving until interrupted")
            server.wait()
        return {"state": "served", "text": text, **server.as_dict()}


@contextmanager
def _timed(report: PipelineReport, name: str) -> Iterator[None]:
    """Note the seconds of a stage, whether it ends well or not."""
    started = time.monotonic()
    try:
        yield
    finally:
        report.seconds[name] = time.monotonic() - started


__all__ = ["PipelineReport", "run_pipeline"]
