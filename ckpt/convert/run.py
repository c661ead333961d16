"""A conversion that is about to be carried out, with all that the steps need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ckpt.convert import staging
from ckpt.convert.share import WHOLE, Share
from ckpt.convert.units import Unit

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.config import ConvertOptions
    from ckpt.convert.conversion import Conversion
    from ckpt.progress import Progress
    from ckpt.storage import Stamp


@dataclass(frozen=True)
class Run:
    """A planned conversion, where it goes, which share of it is wanted, and who listens."""

    conversion: Conversion
    output: Path
    options: ConvertOptions
    progress: Progress
    share: Share = WHOLE

    @cached_property
    def units(self) -> list[Unit]:
        """The files of all parts."""
        return units_of(self.conversion, self.options)

    @property
    def stamps(self) -> dict[str, Stamp]:
        """Sizes and times of the source's files, by path."""
        return _stamps(self.conversion)

    @property
    def stage(self) -> Path:
        """Where the output grows."""
        return staging.stage_path(self.output)

    @property
    def purpose(self) -> staging.Purpose:
        """What the stage is for."""
        c = self.conversion
        return staging.Purpose(c.fingerprint, c.identity, self.options.of_content())

    def noting(self, line: str) -> Run:
        """The same run with one more note, which is told at once."""
        self.progress.note(f"note: {line}")
        notes = (*self.conversion.notes, line)
        return replace(self, conversion=replace(self.conversion, notes=notes))

    @property
    def is_part(self) -> bool:
        """Whether this run leaves the output to the one that finalizes."""
        return self.share.partial and not self.share.finalize


def units_of(conversion: Conversion, options: ConvertOptions) -> list[Unit]:
    """The output files that hold weights, each with all that is needed to write it."""
    targets = {target.spec.name: target for target in conversion.plan.targets}
    known = _stamps(conversion)
    units = []
    for name, specs in conversion.files:
        chosen = tuple(targets[spec.name] for spec in specs)
        root, allow = str(conversion.checkpoint.directory), options.allow_nonfinite
        unit = Unit(name, chosen, {}, conversion.fingerprint, root, allow)
        read = sorted({copy.file for copy in unit.copies()})
        units.append(replace(unit, stamps={file: known[file] for file in read if file in known}))
    return units


def _stamps(conversion: Conversion) -> dict[str, Stamp]:
    root = conversion.checkpoint.directory
    return {str(root / name): stamp for name, stamp in conversion.identity["files"].items()}


def unit_bytes(unit: Unit) -> int:
    """What units are dealt out by."""
    return unit.nbytes
