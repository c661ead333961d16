"""Carrying out a conversion: compared, proved, written by a crew, and put in place.

A whole run does all of it. A part compares and writes its own share into the stage and ends
there; the run that finalizes finds all files finished, and does the rest.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

from ckpt.convert import locks, publish, staging
from ckpt.convert.checks import compare_copies, describe_drift
from ckpt.convert.collect import check_finished, part_report
from ckpt.convert.conversion import ConvertReport, PartReport, describe_outcome
from ckpt.convert.crew import Crew, Done, Here, Job, carry_through, choose_workers
from ckpt.convert.needs import needs_of
from ckpt.convert.run import Run, unit_bytes
from ckpt.convert.share import deal
from ckpt.convert.units import Written, copy_unchanged, look_ahead, read_receipt, write_unit
from ckpt.convert.write import disk_faults
from ckpt.manifest import write_stage
from ckpt.shards import INDEX_NAME, index_content
from ckpt.terminal import format_bytes, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ckpt.convert.conversion import Conversion
    from ckpt.convert.locks import Claim
    from ckpt.convert.plan import Check
    from ckpt.convert.units import Unit

_CLUSTER_BYTES = 4 * 10**9
_CHECK_JOBS = 32  # stored copies are compared in so many jobs, for workers to share


def carry_out(run: Run, prove: Callable[[Conversion], Conversion]) -> ConvertReport | PartReport:
    """Do a run, with ``prove`` before its first byte of weights.

    Raises OutputError when the output is in the way, is being written by others or cannot be
    written, and for parts that lack; SourceError for weights that must not or cannot be read;
    what ``prove`` raises.
    """
    started, output, note = time.monotonic(), run.output, run.progress.note
    staging.check_output(output, overwrite=run.options.overwrite)
    staging.check_apart(output, run.conversion.checkpoint.directory)
    own = {unit.name for unit in _own_units(run)} if run.is_part else None
    # Before the lock: parts that start together must not wait for each other's looking around.
    needs = (
        None if run.share.finalize else needs_of(run.conversion, output, run.options.workers, own)
    )
    with locks.claim(output, run.share, note) as claim:
        staging.check_output(output, overwrite=run.options.overwrite)
        finished = publish.finished_section(run.stage, run.conversion.fingerprint)
        if finished and not run.is_part:
            publish.publish(run.stage, output, overwrite=run.options.overwrite)
            return ConvertReport(output, finished)
        for text in (*run.conversion.notes, *([run.share.note()] if run.is_part else [])):
            note(f"note: {text}")
        _tell_of_parts(run)
        if run.share.finalize:
            check_finished(run)
        if needs:
            needs.room.check()
            note(needs.as_line())
        if run.is_part:
            staging.open_stage(claim, run.purpose, run.share, note)
        compared, drift = _compare(run)
        if drift:
            run = run.noting(drift)
        run = replace(run, conversion=prove(run.conversion))
        stage = staging.open_stage(claim, run.purpose, run.share, note)
        with disk_faults(stage):
            staging.record_checks(stage, _parts(run), compared)
            written = _write_weights(run, claim, stage)
        if run.is_part:
            return part_report(run, stage, written, time.monotonic() - started)
        return _finish(run, stage, written, started)


def _tell_of_parts(run: Run) -> None:
    """Say where the stage was written in another number of parts, and how one is run again."""
    state = staging.read_state(run.stage, run.purpose)
    before, of = staging.parts_of(state), run.share.of
    if run.share.finalize or before in {1, of} or not staging.has_receipts(run.stage):
        return
    this = f"this is {run.share}, and" if run.is_part else "this is a whole run over them: it"
    rest = "what it still lacks" if run.is_part else "the rest here"
    run.progress.note(
        f"note: the unfinished output was written in {before} parts; {this} takes what they "
        f"finished and writes {rest}; one of them is run again by --shard-index I "
        f"--num-shards {before}"
    )


def _finish(run: Run, stage: Path, written: list[Written], started: float) -> ConvertReport:
    with disk_faults(stage):
        written += _write_beside(run.conversion, stage)
        publish.check_names(stage, [file.name for file in written])
        staging.check_written(stage, run.conversion.files)
        seconds = time.monotonic() - started
        section = describe_outcome(run.conversion, run.options, written, seconds)
        write_stage(stage, "convert", section)  # from here on nothing is left but a rename
    publish.publish(stage, run.output, overwrite=run.options.overwrite)
    return ConvertReport(run.output, section)


def _parts(run: Run) -> int:
    """In how many parts stored copies are compared: as files are, by this run and the last."""
    if run.is_part:
        return run.share.of
    return staging.parts_of(staging.read_state(run.stage, run.purpose))


def _compare(run: Run) -> tuple[dict[int, dict[str, float]], str | None]:
    """Compare stored copies, as far as no earlier run has: what was found now, and a line."""
    of = _parts(run)
    known = staging.recorded_checks(run.stage, of)
    known = known if staging.read_state(run.stage, run.purpose) else {}
    parts = deal(run.conversion.plan.checks, _check_bytes, of)
    wanted = [run.share.index] if run.is_part else range(of)
    lacking = [index for index in wanted if index not in known]
    checks = [check for index in lacking for check in parts[index]]
    drift: dict[str, float] = {}
    for found in (known.get(index, {}) for index in wanted):
        _join(drift, found)
    now = _compare_all(run, checks)
    _join(drift, now)
    # Which part found it does not matter: they are joined in the end.
    records = {index: now if index == lacking[0] else {} for index in lacking}
    return records, describe_drift(drift)


def _join(drift: dict[str, float], found: dict[str, float]) -> None:
    for name, distance in found.items():
        drift[name] = max(distance, drift.get(name, 0.0))


def _compare_all(run: Run, checks: Sequence[Check]) -> dict[str, float]:
    total, drift = sum(map(_check_bytes, checks)), dict[str, float]()
    if not checks:
        return drift
    run.progress.start("comparing stored copies", total)
    jobs = []
    for each in deal(checks, _check_bytes, _CHECK_JOBS):
        files = {file for check in each for file in (check.first.file, check.other.file)}
        own = {file: run.stamps[file] for file in sorted(files) if file in run.stamps}
        work = partial(compare_copies, each, own)
        jobs += [Job("stored copies", sum(map(_check_bytes, each)), work, tuple(own))] * bool(each)
    # Little is compared sooner here than a cluster has begun to.
    alone = run.options.executor == "ray" and total < _CLUSTER_BYTES
    crew = Here(run.progress.advance) if alone else _crew(run, len(jobs), total)
    for _, done in _done(jobs, crew):
        _join(drift, done.result)
    run.progress.finish()
    return drift


def _check_bytes(check: Check) -> int:
    return check.first.nbytes


def _own_units(run: Run) -> list[Unit]:
    return list(run.share.of_items(run.units, unit_bytes) if run.is_part else run.units)


def _write_weights(run: Run, claim: Claim, stage: Path) -> list[Written]:
    """Write the files of this share that are not there; all of the share's in order."""
    units = _own_units(run)
    if not units:
        run.progress.note(
            f"note: {run.share} has no file: {plural(len(run.units), 'file')} for "
            f"{run.share.of} parts"
        )
    look_ahead(stage, [unit.name for unit in units])
    found = {unit.name: kept for unit in units if (kept := read_receipt(stage, unit))}
    lacking = [unit for unit in units if unit.name not in found]
    kept_bytes = sum(unit.nbytes for unit in units if unit.name in found)
    if found:
        size = format_bytes(kept_bytes)
        run.progress.note(
            f"note: kept {len(found)} of {plural(len(units), 'finished file')} ({size})"
        )
    total = sum(map(unit_bytes, units))
    staging.clear_parts(stage, None if claim.alone else [unit.name for unit in lacking])
    staging.check_room(claim, stage, total - kept_bytes)
    if lacking:
        run.progress.start("writing weights", total, done=kept_bytes)
    for number, kept in enumerate(found.values()):
        _tell(run, kept, (number + 1, len(units)), None)
    try:
        jobs = [
            Job(unit.name, unit.nbytes, partial(write_unit, unit, stage), tuple(unit.stamps))
            for unit in lacking
        ]
        for _, done in _done(jobs, _crew(run, len(jobs), total - kept_bytes)):
            found[done.result.name] = done.result
            _tell(run, done.result, (len(found), len(units)), done)
    finally:
        staging.clear_parts(stage, [unit.name for unit in lacking])
    run.progress.finish()
    return [found[unit.name] for unit in units]


def _tell(run: Run, written: Written, number: tuple[int, int], done: Done | None) -> None:
    """Tell of a finished file, the first of two numbers; nothing was done for a kept one."""
    facts = {key: asdict(written)[key] for key in ("name", "size", "sha256")}
    facts |= {"seconds": round(done.seconds if done else 0.0, 3), "resumed": done is None}
    facts |= {"node": done.where} if done and done.where else {}
    run.progress.event("shard", {**facts, "number": number[0], "of": number[1]})


def _crew(run: Run, jobs: int, nbytes: int) -> Crew:
    wanted = None if run.options.workers == "auto" else run.options.workers
    if not jobs:
        return Here(run.progress.advance)
    if run.options.executor == "ray":
        from ckpt.convert.on_ray import OnRay  # noqa: PLC0415 - an extra

        return OnRay(run.progress.advance, staging.marker(run.stage), wanted)
    workers = choose_workers(wanted, jobs, nbytes)
    if workers == 1:
        return Here(run.progress.advance)
    from ckpt.convert.processes import Processes  # noqa: PLC0415 - only where more are wanted

    return Processes(workers, run.progress.advance)


def _done(jobs: Sequence[Job], crew: Crew) -> Iterator[tuple[Job, Done]]:
    """In order by one, as files are read best; largest first by many, so that they end together."""
    if crew.width > 1:
        jobs = sorted(jobs, key=lambda job: -job.nbytes)
    with closing(carry_through(jobs, crew)) as done:
        yield from done


def _write_beside(conversion: Conversion, stage: Path) -> list[Written]:
    """Tokenizer, index, reference logits, and config.json, without which nothing loads, last."""
    written = [
        copy_unchanged(copy.file, copy.stamp, stage, copy.name) for copy in conversion.copied
    ]
    names = []
    if len(conversion.files) > 1:
        staging.write_json(stage / INDEX_NAME, index_content(conversion.files))
        names.append(INDEX_NAME)
    staging.write_json(stage / "config.json", dict(conversion.config))
    names.append("config.json")
    return [*written, *(_hashed(stage, name) for name in names)]


def _hashed(directory: Path, name: str) -> Written:
    content = (directory / name).read_bytes()
    return Written(name, len(content), sha256(content).hexdigest())
