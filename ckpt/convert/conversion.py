"""A planned conversion and a finished one, as values that print themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ckpt.convert.describe import describe_plan
from ckpt.convert.reference import table_text
from ckpt.terminal import format_bytes, plural

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence
    from pathlib import Path

    from ckpt.arch import Architecture
    from ckpt.completeness import Proof
    from ckpt.config import ConvertOptions
    from ckpt.convert.needs import Needs
    from ckpt.convert.plan import Plan
    from ckpt.convert.reference import Comparison
    from ckpt.convert.share import Share
    from ckpt.convert.units import Written
    from ckpt.shards import TensorSpec
    from ckpt.sources import Checkpoint
    from ckpt.storage import Stamp
    from ckpt.training import TrainingArgs


class Copied(NamedTuple):
    """A file that is copied as it is: its name in the output, where it lies, and its stamp."""

    name: str
    file: Path
    stamp: Stamp


@dataclass(frozen=True)
class Conversion:
    """A planned conversion: what is read, what is written, and every decision on the way."""

    checkpoint: Checkpoint
    args: TrainingArgs
    architecture: Architecture
    plan: Plan
    files: tuple[tuple[str, tuple[TensorSpec, ...]], ...]
    config: Mapping[str, Any]
    copied: tuple[Copied, ...]
    notes: tuple[str, ...]
    identity: Mapping[str, Any]
    fingerprint: str
    reference: Comparison | None = None
    proof: Proof | None = None
    needs: Needs | None = None

    def as_text(self) -> str:
        """The plan in full, for ``--plan``."""
        proof = [self.proof.as_text()] if self.proof else []
        compared = [self.reference.as_text()] if self.reference else []
        notes = [f"note: {note}" for note in self.notes]
        needs = [self.needs.as_text()] if self.needs else []
        parts = [self.summary(), *proof, *notes, *compared, *needs]
        return "\n".join([*parts, describe_plan(self.plan, self.files)])

    def as_dict(self) -> dict[str, Any]:
        """The plan for machines: files, tensors and totals."""
        return {
            "family": self.architecture.name,
            "format": self.checkpoint.format,
            "iteration": self.checkpoint.iteration,
            "parameters": self.plan.parameters,
            "bytes": self.plan.nbytes,
            "notes": list(self.notes),
            "proof": self.proof.as_dict() if self.proof else None,
            "needs": self.needs.as_dict() if self.needs else None,
            "reference": self.reference.as_dict() if self.reference else None,
            "config": dict(self.config),
            "files": [
                {
                    "name": name,
                    "tensors": [
                        {"name": s.name, "dtype": s.dtype.name, "shape": list(s.shape)}
                        for s in specs
                    ],
                }
                for name, specs in self.files
            ],
        }

    def summary(self) -> str:
        """Two lines: what the source is, and what it becomes."""
        c, sizes = self.checkpoint, self.checkpoint.parallelism
        source = f"{c.format} iteration {c.iteration}, TP {sizes.tensor} PP {sizes.pipeline}"
        source += f" VPP {sizes.virtual_pipeline} EP {sizes.expert} ETP {sizes.expert_tensor}"
        return (
            f"source: {c.directory} ({source}, {plural(len(c.tensors), 'tensor')})\n"
            f"target: {self.architecture.model_class}, {self.plan.parameters:,} parameters, "
            f"{self.plan.nbytes:,} bytes in {plural(len(self.files), 'file')}"
        )


@dataclass(frozen=True)
class ConvertReport:
    """A finished conversion, as the manifest holds it."""

    event: ClassVar = "converted"
    output: Path
    section: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The manifest's section, and where it is."""
        return {"output": str(self.output), **self.section}

    def as_text(self, told: Container[str] = ()) -> str:
        """A few lines for people, without the notes that they were ``told`` before."""
        model, seconds = self.section["model"], self.section["seconds"]
        wrote = f"wrote {self.output}: {model['class']}, {model['parameters']:,} parameters, "
        wrote += f"{model['bytes']:,} bytes in {plural(len(self.section['outputs']), 'file')}, "
        lines = [f"{wrote}{seconds:.1f} s"]
        skipped = self.section["skipped"]
        lines += [f"  {item['count']} x {item['reason']} left out" for item in skipped]
        for kind, tensors in self.section["casts"].items():
            for name, count in tensors.items():
                lines.append(f"  warning: {count} values {kind} in the cast of {name}")
        for name, count in self.section["nonfinite"].items():
            lines.append(f"  warning: {count} values of {name} are NaN or infinite, as stored")
        notes = [f"note: {note}" for note in self.section["notes"]]
        lines += [f"  {note}" for note in notes if note not in told]
        if not self.section["proof"]["proved"]:
            lines.append(f"  note: not proved: {self.section['proof']['reason']}")
        if self.section["reference"]:
            lines += [f"  {line}" for line in table_text(self.section["reference"]).splitlines()]
        return "\n".join(lines)


@dataclass(frozen=True)
class PartReport:
    """One finished part of a conversion that nobody has collected yet.

    ``lacking`` are the files that are not there, each with the part that has it.
    """

    event: ClassVar = "part"
    output: Path
    stage: Path
    share: Share
    written: Sequence[Written]
    lacking: Sequence[tuple[str, Share]]
    total: int
    finalize: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The report for machines."""
        return {
            "output": str(self.output),
            "stage": str(self.stage),
            "shard_index": self.share.index,
            "num_shards": self.share.of,
            "outputs": [{"name": w.name, "size": w.size, "sha256": w.sha256} for w in self.written],
            "files": self.total,
            "lacking": [{"name": name, "shard_index": s.index} for name, s in self.lacking],
            "finalize": self.finalize,
            "seconds": round(self.seconds, 3),
        }

    def as_text(self, told: Container[str] = ()) -> str:
        """What this part wrote, what lacks, and how the output comes to its name."""
        del told  # there are no notes in it
        size = format_bytes(sum(w.size for w in self.written))
        size = f"{plural(len(self.written), 'file')}, {size}"
        head = f"{self.share} ({self.share.options()}) of {self.output} is written: {size}"
        lines = [
            f"{head}, {self.seconds:.1f} s",
            f"  {self.total - len(self.lacking)} of {plural(self.total, 'file')}: {self.stage}",
        ]
        parts = sorted({share.index for _, share in self.lacking})
        if parts:
            people, options = (", ".join(str(part + n) for part in parts) for n in (1, 0))
            lines.append(f"  lacking: parts {people} (--shard-index {options})")
        when = "when these are written" if parts else "all parts are written"
        return "\n".join([*lines, f"  {when}: {self.finalize}"])


def describe_outcome(
    conversion: Conversion,
    options: ConvertOptions,
    written: Sequence[Written],
    seconds: float,
) -> dict[str, Any]:
    """The manifest's section of a conversion that was carried out."""
    plan, checkpoint = conversion.plan, conversion.checkpoint
    counts: dict[str, int] = {}
    for target in plan.targets:
        counts[target.spec.dtype.name] = counts.get(target.spec.dtype.name, 0) + 1
    return {
        "fingerprint": conversion.fingerprint,
        "source": conversion.identity,
        "training": checkpoint.parallelism.as_dict(),
        "options": {
            key: str(value)
            for key, value in vars(options).items()
            if value is not None and key != "cache"
        },
        "model": {
            "family": conversion.architecture.name,
            "class": conversion.architecture.model_class,
            "parameters": plan.parameters,
            "bytes": plan.nbytes,
            "dtypes": counts,
            "padding_rows": plan.padding_rows,
        },
        "outputs": [{"name": w.name, "size": w.size, "sha256": w.sha256} for w in written],
        "skipped": [vars(item) for item in checkpoint.skipped],
        "casts": {
            "overflowed": {name: n for w in written for name, n in w.overflowed.items()},
            "underflowed": {name: n for w in written for name, n in w.underflowed.items()},
        },
        "nonfinite": {name: n for w in written for name, n in w.nonfinite.items()},
        "notes": list(conversion.notes),
        "reference": conversion.reference.as_dict() if conversion.reference else None,
        "proof": conversion.proof.as_dict() if conversion.proof else None,
        "seconds": round(seconds, 3),
    }
