"""The verdict of a validation, and what kind of fault looks like what was seen."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.validate.logits import Agreement, LayerAgreement

# Right conversions reach about 1e-6 in fp32; a norm that is off by 2 % gives about 1e-2.
_LAYER_DIFF = 1e-3
_GOOD_START = 1e-2
_HALF_COSINE = 0.99


@dataclass(frozen=True)
class ValidationReport:
    """Figures and verdict; ``layers`` has each layer's residual stream, if both sides gave it."""

    agreement: Agreement
    origin: str
    min_cosine: float
    max_abs_diff: float
    padding_columns: int
    layers: Mapping[int, LayerAgreement] = field(default_factory=dict)
    half_reference: bool = False
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every position is as close as was asked for."""
        return self.agreement.passes(min_cosine=self.min_cosine, max_abs_diff=self.max_abs_diff)

    @property
    def verdict(self) -> str:
        """``passed`` or ``failed``."""
        return "passed" if self.passed else "failed"

    @property
    def first_bad_layer(self) -> int | None:
        """The first layer whose residual stream differs; 0 stands for the embedding."""
        if self.half_reference:
            return None
        differ = (n for n, layer in self.layers.items() if layer.max_relative_diff > _LAYER_DIFF)
        return next(differ, None)

    def as_dict(self) -> dict[str, Any]:
        """The report for machines and for the manifest."""
        return {
            "verdict": self.verdict,
            "reference": self.origin,
            "dtype": "float32",
            "thresholds": {"min_cosine": self.min_cosine, "max_abs_diff": self.max_abs_diff},
            "figures": self.agreement.as_dict(),
            "padding_columns": self.padding_columns,
            "layers": {str(number): asdict(layer) for number, layer in self.layers.items()},
            "first_bad_layer": self.first_bad_layer,
            "likely_fault": None if self.passed else self.likely_fault(),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }

    def as_text(self) -> str:
        """The report for people."""
        a = self.agreement
        head = f"validation {self.verdict}: {a.positions} positions in fp32 against the original"
        cosine = f"cosine min {a.min_cosine:.7f} (needs {self.min_cosine}), "
        largest = f"abs diff max {a.max_abs_diff:.2e} (allowed {self._allowed()}), "
        divergence = f"KL max {a.max_kl:.2e}, mean {a.mean_kl:.2e}; "
        worst = f"worst at sequence {a.worst_sequence}, position {a.worst_position}; "
        lines = [
            f"{head} ({self.origin})",
            f"  {cosine}mean {a.mean_cosine:.7f}",
            f"  {largest}mean {a.mean_abs_diff:.2e}",
            f"  {divergence}top-1 agreement {a.top1:.2%}",
            f"  {worst}positions beyond {a.longest - 1} were not checked",
        ]
        if self.padding_columns:
            lines.append(f"  {self.padding_columns} padding columns of the original left out")
        if self.layers and self.first_bad_layer is None and not self.half_reference:
            lines.append(f"  all {len(self.layers)} residual streams agree")
        if not self.passed:
            lines.append(f"  likely fault: {self.likely_fault()}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _allowed(self) -> str:
        allowed = self.agreement.allowed(self.max_abs_diff)
        if allowed == self.max_abs_diff:
            return f"{allowed:g}"
        return f"{allowed:.2g}: {self.max_abs_diff:g} of the logits' spread"

    def likely_fault(self) -> str:
        """A guess at the fault from where the difference begins."""
        if self.half_reference and self.agreement.min_cosine >= _HALF_COSINE:
            return (
                "perhaps none: the original's logits were computed in half precision; record "
                "them in fp32, take the reference 'megatron', or give wider limits"
            )
        layer = self.first_bad_layer
        if layer == 0:
            return "embedding: order of the vocabulary, scale, or learned positions"
        if layer is not None:
            return f"layer {layer - 1} is the first that differs: {self._within_layer()}"
        if self.layers and not self.half_reference:
            return "behind the last layer: final norm or output head"
        return (
            f"{self._within_layer()} (where it begins is not known: the reference has no usable "
            "hidden states; the reference 'megatron' has them)"
        )

    def _within_layer(self) -> str:
        if self.agreement.first_position_diff < _GOOD_START * self.agreement.max_abs_diff:
            return (
                "the first position, which attends to itself alone, agrees and later ones do not: "
                "rotary base or scaling, or order or norm of queries and keys"
            )
        return "order of queries, keys and values; gate and up; a norm; a bias; or the experts"
