"""What an interrupted conversion left, recognised by whoever is pointed at it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpt.errors import ModelError
from ckpt.storage import is_remote

if TYPE_CHECKING:
    from pathlib import Path

# As ``ckpt.convert.staging`` and ``ckpt.convert.units`` name them, which need NumPy.
STATE_NAME = "ckpt-stage.json"
STAGE_NAME = ".{}.ckpt-partial"
_NUMBERED = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")


def refuse_unfinished(path: Path) -> None:
    """Raise ModelError where ``path`` is, or its name waits for, an unfinished output."""
    if is_remote(path):
        return
    stage = path if path.is_dir() else path.with_name(STAGE_NAME.format(path.name))
    if not (stage / STATE_NAME).is_file():
        return
    names = [file.name.removesuffix(".receipt.json") for file in stage.glob("*.receipt.json")]
    counts = [int(found[1]) for name in names if (found := _NUMBERED.fullmatch(name))]
    total = f" of {counts[0]}" if counts else ""
    raise ModelError(
        "unfinished output of ckpt",
        file=stage,
        found=f"{len(names)}{total} finished files of weights" if names else "no finished file",
        hint="Run the same convert command again; it goes on from here",
    )
