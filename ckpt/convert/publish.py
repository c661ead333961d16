"""The one moment in which an output appears: a finished stage gets the output's name."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from typing import TYPE_CHECKING, Any

from ckpt.convert import object_stage
from ckpt.convert.staging import check_output, clear_receipts, own_files
from ckpt.convert.units import file_digest
from ckpt.errors import OutputError
from ckpt.manifest import read_stage
from ckpt.storage import files_below, is_remote

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def finished_section(stage: Path, fingerprint: str) -> dict[str, Any] | None:
    """The manifest's section of a stage that only has to be published, read whole to be sure.

    None for any other: the run that wrote it ended before, or it is not what was written.
    """
    if is_remote(stage):
        return object_stage.finished_section(stage, fingerprint)
    try:
        section = read_stage(stage, "convert")
    except OutputError:
        return None
    if section is None or section.get("fingerprint") != fingerprint:
        return None
    try:
        outputs = {str(entry["name"]): entry["sha256"] for entry in section["outputs"]}
    except (LookupError, TypeError):
        return None
    whole = all(file_digest(stage / name) == digest for name, digest in outputs.items())
    return section if whole and outputs else None


def check_names(stage: Path, names: Iterable[str]) -> None:
    """Raise OutputError when anything but these files would be published with the stage."""
    there = {str(path.relative_to(stage)) for path in files_below(stage)}
    own = {str(path.relative_to(stage)) for path in own_files(stage)}
    strange = sorted(there - own - set(names))
    if strange:
        raise OutputError(
            "files that do not belong here",
            file=stage,
            found=", ".join(strange),
            hint="Move them away; the same command then goes on from here",
        )


def publish(stage: Path, output: Path, *, overwrite: bool) -> None:
    """Let the finished directory appear under its name; an older output goes away.

    Where the file system can, both change places at once: one of them is always there. Raises
    OutputError for what came there meanwhile and must not be replaced.
    """
    if is_remote(output):
        object_stage.clear_own(output)
        return
    check_output(output, overwrite=overwrite)
    old = output.with_name(f".{output.name}.ckpt-old")
    try:
        clear_receipts(stage)
        for directory in (stage, *(path for path in stage.rglob("*") if path.is_dir())):
            _flush(directory)
        if output.exists() and any(output.iterdir()):
            shutil.rmtree(old, ignore_errors=True)
            _replace(stage, output, old)
        else:
            stage.rename(output)  # fails over a directory that has content by now
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
