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
    size (vllm/model_executor/models/llama.py); MLP widths must divide. The vocabulary does
    not matter: vLLM pads it.

    >>> legal_sizes({"num_attention_heads": 28, "num_key_value_heads": 4})
    [1, 2, 4, 28]
    """
    heads = _heads(config)
    return [size for size in range(1, min(limit, heads) + 1) if not obstacles(config, size)]


def obstacles(config: Mapping[str, Any], size: int) -> list[str]:
    """Why the model cannot be split over ``size`` ranks; empty if it can."""
    heads, groups = _heads(config), _groups(config)
    found = []
    if heads % size:
        found.append(f"{heads} attention heads do not divide by {size}")
    if groups % size and size % groups:
        found.append(f"{groups} key-value heads are neither a multiple nor a divisor of {size}")
    for key in _widths(config):
        width = config.get(key)
        if isinstance(width, int) and width % size:
            found.append(f"{key} {width} does not divide by {size}")
    return found


def _widths(config: Mapping[str, Any]) -> list[str]:
    """Names of the MLP widths that occur in the model."""
    names = ["moe_intermediate_size", "shared_expert_intermediate_size", "n_inner"]
    only_experts = (
        config.get("moe_intermediate_size")
        and config.get("decoder_sparse_step") == 1
        and not config.get("mlp_only_layers")
    )
    return names if only_experts else ["intermediate_size", *names]


def _heads(config: Mapping[str, Any]) -> int:
    for name in ("num_attention_heads", "n_head"):
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ServeError("config.json lacks num_attention_heads")


def _groups(config: Mapping[str, Any]) -> int:
    """Key-value heads; multi-latent attention has one latent for all query heads."""
    if config.get("kv_lora_rank"):
        return _heads(config)
    return int(config.get("num_key_value_heads") or _heads(config))


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
        if wanted not in legal:
            raise ServeError(
                f"tensor-parallel size {wanted} is not possible: "
                f"{'; '.join(_hindrances(config, wanted, devices))}",
                hint=f"Possible for this model: {_listed(legal_sizes(config))}; "
                f"with {devices.count} {devices.kind}: {_listed(legal)}",
            )
        return _choice(config, wanted, "as asked for")
    if trained is None:
        why = "the training's size is not known; --tensor-parallel takes another"
        return _choice(config, 1, why)
    if trained in legal:
        return _choice(config, trained, "as in training")
    nearest = min(legal, key=lambda size: (abs(size - trained), size))
    reasons = "; ".join(_hindrances(config, trained, devices))
    return _choice(
        config, nearest, f"the nearest possible to training's {trained}, since {reasons}"
    )


def _hindrances(config: Mapping[str, Any], size: int, devices: Devices) -> list[str]:
    reasons = obstacles(config, size)
    if size > devices.count:
        reasons.append(f"there are {devices.count} {devices.kind} here")
    return reasons


def _choice(config: Mapping[str, Any], size: int, why: str) -> Choice:
    groups = _groups(config)
    note = ""
    if size > groups:
        note = f" (each of the {groups} key-value heads is kept on {size // groups} ranks)"
    return Choice(size, f"tensor-parallel size {size}, {why}{note}")


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) or "none"
