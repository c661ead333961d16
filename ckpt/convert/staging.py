"""The directory in which an output grows, and the one moment in which it appears.

Output ``OUT`` grows in ``.OUT.ckpt-partial`` beside it and is renamed when it is complete.
config.json is written after the weights, so an interrupted stage loads as nothing.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

from ckpt.convert.units import RECEIPT_SUFFIX, file_digest
from ckpt.convert.write import PART_SUFFIX
from ckpt.errors import OutputError
from ckpt.manifest import MANIFEST_NAME, read_stage, write_json
from ckpt.shards import INDEX_NAME, read_header
from ckpt.storage import lies_in
from ckpt.terminal import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ckpt.shards import TensorSpec

__all__ = [
    "check_apart",
    "check_names",
    "check_output",
    "check_written",
    "clear_receipts",
    "finished_section",
    "open_stage",
    "publish",
    "stage_path",
    "write_json",
]
_STATE_NAME = "ckpt-stage.json"
_RESERVE_BYTES = 64 * 2**20


def stage_path(output: Path) -> Path:
    """Where the output grows."""
    return output.with_name(f".{output.name}.ckpt-partial")


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise OutputError when something is in the way that must not be replaced."""
    if output.is_symlink() or output.is_file():
        raise OutputError("the output is not a directory", file=output)
    if not output.exists() or not any(output.iterdir()):
        return
    if not overwrite:
        raise OutputError(
            "the output exists", file=output, hint="Choose another one, or give --overwrite"
        )
    if not (output / MANIFEST_NAME).is_file():
        raise OutputError(
            "the output exists and was not written by ckpt, so --overwrite does not touch it",
            file=output,
            hint="Remove it yourself, or choose another one",
        )


def check_apart(output: Path, source: Path) -> None:
    """Raise OutputError when the output would grow inside the checkpoint."""
    if lies_in(output, source):
        raise OutputError(
            "the output lies inside the checkpoint", file=output, hint="Choose another place"
        )


def open_stage(output: Path, fingerprint: str, needed_bytes: int) -> Path:
    """The stage directory: that of an interrupted run of the same conversion, or an empty one.

    Raises OutputError when the disk lacks room for what is still to be written.
    """
    stage = stage_path(output)
    try:
        if not _is_same(stage, fingerprint):
            shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(parents=True, exist_ok=True)
        for part in stage.glob(f"*{PART_SUFFIX}"):
            part.unlink()
        there = sum(file.stat().st_size for file in stage.glob("*.safetensors"))
        free = shutil.disk_usage(stage).free
        if free < needed_bytes - there + _RESERVE_BYTES:
            if not there:
                shutil.rmtree(stage, ignore_errors=True)
            raise OutputError(
                "not enough room on the disk",
                file=output.parent,
                expected=f"{format_bytes(needed_bytes - there + _RESERVE_BYTES)} free",
                found=format_bytes(free),
            )
        write_json(stage / _STATE_NAME, {"fingerprint": fingerprint})
    except OSError as error:
        raise OutputError(f"cannot write here: {error.strerror}", file=stage) from error
    return stage


def _is_same(stage: Path, fingerprint: str) -> bool:
    try:
        content = json.loads((stage / _STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(content.get("fingerprint") == fingerprint)


def check_written(stage: Path, files: Sequence[tuple[str, Sequence[TensorSpec]]]) -> None:
    """Read every header back: files, index and plan must say the same."""
    for name, specs in files:
        found = read_header(stage / name)
        if found != {spec.name: spec for spec in specs}:
            raise OutputError("the file does not hold what was planned", file=stage / name)
    names = {name for name, _ in files}
    there = {path.name for path in stage.glob("*.safetensors")}
    if there != names:
        raise OutputError(
            "files that do not belong here", file=stage, found=", ".join(sorted(there ^ names))
        )
    if len(names) > 1:
        index = json.loads((stage / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"]
        if index != {spec.name: name for name, specs in files for spec in specs}:
            raise OutputError("the index does not name what the files hold", file=stage)


def clear_receipts(stage: Path) -> None:
    """Remove what only an interrupted run needs."""
    for receipt in stage.glob(f"*{RECEIPT_SUFFIX}"):
        receipt.unlink()
    (stage / _STATE_NAME).unlink(missing_ok=True)


def finished_section(stage: Path, fingerprint: str) -> dict[str, Any] | None:
    """The manifest's section of a stage that only has to be published, read whole to be sure.

    None for any other: the run that wrote it ended before, or it is not what was written.
    """
    try:
        section = read_stage(stage, "convert")
    except OutputError:
        return None
    if section is None or section.get("fingerprint") != fingerprint:
        return None
    outputs = {entry["name"]: entry["sha256"] for entry in section["outputs"]}
    whole = all(file_digest(stage / name) == digest for name, digest in outputs.items())
    return section if whole else None


def check_names(stage: Path, names: Iterable[str]) -> None:
    """Raise OutputError when anything but these files would be published with the stage."""
    there = {str(path.relative_to(stage)) for path in stage.rglob("*") if not path.is_dir()}
    own = {path.name for path in stage.glob(f"*{RECEIPT_SUFFIX}")} | {_STATE_NAME}
    strange = sorted(there - own - set(names))
    if strange:
        raise OutputError(
            "files that do not belong here",
            file=stage,
            found=", ".join(strange),
            hint="Move them away; the same command then goes on from here",
        )


def publish(stage: Path, output: Path) -> None:
    """Let the finished directory appear under its name; an older output goes away.

    Where the file system can, both change places at once: one of them is always there.
    """
    old = output.with_name(f".{output.name}.ckpt-old")
    try:
        clear_receipts(stage)
        for directory in (stage, *(path for path in stage.rglob("*") if path.is_dir())):
            _flush(directory)
        if output.exists():
            shutil.rmtree(old, ignore_errors=True)
            _replace(stage, output, old)
        else:
            stage.rename(output)
        _flush(output.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise OutputError(
            f"cannot put the output in place: {error.strerror}",
            file=output,
            hint="It is finished: once that is mended, the same command only puts it there",
        ) from error


def _replace(stage: Path, output: Path, old: Path) -> None:
    if _exchange(stage, output):
        stage.rename(old)
    else:
        output.rename(old)
        stage.rename(output)


def _exchange(one: Path, other: Path) -> bool:
    """Let two directories change names in one step; False where that does not exist (rename(2))."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}:
        return False
    raise OSError(number, os.strerror(number))


def _flush(directory: Path) -> None:
    """Make names in a directory durable; some file systems refuse that, or need it not."""
    try:
        fd = os.open(directory, os.O_RDONLY)
    except PermissionError:  # it may be written and not be read
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP}:
            raise
    finally:
        os.close(fd)
