"""The verdict of a validation, and what kind of fault looks like what was seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.validate.logits import Agreement

_LAYER_COSINE = 0.9999
_GOOD_START = 1e-3


@dataclass(frozen=True)
class ValidationReport:
    """Figures and verdict; ``layers`` has the least cosine behind each layer, if known."""

    agreement: Agreement
    origin: str
    min_cosine: float
    max_abs_diff: float
    first_position_diff: float
    padding_columns: int
    layers: Mapping[int, float] = field(default_factory=dict)
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
        return next((n for n, cosine in self.layers.items() if cosine < _LAYER_COSINE), None)

    def as_dict(self) -> dict[str, Any]:
        """The report for machines and for the manifest."""
        return {
            "verdict": self.verdict,
            "reference": self.origin,
            "dtype": "float32",
            "thresholds": {"min_cosine": self.min_cosine, "max_abs_diff": self.max_abs_diff},
            "figures": self.agreement.as_dict(),
            "padding_columns": self.padding_columns,
            "layers": {str(layer): cosine for layer, cosine in self.layers.items()},
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
        largest = f"abs diff max {a.max_abs_diff:.2e} (allowed {self.max_abs_diff:g}), "
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
        if self.layers and self.first_bad_layer is None:
            lines.append(f"  all {len(self.layers)} residual streams agree")
        if not self.passed:
            lines.append(f"  likely fault: {self.likely_fault()}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def likely_fault(self) -> str:
        """A guess at the fault from where the difference begins."""
        layer = self.first_bad_layer
        if layer == 0:
            return "embedding: order of the vocabulary, scale, or learned positions"
        if layer is not None:
            return f"layer {layer - 1} is the first that differs: {self._within_layer()}"
        if self.layers:
            return "behind the last layer: final norm or output head"
        return self._within_layer()

    def _within_layer(self) -> str:
        if self.first_position_diff < _GOOD_START < self.agreement.max_abs_diff:
            return "the first position agrees and later ones do not: rotary base or scaling"
        return "order of queries, keys and values; gate and up; a norm; or an expert's number"
