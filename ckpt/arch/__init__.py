"""The families that can be converted: a literal registry, and the choice among them."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from ckpt.arch.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, GLM_MOE_DSA
from ckpt.arch.ernie import ERNIE45
from ckpt.arch.foreign import FOREIGN, foreign_family, refuse_foreign
from ckpt.arch.gemma import GEMMA, GEMMA2, GEMMA3
from ckpt.arch.glm import GLM4_MOE, GLM4_MOE_LITE
from ckpt.arch.glm4 import GLM4
from ckpt.arch.gpt import BLOOM, GPT2, GPT_NEOX
from ckpt.arch.gpt_oss import GPT_OSS
from ckpt.arch.llama import LLAMA, MISTRAL, MIXTRAL
from ckpt.arch.minimax import MINIMAX_M2
from ckpt.arch.nemotron import NEMOTRON, NEMOTRON_H
from ckpt.arch.olmoe import OLMOE
from ckpt.arch.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_NEXT
from ckpt.arch.table import Architecture, Const, Rule
from ckpt.errors import FamilyError

if TYPE_CHECKING:
    from ckpt.training import TrainingArgs

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Const",
    "Rule",
    "choose_architecture",
    "refuse_foreign",
]

# In order of choice: where two families fit a checkpoint, the first one is taken.
ARCHITECTURES: dict[str, Architecture] = {
    item.name: item
    for item in (
        LLAMA,
        QWEN2,
        QWEN3,
        MISTRAL,
        MIXTRAL,
        QWEN3_MOE,
        QWEN2_MOE,
        QWEN3_NEXT,
        NEMOTRON_H,
        NEMOTRON,
        DEEPSEEK_V3,
        DEEPSEEK_V2,
        DEEPSEEK_V32,
        GLM_MOE_DSA,
        GLM4_MOE,
        GLM4_MOE_LITE,
        GPT_OSS,
        GPT2,
        GPT_NEOX,
        BLOOM,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GLM4,
        ERNIE45,
        MINIMAX_M2,
        OLMOE,
    )
}


def choose_architecture(args: TrainingArgs, family: str | None = None) -> Architecture:
    """The family that can represent the model; ``family`` overrides the choice by name.

    Raises FamilyError for an unknown name and when no family, or not that one, fits; the
    message says what stands in the way of the nearest one.
    """
    if family is not None:
        chosen = _by_name(family)
        reasons = chosen.mismatches(args)
        if reasons:
            raise FamilyError(
                f"family {family} cannot represent this model: {'; '.join(reasons)}",
                hint=_DROP if args.mtp_kept else None,
            )
        return _answered(chosen, args)
    for architecture in ARCHITECTURES.values():
        if not architecture.mismatches(args):
            return _answered(architecture, args)
    nearest = min(ARCHITECTURES.values(), key=lambda item: len(item.mismatches(args)))
    raise FamilyError(
        f"no family fits this model; nearest is {nearest.name}, but "
        + "; ".join(nearest.mismatches(args)),
        hint=f"Known families: {', '.join(ARCHITECTURES)}"
        + (f". {_DROP}" if args.mtp_kept else ""),
    )


_DROP = "--mtp drop leaves out the layers that predict further tokens"


def _answered(architecture: Architecture, args: TrainingArgs) -> Architecture:
    """The family itself; raises FamilyError where the arguments leave out what it depends on."""
    missing = architecture.unanswered(args)
    if missing:
        raise FamilyError(
            f"this looks like {architecture.name}, but the training arguments do not say all of it",
            hint="Supply " + " ".join(f"--set {text}" for text in missing),
        )
    return architecture


def _by_name(family: str) -> Architecture:
    for architecture in ARCHITECTURES.values():
        if family.lower() in {architecture.name, *architecture.aliases}:
            return architecture
    foreign = foreign_family(family)
    if foreign is not None:
        raise foreign.error(f"--family {family}")
    names = [*ARCHITECTURES]
    names += [alias for item in ARCHITECTURES.values() for alias in item.aliases]
    names += [alias for row in FOREIGN for alias in row.aliases]
    near = difflib.get_close_matches(family.lower(), names, n=1)
    raise FamilyError(
        f"unknown family {family!r}",
        hint=(f"Did you mean {near[0]}? " if near else "")
        + f"Known families: {', '.join(ARCHITECTURES)}",
    )
