"""The directory in which an output grows.

Output ``OUT`` grows in ``.OUT.ckpt-partial`` beside it and is renamed when it is complete.
config.json is written after the weights, so an interrupted stage loads as nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from errno import EACCES
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt import __version__
from ckpt.convert import object_stage
from ckpt.convert.needs import RESERVE_BYTES, Room
from ckpt.convert.units import RECEIPT_SUFFIX, STATE_NAME, own_place
from ckpt.convert.write import PART_SUFFIX
from ckpt.errors import OutputError
from ckpt.manifest import MANIFEST_NAME, TEMPORARY_SUFFIX, refuse_existing, write_json
from ckpt.shards import INDEX_NAME, read_header
from ckpt.storage import is_remote, lies_in, refresh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ckpt.convert.locks import Claim
    from ckpt.convert.share import Share
    from ckpt.shards import TensorSpec

__all__ = [
    "Purpose",
    "check_apart",
    "check_output",
    "check_room",
    "check_written",
    "clear_parts",
    "clear_receipts",
    "describe",
    "has_receipts",
    "marker",
    "open_stage",
    "own_files",
    "parts_of",
    "read_state",
    "record_checks",
    "recorded_checks",
    "stage_path",
    "write_json",
]
_CHECKS_NAME = "ckpt-checked-{:05d}-of-{:05d}.json"
_CHECKS_GLOB = "ckpt-checked-*.json"
_STATE_KINDS = {"fingerprint": str, "parts": int, "options": dict, "source": dict}
_SHOWN = 3
_MOST_PARTS = 10**5


def stage_path(output: Path) -> Path:
    """Where the output grows: in a store in its own place, since nothing is renamed there."""
    if is_remote(output):
        return output
    return output.with_name(f".{output.name}.ckpt-partial")


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise OutputError when something is in the way that must not be replaced."""
    if is_remote(output):
        object_stage.check_output(output, overwrite=overwrite)
        return
    try:
        free, ours = _is_free(output), (output / MANIFEST_NAME).is_file()
    except OSError as error:
        raise OutputError(
            f"cannot look at it: {error.strerror}",
            file=output,
            hint="Give yourself the right to, or choose another one",
        ) from error
    if free:
        return
    refuse_existing(output, ours=ours, overwrite=overwrite)


def _is_free(output: Path) -> bool:
    """Whether a directory can take this name; one without content gives way to it."""
    if not output.name:
        raise OutputError(
            "the output has no name of its own", file=output, hint="Give a directory in it"
        )
    if not output.is_symlink() and not output.exists():
        return True
    if output.is_symlink() or not output.is_dir():
        raise OutputError(
            "the output is not a directory", file=output, hint="Choose another one, or remove it"
        )
    if _is_mount_point(output):
        raise OutputError(
            "the output is a mount point, which no finished directory can replace",
            file=output,
            hint=f"Give a directory in it, such as {output / 'model'}",
        )
    return not any(output.iterdir())


def _is_mount_point(directory: Path) -> bool:
    """Also where a directory of the same file system is bound, as containers do."""
    if directory.is_mount():
        return True
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    place = os.fsencode(directory.resolve())
    escaped = place.replace(b"\\", rb"\134").replace(b" ", rb"\040")
    return any(line.split(b" ")[4] == escaped for line in lines)


def check_apart(output: Path, source: Path) -> None:
    """Raise OutputError when the output or the checkpoint lies inside the other."""
    if lies_in(output, source):
        raise OutputError(
            "the output lies inside the checkpoint", file=output, hint="Choose another place"
        )
    if lies_in(source, output):
        raise OutputError(
            "the checkpoint lies inside the output, which would replace it",
            file=output,
            found=source,
            hint="Choose another place",
        )


@dataclass(frozen=True)
class Purpose:
    """The conversion that a stage is for: its fingerprint, and what tells it from another."""

    fingerprint: str
    source: Mapping[str, Any]
    options: Mapping[str, str]

    def state(self, parts: int) -> dict[str, Any]:
        """What lies in the stage: this, and in how many parts the output is written."""
        return {
            "fingerprint": self.fingerprint,
            "ckpt": __version__,
            "parts": parts,
            "options": dict(self.options),
            "source": dict(self.source),
        }

    def differs_from(self, state: Mapping[str, Any]) -> str:
        """What makes another stage's state another conversion, for people."""
        if not state:
            return "nothing says what it is"
        found = []
        if state.get("ckpt") != __version__:
            found.append(f"ckpt {state.get('ckpt')} wrote it, this is {__version__}")
        options = state.get("options") or {}
        for name in sorted({*options, *self.options}):
            old, new = (str(each.get(name)) for each in (options, self.options))
            if old != new:
                found.append(f"{name} was {old}, is {new}")
        found += _source_changes(state.get("source") or {}, self.source)
        return "; ".join(found) or "config.json or the tokenizer's files were others"


def _source_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    names = ("path", "iteration", "format")
    found = [f"{n} was {old.get(n)}, is {new.get(n)}" for n in names if old.get(n) != new.get(n)]
    if found:
        return found
    before, now = ({k: list(v) for k, v in (s.get("files") or {}).items()} for s in (old, new))
    for words, those in (
        ("changed since", [name for name in now if name in before and before[name] != now[name]]),
        ("new in the source", [name for name in now if name not in before]),
        ("gone from the source", [name for name in before if name not in now]),
    ):
        if those:
            more = f" and {len(those) - _SHOWN} more" if len(those) > _SHOWN else ""
            found.append(f"{words}: {', '.join(those[:_SHOWN])}{more}")
    if old.get("metadata_sha256") != new.get("metadata_sha256") and not found:
        found.append("the source's metadata changed")
    return found


def open_stage(claim: Claim, purpose: Purpose, share: Share, note: Callable[[str], None]) -> Path:
    """The stage directory: that of an earlier run of the same conversion, or an empty one.

    What another conversion left is removed, and ``note`` hears why; never while others may
    write there. Raises OutputError where that, or writing, is not possible.
    """
    stage = stage_path(claim.output)

    def is_ready() -> bool:
        state = read_state(stage, purpose)
        return bool(state) and (not share.partial or state.get("parts") == share.of)

    try:
        with claim.set_up(is_ready):
            if claim.alone or not is_ready():
                _prepare(claim, stage, purpose, share, note)
    except OSError as error:
        raise OutputError(f"cannot write here: {error.strerror}", file=stage) from error
    return stage


def _prepare(
    claim: Claim, stage: Path, purpose: Purpose, share: Share, note: Callable[[str], None]
) -> None:
    known = read_state(stage, purpose)
    if not is_remote(stage) and (stage.is_symlink() or (stage.exists() and not stage.is_dir())):
        raise OutputError(
            "this is where the output grows, and it is no directory",
            file=stage,
            hint="Remove it yourself",
        )
    if not is_remote(stage) and stage.exists() and not os.access(stage.parent, os.W_OK):
        raise PermissionError(EACCES, os.strerror(EACCES))  # it could never be renamed
    if own_place(stage).exists() and not known:
        why = purpose.differs_from(_stored(stage))
        if share.partial and not claim.sure:
            raise OutputError(
                f"the unfinished output of another conversion is here: {why}",
                file=stage,
                hint="Without locks nothing tells whether it is being written: remove it yourself",
            )
        if share.partial and has_receipts(stage):
            raise OutputError(
                f"finished files of another conversion are here: {why}",
                file=stage,
                hint="Give the source and options that the other parts were given; or remove that "
                "directory, or run without parts, to start afresh",
            )
        note(f"note: starting afresh: an unfinished output of another conversion was here: {why}")
        if is_remote(stage):
            object_stage.clear_unfinished(stage)
        else:
            shutil.rmtree(stage, ignore_errors=True)
    if is_remote(stage):
        object_stage.check_replaceable(stage, share)
    stage.mkdir(parents=True, exist_ok=True)
    parts = share.of if share.partial else parts_of(known)
    write_json(own_place(stage) / STATE_NAME, purpose.state(parts))
    if is_remote(stage):
        object_stage.clear_finished(stage)


def has_receipts(stage: Path) -> bool:
    """Whether any file in the stage is finished, for whichever conversion."""
    return any(own_place(stage).glob(f"*{RECEIPT_SUFFIX}"))


def marker(stage: Path) -> Path | None:
    """The file that whoever sees this stage finds in it, once the stage is there."""
    file = stage / STATE_NAME
    return file if not is_remote(stage) and file.is_file() else None


def describe(stage: Path, purpose: Purpose) -> str:
    """What is in the stage instead of what this purpose wants."""
    if not own_place(stage).exists():
        return "nothing"
    return f"another conversion: {purpose.differs_from(_stored(stage))}"


def read_state(stage: Path, purpose: Purpose) -> dict[str, Any]:
    """The state of a stage that is for this purpose; empty for another one's and for none."""
    state = _stored(stage)
    return state if state.get("fingerprint") == purpose.fingerprint else {}


def parts_of(state: Mapping[str, Any]) -> int:
    """In how many parts a stage with this state is written."""
    parts = state.get("parts")
    return parts if isinstance(parts, int) and 1 <= parts <= _MOST_PARTS else 1


def _stored(stage: Path) -> dict[str, Any]:
    try:
        content = json.loads((own_place(stage) / STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    known = isinstance(content, dict) and all(
        isinstance(content.get(key), kind) for key, kind in _STATE_KINDS.items()
    )
    return content if known else {}


def check_room(claim: Claim, stage: Path, needed_bytes: int) -> None:
    """Raise OutputError when the disk lacks room for what is still to be written."""
    if is_remote(stage):
        return
    room = Room(stage.parent, needed_bytes + RESERVE_BYTES, shutil.disk_usage(stage).free)
    if not room.enough and claim.alone and not any(stage.glob(f"*{RECEIPT_SUFFIX}")):
        shutil.rmtree(stage, ignore_errors=True)
    room.check()


def clear_parts(stage: Path, names: Sequence[str] | None) -> None:
    """Remove what ended attempts at files of these names have left, or at any file."""
    if is_remote(stage):
        object_stage.abort_leftovers(stage, names)
        return
    patterns = ["**/*"] if names is None else names
    for part in [part for name in patterns for part in stage.glob(f"{name}.*{PART_SUFFIX}")]:
        part.unlink(missing_ok=True)


def record_checks(stage: Path, of: int, found: Mapping[int, Mapping[str, float]]) -> None:
    """Note which parts of ``of`` have compared their stored copies, and the drift they found."""
    for index, drift in found.items():
        file = own_place(stage) / _CHECKS_NAME.format(index + 1, of)
        write_json(file, {"drift": dict(drift)})


def recorded_checks(stage: Path, of: int) -> dict[int, dict[str, float]]:
    """What :func:`record_checks` noted, of the parts that have compared theirs."""
    found = {}
    for index in range(of):
        try:
            file = own_place(stage) / _CHECKS_NAME.format(index + 1, of)
            text = file.read_text(encoding="utf-8")
            drift = json.loads(text)["drift"].items()
            found[index] = {str(name): float(value) for name, value in drift}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
    return found


def check_written(stage: Path, files: Sequence[tuple[str, Sequence[TensorSpec]]]) -> None:
    """Read every header back: files, index and plan must say the same."""
    refresh(stage)  # other processes may have written there
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
    for file in list(own_files(stage)):
        file.unlink(missing_ok=True)


def own_files(stage: Path) -> Iterator[Path]:
    """What lies in a stage beside its content."""
    for pattern in (f"*{RECEIPT_SUFFIX}", _CHECKS_GLOB, STATE_NAME, f".*{TEMPORARY_SUFFIX}"):
        yield from own_place(stage).glob(pattern)
