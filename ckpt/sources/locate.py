"""Which directory is meant: a run's root with its tracker file, or one iteration."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ckpt.errors import SourceError
from ckpt.sources.foreign import explain

if TYPE_CHECKING:
    from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
DEEPSPEED_TRACKER = "latest"
CONFIG = "metadata.json"
UNIVERSAL_TRACKER = "latest_universal"
_ITERATION = re.compile(r"iter_(\d{7,})|global_step(\d+)(?:_universal)?")
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
IterationChoice = int | Literal["latest", "release"]


@dataclass(frozen=True)
class Located:
    """One iteration's directory, its format, and what was decided on the way to it."""

    directory: Path
    format: str
    iteration: int | str | None
    notes: tuple[str, ...] = ()


def detect_format(directory: Path) -> str | None:
    """The format of an iteration's directory, or None if it holds no complete checkpoint."""
    if _sharded_backend(directory) == "zarr":
        return "zarr"
    if (directory / ".metadata").is_file():
        megatron = any((directory / name).is_file() for name in (CONFIG, "common.pt"))
        return "torch_dist" if megatron else "torch_dcp"
    ranks = [path for path in directory.glob("mp_rank_*") if _RANK.fullmatch(path.name)]
    if any((path / "model_optim_rng.pt").is_file() for path in ranks):
        return "torch"
    return _deepspeed_form(directory)


def _deepspeed_form(directory: Path) -> str | None:
    """DeepSpeed's three forms: a directory for each parameter, whole weights, or partitions."""
    whole = any(directory.glob("mp_rank_*_model_states.pt"))
    parts = any(directory.glob("zero_pp_rank_*_model_states.pt"))
    if (directory / "zero").is_dir() and (whole or parts):
        return "deepspeed_universal"
    if whole:
        return "deepspeed"
    return "deepspeed_zero3" if parts else None


def _sharded_backend(directory: Path) -> object:
    """What Megatron-Core's ``metadata.json``, the last file that it saves, calls the format."""
    try:
        content = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content.get("sharded_backend") if isinstance(content, dict) else None


def locate(path: Path, iteration: IterationChoice = "latest") -> Located:
    """The iteration that ``path`` and ``iteration`` mean.

    ``path`` may be a run's root or one iteration's directory. Raises SourceError when
    there is none, when it is incomplete, or when the choice would be a guess.
    """
    if path.is_file():
        raise SourceError("a file, not a checkpoint", file=path, hint="Give its directory")
    if not path.is_dir():
        raise SourceError(
            "no such directory",
            file=path,
            hint="Give the run's directory, with its tracker file, or one iteration's",
        )
    kind = detect_format(path)
    if kind is not None:
        return _given_iteration(path, kind, iteration)
    found = _iterations(path)
    if not found:
        meaning = explain(path, detect_format)
        raise SourceError(meaning.message, file=path, hint=meaning.hint)
    complete = {name: directory for name, directory in found.items() if detect_format(directory)}
    if iteration != "latest":
        return _chosen(path, iteration, found, complete)
    return _latest(path, found, complete)


def _given_iteration(path: Path, kind: str, iteration: IterationChoice) -> Located:
    number = _number(path.name)
    if iteration not in {"latest", number}:
        raise SourceError(
            "the path is one iteration, and not the one that was asked for",
            file=path,
            expected=iteration,
            found=path.name,
            hint="Give the directory above it, or leave out --iteration",
        )
    return Located(path, kind, number)


def _number(name: str) -> int | str | None:
    found = _ITERATION.fullmatch(name)
    if found:
        return int(found[1] or found[2])
    return "release" if name == "release" else None


def _iterations(root: Path) -> dict[int | str, Path]:
    """Directories that look like iterations, by number, in ascending order."""
    paths = sorted((path for path in root.iterdir() if path.is_dir()), reverse=True)
    found = {_number(path.name): path for path in paths}  # the plain name before _universal
    found.pop(None, None)
    ordered = sorted(found.items(), key=lambda item: (isinstance(item[0], str), item[0]))
    return {name: path for name, path in ordered if name is not None}


def _chosen(
    root: Path,
    iteration: int | str,
    found: dict[int | str, Path],
    complete: dict[int | str, Path],
) -> Located:
    if iteration in complete:
        directory = complete[iteration]
        return Located(directory, detect_format(directory) or "", iteration)
    if iteration in found:
        raise SourceError(
            "this iteration is incomplete: its save was interrupted or is still going on",
            file=found[iteration],
            expected=".metadata, or mp_rank_*/model_optim_rng.pt",
            found=_content(found[iteration]),
            hint=_advice(complete),
        )
    raise SourceError(f"no iteration {iteration} here", file=root, hint=_advice(complete))


def _latest(root: Path, found: dict[int | str, Path], complete: dict[int | str, Path]) -> Located:
    tracker = root / TRACKER
    if not tracker.is_file():
        tracker = root / DEEPSPEED_TRACKER
    if not tracker.is_file():
        tracker = root / UNIVERSAL_TRACKER
    if not tracker.is_file():
        return _without_tracker(root, found, complete)
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    text = text.removeprefix("global_step").removesuffix("_universal")
    if text != "release" and not re.fullmatch("[0-9]{1,18}", text):
        raise SourceError(
            "the tracker file is damaged",
            file=tracker,
            expected="an iteration number or 'release'",
            found=repr(text[:40]),
            hint=_advice(complete),
        )
    located = _chosen(root, "release" if text == "release" else int(text), found, complete)
    passed_over = [path.name for name, path in found.items() if _is_newer(name, located.iteration)]
    note = f"iteration {text}, which {tracker.name} names"
    if passed_over:
        note += f"; {', '.join(passed_over)} came later and is not finished by that file"
    return Located(located.directory, located.format, located.iteration, (note,))


def _is_newer(name: int | str, than: int | str | None) -> bool:
    return isinstance(name, int) and isinstance(than, int) and name > than


def _without_tracker(
    root: Path, found: dict[int | str, Path], complete: dict[int | str, Path]
) -> Located:
    if len(complete) == 1:
        ((name, directory),) = complete.items()
        note = f"{directory.name}, the only complete iteration ({TRACKER} is missing)"
        return Located(directory, detect_format(directory) or "", name, (note,))
    if complete:
        raise SourceError(
            f"{TRACKER} is missing and several iterations are complete",
            file=root,
            hint=_advice(complete),
        )
    names = ", ".join(path.name for path in found.values())
    raise SourceError(f"no complete iteration, only {names}", file=root)


def _content(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    return ", ".join(names[:5]) or "nothing"


def _advice(complete: dict[int | str, Path]) -> str:
    if not complete:
        return "No iteration here is complete"
    return f"Complete iterations: {', '.join(str(name) for name in complete)}"


def rank_directory(name: str) -> tuple[int, ...] | None:
    """The numbers in ``mp_rank_TT[_NNN[_NNN]]``, or None for another name."""
    found = _RANK.fullmatch(name)
    return tuple(int(part) for part in found.groups() if part is not None) if found else None
