"""How far two sets of logits are apart, position by position, and when that is a verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ckpt.errors import ValidationError

_MIN_POSITIONS = 2
_MIN_TOKENS = 2
_LOGITS_DIM = 3
# Values measured at a time: about ten arrays of doubles are alive meanwhile.
_CHUNK_VALUES = 4 * 2**20


@dataclass(frozen=True)
class Agreement:
    """Differences between two models' logits over all positions.

    Cosine, absolute difference and Kullback-Leibler divergence (natural logarithm, original
    against converted) are per position in double precision; ``top1`` is the share of
    positions whose most likely token agrees. ``spread`` is the standard deviation of the
    original's logits; the worst position is the one with the largest difference.
    """

    positions: int
    longest: int
    min_cosine: float
    mean_cosine: float
    max_abs_diff: float
    mean_abs_diff: float
    max_kl: float
    mean_kl: float
    top1: float
    spread: float
    first_position_diff: float
    worst_sequence: int
    worst_position: int

    def as_dict(self) -> dict[str, Any]:
        """The figures by name."""
        return asdict(self)

    def allowed(self, max_abs_diff: float) -> float:
        """The difference that ``max_abs_diff`` allows: logits near zero must be as exact."""
        return max_abs_diff * min(1.0, self.spread)

    def passes(self, *, min_cosine: float, max_abs_diff: float) -> bool:
        """Whether every position is as close as asked for."""
        return self.min_cosine >= min_cosine and self.max_abs_diff <= self.allowed(max_abs_diff)


@dataclass(frozen=True)
class LayerAgreement:
    """One layer's residual stream: the least cosine and the largest relative difference.

    The relative difference is the norm of the difference over that of the original, at the
    worst position. A cosine alone would not see a wrong scale.
    """

    min_cosine: float
    max_relative_diff: float


def check_input_ids(input_ids: torch.Tensor, vocabulary: int) -> None:
    """Refuse token ids [B, S] that a model cannot take, or on which no fault would show.

    Raises ValidationError. With one token throughout, attention gives the same whatever the
    queries and keys are.
    """
    if input_ids.dim() != _MIN_TOKENS or not input_ids.numel():
        raise ValidationError(
            "no token ids", expected="input_ids [B, S]", found=list(input_ids.shape)
        )
    if input_ids.shape[1] < _MIN_POSITIONS:
        raise ValidationError(
            "too few positions: rotary faults are zero at the first one",
            expected=f"at least {_MIN_POSITIONS}",
            found=input_ids.shape[1],
        )
    least, most = int(input_ids.min()), int(input_ids.max())
    if least < 0 or most >= vocabulary:
        raise ValidationError(
            "a token id lies outside the model's vocabulary",
            expected=f"0 to {vocabulary - 1}",
            found=f"{least} to {most}",
        )
    if least == most:
        raise ValidationError("one token throughout: faults in attention would not show")


def compare(original: torch.Tensor, converted: torch.Tensor) -> Agreement:
    """The agreement of logits of shape [sequences, positions, vocabulary].

    The original may have padding columns behind the vocabulary; they are not compared.
    Raises ValidationError for logits on which no comparison could fail.
    """
    if original.dim() != _LOGITS_DIM or original.shape[:2] != converted.shape[:2]:
        raise ValidationError(
            "the two models answered for different positions",
            expected=list(original.shape[:2]),
            found=list(converted.shape[:2]),
        )
    vocabulary = converted.shape[-1]
    if original.shape[-1] < vocabulary:
        raise ValidationError(
            "the original's logits have fewer columns than the converted model's vocabulary",
            expected=f"at least {vocabulary}",
            found=original.shape[-1],
        )
    original = original[..., :vocabulary]
    _refuse_empty(original, "the original")
    _refuse_empty(converted, "the converted model")
    return _measure(original, converted)


def _refuse_empty(logits: torch.Tensor, whose: str) -> None:
    """A check that cannot fail is refused."""
    if logits.shape[0] < 1 or logits.shape[1] < _MIN_POSITIONS or logits.shape[2] < _MIN_TOKENS:
        raise ValidationError(
            f"too few logits of {whose}: rotary faults are zero at the first position",
            expected=f"[at least 1, at least {_MIN_POSITIONS}, vocabulary]",
            found=list(logits.shape),
        )
    if not torch.isfinite(logits).all():
        raise ValidationError(f"the logits of {whose} hold NaN or infinity")
    if (logits == logits[..., :1]).all():
        raise ValidationError(f"the logits of {whose} are constant, so nothing can be compared")
    if (logits == logits[:1, :1]).all():
        raise ValidationError(f"the logits of {whose} are the same at every position")


def _measure(original: torch.Tensor, converted: torch.Tensor) -> Agreement:
    sequences, length, vocabulary = converted.shape
    step = max(1, _CHUNK_VALUES // vocabulary)
    pairs = zip(
        torch.split(original.reshape(-1, vocabulary), step),
        torch.split(converted.reshape(-1, vocabulary), step),
        strict=True,
    )
    cosine, largest, mean, kl, same = (
        torch.cat(parts)
        for parts in zip(*(_measure_rows(a.double(), b.double()) for a, b in pairs), strict=True)
    )
    worst = int(largest.argmax())
    return Agreement(
        positions=sequences * length,
        longest=length,
        min_cosine=float(cosine.min()),
        mean_cosine=float(cosine.mean()),
        max_abs_diff=float(largest.max()),
        mean_abs_diff=float(mean.mean()),
        max_kl=float(kl.max()),
        mean_kl=float(kl.mean()),
        top1=float(same.mean()),
        spread=float(original.float().std()),
        first_position_diff=float(largest[::length].max()),
        worst_sequence=worst // length,
        worst_position=worst % length,
    )


def _measure_rows(original: torch.Tensor, converted: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Figures of each row of [rows, vocabulary]: cosine, largest, mean, divergence, same top."""
    difference = (original - converted).abs()
    log_p, log_q = original.log_softmax(-1), converted.log_softmax(-1)
    return (
        torch.nn.functional.cosine_similarity(original, converted, dim=-1),
        difference.amax(-1),
        difference.mean(-1),
        (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0),
        (original.argmax(-1) == converted.argmax(-1)).double(),
    )


def compare_layers(
    original: dict[int, torch.Tensor], converted: dict[int, torch.Tensor]
) -> dict[int, LayerAgreement]:
    """The agreement of each layer's residual stream [sequences, positions, hidden].

    Only layers that both sides give are compared. Raises ValidationError for other shapes.
    """
    return {
        layer: _compare_layer(layer, original[layer], converted[layer])
        for layer in sorted(original.keys() & converted.keys())
    }


def _compare_layer(layer: int, original: torch.Tensor, converted: torch.Tensor) -> LayerAgreement:
    if original.shape != converted.shape:
        raise ValidationError(
            f"hidden states of layer {layer} have different shapes",
            expected=list(original.shape),
            found=list(converted.shape),
        )
    first, second = original.double(), converted.double()
    cosine = torch.nn.functional.cosine_similarity(first, second, dim=-1)
    size = first.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    relative = (first - second).norm(dim=-1) / size
    # NaN is kept out of min and max by neither; it must not read as agreement.
    return LayerAgreement(float(cosine.min()), float(relative.nan_to_num(torch.inf).max()))
