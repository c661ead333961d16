"""An architecture as a table: one row a tensor, and how its config.json is filled.

A row names a Megatron-Core tensor (canonical spelling, see ``ckpt.sources.names``), its
layout and the Hugging Face tensors that it becomes. ``{layer}`` and ``{expert}`` stand for
numbers on both sides. A Hugging Face name without ``{expert}`` that takes a row with
``{expert}`` is a stack of all experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.layout import Layout
    from ckpt.training import TrainingArgs

Scope = Literal["all", "dense", "moe", "attention", "linear_attention", "mamba"]


@dataclass(frozen=True)
class Rule:
    """One row: a training tensor and what it becomes.

    ``when`` is the name of a truth in the training arguments that the row depends on, with
    ``!`` for its opposite; ``layers`` restricts ``{layer}`` to layers with a block of that
    kind (see :meth:`~ckpt.training.TrainingArgs.has_kind`). ``norm`` marks a gain that may be
    stored as distance from 1; a ``plain`` one is multiplied as it is whatever the family's
    other norms do. ``keep_dtype`` exempts a tensor from casts. ``mtp_copies`` are further names
    under which each layer that predicts another token repeats the tensor.
    """

    source: str
    layout: Layout
    targets: tuple[str, ...]
    when: str | None = None
    layers: Scope = "all"
    norm: bool = False
    plain: bool = False
    keep_dtype: bool = False
    mtp_copies: tuple[str, ...] = ()

    def applies(self, args: TrainingArgs) -> bool:
        """Whether the model has this row's tensors."""
        if self.when is None:
            return True
        holds = bool(getattr(args, self.when.lstrip("!")))
        return holds != self.when.startswith("!")

    def has_layer(self, args: TrainingArgs, layer: int) -> bool:
        """Whether the row is there in layer ``layer``."""
        return self.layers == "all" or args.has_kind(layer, self.layers)


@dataclass(frozen=True)
class Const:
    """A value of config.json that is the same for every model of the family."""

    value: Any


@dataclass(frozen=True)
class Architecture:
    """A family: which training arguments it stands for, its rows, and its config.json.

    ``expects`` maps names of :class:`~ckpt.training.TrainingArgs` to the values that the
    Hugging Face class can represent; anything else is refused with the reason that this
    gives. ``config`` maps keys of config.json to a :class:`Const` or to the name of a fact
    in ``ckpt.convert.facts``. ``norm_adds_one`` says that the Hugging Face class computes
    with 1 + weight. ``asks`` maps facts that may be None for want of a training argument to what
    the user should give with ``--set``. ``proof`` says what the table is held to: the logits
    of Megatron-Core's own model, those of one that the tests rebuilt from its pieces, or only
    the names and shapes of Hugging Face's. ``mtp_block``
    is the name that the decoder layer inside a layer that predicts a further token has, where
    it does not simply count on. ``cautions`` are truths of the training
    arguments, with what a user must know where they hold.
    """

    name: str
    model_class: str
    expects: Mapping[str, tuple[Any, ...]]
    rules: tuple[Rule, ...]
    config: Mapping[str, str | Const]
    norm_adds_one: bool = False
    aliases: tuple[str, ...] = field(default=())
    understands: frozenset[str] = frozenset()
    asks: Mapping[str, str] = field(default_factory=dict)
    proof: Literal["logits", "rebuilt", "shapes"] = "shapes"
    mtp_block: str = ""
    cautions: tuple[tuple[str, str], ...] = ()

    def mismatches(self, args: TrainingArgs) -> list[str]:
        """Why this family cannot represent the model, one line for each reason."""
        reasons = [
            f"{name} is {getattr(args, name)!r}, {self.name} needs {_either(allowed)}"
            for name, allowed in self.expects.items()
            if getattr(args, name) not in allowed
        ]
        return reasons + [
            f"{self.name} does not have {line}"
            for name, line in args.unusual
            if name not in self.understands
        ]

    def unanswered(self, args: TrainingArgs) -> list[str]:
        """What the user must still say before the model can be represented."""
        return [text for name, text in self.asks.items() if getattr(args, name) is None]

    def warnings(self, args: TrainingArgs) -> list[str]:
        """What a user of the converted model must know, one line for each caution that holds."""
        return [line for name, line in self.cautions if getattr(args, name)]


def _either(allowed: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in allowed)
