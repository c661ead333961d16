"""How far two sets of logits are apart, position by position, and when that is a verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ckpt.errors import ValidationError

_MIN_POSITIONS = 2


@dataclass(frozen=True)
class Agreement:
    """Differences between two models' logits over all positions.

    Cosine, absolute difference and Kullback-Leibler divergence (natural logarithm, original
    against converted) are per position in double precision; ``top1`` is the share of
    positions whose most likely token agrees.
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
    worst_sequence: int
    worst_position: int

    def as_dict(self) -> dict[str, Any]:
        """The figures by name."""
        return asdict(self)

    def passes(self, *, min_cosine: float, max_abs_diff: float) -> bool:
        """Whether every position is as close as asked for."""
        return self.min_cosine >= min_cosine and self.max_abs_diff <= max_abs_diff


def compare(original: torch.Tensor, converted: torch.Tensor) -> Agreement:
    """The agreement of logits of shape [sequences, positions, vocabulary].

    The original may have padding columns behind the vocabulary; they are not compared.
    Raises ValidationError for logits on which no comparison could fail.
    """
    if original.shape[:2] != converted.shape[:2]:
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
    reference = original[..., :vocabulary].double()
    _refuse_empty(reference, "the original")
    _refuse_empty(converted, "the converted model")
    return _measure(reference, converted.double())


def _refuse_empty(logits: torch.Tensor, whose: str) -> None:
    """A check that cannot fail is refused."""
    if logits.shape[1] < _MIN_POSITIONS or logits.shape[0] < 1:
        raise ValidationError(
            "too few positions: rotary faults are zero at the first one",
            expected=f"at least {_MIN_POSITIONS}",
            found=logits.shape[1],
        )
    if not torch.isfinite(logits).all():
        raise ValidationError(f"the logits of {whose} hold NaN or infinity")
    if (logits == logits[..., :1]).all():
        raise ValidationError(f"the logits of {whose} are constant, so nothing can be compared")


def _measure(original: torch.Tensor, converted: torch.Tensor) -> Agreement:
    cosine = torch.nn.functional.cosine_similarity(original, converted, dim=-1)
    difference = (original - converted).abs()
    per_position = difference.amax(-1)
    kl = _divergence(original, converted)
    worst = int(per_position.argmax())
    same = original.argmax(-1) == converted.argmax(-1)
    return Agreement(
        positions=cosine.numel(),
        longest=original.shape[1],
        min_cosine=float(cosine.min()),
        mean_cosine=float(cosine.mean()),
        max_abs_diff=float(per_position.max()),
        mean_abs_diff=float(difference.mean()),
        max_kl=float(kl.max()),
        mean_kl=float(kl.mean()),
        top1=float(same.double().mean()),
        worst_sequence=worst // original.shape[1],
        worst_position=worst % original.shape[1],
    )


def _divergence(original: torch.Tensor, converted: torch.Tensor) -> torch.Tensor:
    log_p, log_q = original.log_softmax(-1), converted.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)


def layer_cosines(
    original: dict[int, torch.Tensor], converted: dict[int, torch.Tensor]
) -> dict[int, float]:
    """The least cosine over positions of each layer's residual stream, [sequences, positions, H].

    Only layers that both sides give are compared.
    """
    return {
        layer: float(
            torch.nn.functional.cosine_similarity(
                original[layer].double(), converted[layer].double(), dim=-1
            ).min()
        )
        for layer in sorted(original.keys() & converted.keys())
    }
