"""What a directory is that holds no Megatron run, and which path was probably meant.

Trainers around Megatron-Core put its checkpoints below directories of their own. The right path
is named, and never taken instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Detect = Callable[[Path], str | None]

_SAVE = "Give a Megatron run's --save directory"
# Where verl puts Megatron-Core's weights and a finished Hugging Face model, from a run's root, a
# global_step_N or its actor (verl/utils/megatron_utils.py: layouts 1 and 2).
_STEPS = ("", "actor/", "critic/", "global_step_*/actor/", "global_step_*/critic/")
_VERL_WEIGHTS = tuple(
    f"{step}{rest}" for step in _STEPS for rest in ("dist_ckpt", "model/dist_ckpt")
)
_VERL_FINISHED = tuple(
    f"{step}{rest}" for step in _STEPS for rest in ("huggingface", "model/huggingface")
)
_VERL_FSDP = tuple(f"{step}model_world_size_*_rank_*.pt" for step in _STEPS)


@dataclass(frozen=True)
class Meaning:
    """What the directory is, and the next step."""

    message: str
    hint: str


def explain(root: Path, detect: Detect) -> Meaning:
    """What ``root`` seems to be; ``detect`` tells the format of an iteration's directory."""
    names = sorted(path.name for path in root.iterdir())
    for kind in (_nemo, _verl):
        meaning = kind(root, set(names), detect)
        if meaning is not None:
            return meaning
    if not names:
        return Meaning("the directory is empty", _SAVE)
    if "config.json" in names:
        return Meaning("a Hugging Face model, not a Megatron checkpoint", _SAVE)
    if any(name.endswith(".distcp") for name in names):
        return Meaning(
            "a save that was interrupted or is still going on: .distcp files without .metadata",
            "Take another iteration, or copy this one again",
        )
    return Meaning(f"no Megatron checkpoint here (found {', '.join(names[:5])})", _SAVE)


def _nemo(root: Path, names: set[str], detect: Detect) -> Meaning | None:
    if names >= {"weights", "context"}:
        found = root / "weights"
        if detect(found):
            return Meaning("a NeMo checkpoint", f"Give its Megatron checkpoint, {found}")
        return Meaning(f"a NeMo checkpoint, and {found} is incomplete", "Copy it again")
    if root.name == "context" and names & {"model.yaml", "io.json"}:
        return Meaning(
            "the context of a NeMo checkpoint, which holds no weights",
            f"Give {root.parent / 'weights'}",
        )
    return None


def _verl(root: Path, names: set[str], detect: Detect) -> Meaning | None:
    weights = [path for path in _found(root, _VERL_WEIGHTS) if detect(path)]
    if weights:
        places = ", ".join(str(path) for path in weights)
        return Meaning("a verl run", f"Give its Megatron checkpoint: {places}")
    shards = _found(root, _VERL_FSDP)
    if shards:
        return Meaning(
            "a verl run with FSDP, which is no Megatron checkpoint",
            f"Merge it with verl: python -m verl.model_merger merge --backend fsdp "
            f"--local_dir {shards[0].parent} --target_dir DIR",
        )
    finished = [path for path in _found(root, _VERL_FINISHED) if any(path.glob("*.safetensors"))]
    if finished:
        places = ", ".join(str(path) for path in finished)
        return Meaning("a verl run whose weights are Hugging Face models already", f"See {places}")
    if any(name.startswith("global_step_") for name in names) or "actor" in names:
        return Meaning("a verl run without weights", "Its save was interrupted, or has none in it")
    return None


def _found(root: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in root.glob(pattern)})
