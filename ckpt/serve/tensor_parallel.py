"""Which tensor-parallel sizes a model can be served with, decided from config.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.errors import ServeError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LARGEST = 1024


@dataclass(frozen=True)
class Devices:
    """What can hold ranks: GPUs, or the cores of a CPU."""

    kind: str
    count: int


@dataclass(frozen=True)
class Choice:
    """A tensor-parallel size and why it is that one."""

    size: int
    reason: str


def legal_sizes(config: Mapping[str, Any], limit: int = _LARGEST) -> list[int]:
    """Sizes that vLLM accepts for the model, up to ``limit``.

    Query heads must divide evenly; key-value heads must be a multiple or a divisor of the
    size (vllm/model_executor/models/llama.py); MLP widths must divide.
    """
    heads = _integer(config, "num_attention_heads", "n_head")
    return [size for size in range(1, min(limit, heads) + 1) if not obstacles(config, size)]


def obstacles(config: Mapping[str, Any], size: int) -> list[str]:
    """Why the model cannot be split over ``size`` ranks; empty if it can."""
    heads = _integer(config, "num_attention_heads", "n_head")
    groups = int(config.get("num_key_value_heads") or heads)
    found = []
    if heads % size:
        found.append(f"{heads} attention heads do not divide by {size}")
    if groups % size and size % groups and not config.get("kv_lora_rank"):
        found.append(f"{groups} key-value heads are neither a multiple nor a divisor of {size}")
    for key in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        width = config.get(key)
        if isinstance(width, int) and width % size:
            found.append(f"{key} {width} does not divide by {size}")
    return found


def _integer(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ServeError(f"config.json lacks {names[0]}")


def choose(
    config: Mapping[str, Any], wanted: int | str, trained: int | None, devices: Devices
) -> Choice:
    """The size to serve with.

    ``wanted`` is a number, which is taken or refused, or ``match``: the training's size
    where it is legal here, else the nearest legal one. Raises ServeError for a number that
    cannot be, listing those that can.
    """
    legal = [size for size in legal_sizes(config) if size <= devices.count]
    if isinstance(wanted, int):
        reasons = obstacles(config, wanted)
        if wanted > devices.count:
            reasons.append(f"only {devices.count} {devices.kind} here")
        if reasons:
            raise ServeError(
                f"tensor-parallel size {wanted} is not possible: {'; '.join(reasons)}",
                hint=f"Possible here: {', '.join(map(str, legal))}",
            )
        return Choice(wanted, f"tensor-parallel size {wanted}, as asked for")
    if trained is None:
        return Choice(1, "tensor-parallel size 1: the training's size is not known")
    if trained in legal:
        return Choice(trained, f"tensor-parallel size {trained}, as in training")
    nearest = min(legal, key=lambda size: (abs(size - trained), size))
    reasons = obstacles(config, trained)
    if trained > devices.count:
        reasons.append(f"only {devices.count} {devices.kind} here")
    return Choice(
        nearest,
        f"tensor-parallel size {nearest}, the nearest possible to training's {trained}: "
        + "; ".join(reasons),
    )
