"""Whether a set of tensors is exactly the model of its config.json: names, shapes and counts.

What is expected comes from transformers itself (``ckpt.metamodel``). Only layers that predict
further tokens, which it does not build and vLLM reads, follow from the table of the family.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt.arch import ARCHITECTURES
from ckpt.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckpt.arch import Architecture
    from ckpt.metamodel import MetaModel, Shape

_SHOWN = 8
# Positions that a model computes anew; older versions of transformers stored them.
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_LAYER = "model.layers.{layer}."


@dataclass(frozen=True)
class Differences:
    """Names that are missing or not expected, and shapes that are not the model's."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: tuple[tuple[str, Shape, Shape], ...] = ()

    def __len__(self) -> int:
        """How many there are."""
        return len(self.missing) + len(self.unexpected) + len(self.shapes)

    def lines(self) -> list[str]:
        """One line for each kind: how many, and the first few by name."""
        shapes = [
            f"{name} (expected {list(expected)}, found {list(found)})"
            for name, expected, found in self.shapes
        ]
        kinds = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", shapes),
        )
        return [f"{len(names)} {kind}: {_first(names)}" for kind, names in kinds if names]

    def as_dict(self) -> dict[str, Any]:
        """All of them, for machines."""
        return {
            "missing": list(self.missing),
            "unexpected": list(self.unexpected),
            "shapes": [
                {"name": name, "expected": list(expected), "found": list(found)}
                for name, expected, found in self.shapes
            ],
        }


def _first(names: tuple[str, ...] | list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Proof:
    """What was compared before the first byte, or in ``lacks`` why nothing could be.

    ``built`` is ``memo`` where an earlier run of the same libraries had built the model.
    """

    model_class: str
    transformers: str
    tensors: int = 0
    parameters: int = 0
    further_tensors: int = field(default=0)
    lacks: str = ""
    built: str = "now"

    def as_dict(self) -> dict[str, Any]:
        """The field ``proof`` of the manifest."""
        found: dict[str, Any] = {"proved": not self.lacks, "class": self.model_class}
        found["transformers"] = self.transformers
        if self.lacks:
            return {**found, "reason": self.lacks}
        return {
            **found,
            "what": ["names", "shapes", "parameter count"],
            "tensors": self.tensors,
            "parameters": self.parameters,
            "tensors_by_the_table": self.further_tensors,
            "built": self.built,
        }

    def as_text(self) -> str:
        """One line for people."""
        if self.lacks:
            return f"not proved: {self.lacks}"
        text = f"proved: names, shapes and parameter count are those of {self.model_class}"
        if self.further_tensors:
            text += f"; {self.further_tensors} further tensors are those of the family's table"
        return text


def prove(
    found: Mapping[str, Shape],
    config: Mapping[str, Any],
    model: MetaModel,
    architecture: Architecture,
) -> Proof:
    """Compare the tensors that will be written with the model that config.json describes.

    Raises PlanError with a short diff for any difference. Where transformers has no such
    model the proof says so.
    """
    if model.lacks:
        return Proof(model.model_class, model.transformers, lacks=model.lacks)
    further = further_layers(architecture, config, model.stored)
    expected = {**model.stored, **further}
    differences = compare(expected, found)
    if differences:
        raise PlanError(
            f"what would be written is not what transformers {model.transformers} builds from "
            f"config.json as {model.model_class}: {'; '.join(differences.lines())}",
            expected=f"{count_elements(expected):,} parameters",
            found=f"{count_elements(found):,}",
            hint="Nothing was written. Another --family may fit, or an argument of the "
            "checkpoint is not what its tensors are",
        )
    return Proof(
        model.model_class,
        model.transformers,
        tensors=len(found),
        parameters=count_elements(found),
        further_tensors=len(further),
        built=model.built,
    )


def compare(expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> Differences:
    """What ``found`` has not, has beside, and has in another shape; in order of the names."""
    return Differences(
        tuple(name for name in expected if name not in found),
        tuple(name for name in found if name not in expected),
        tuple(
            (name, shape, found[name])
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ),
    )


def count_elements(shapes: Mapping[str, Shape]) -> int:
    """Elements of all tensors."""
    return sum(prod(shape) for shape in shapes.values())


def architecture_of(model_class: str) -> Architecture | None:
    """The table of a model class, or None where there is none."""
    return next((a for a in ARCHITECTURES.values() if a.model_class == model_class), None)


def further_layers(
    architecture: Architecture | None, config: Mapping[str, Any], stored: Mapping[str, Shape]
) -> dict[str, Shape]:
    """Names and shapes of the layers behind the last one that predict further tokens.

    Each has the tensors of the last decoder layer under the next number, those of its own
    that the table names, and the copies of embedding and head that the table asks for.
    """
    own = [rule for rule in architecture.rules if "{mtp}" in rule.source] if architecture else []
    count = int(config.get("num_nextn_predict_layers") or 0)
    if architecture is None or not own or not count:
        return {}
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    last, block = _LAYER.format(layer=layers - 1), architecture.mtp_block or _LAYER
    inside = {n.removeprefix(last): s for n, s in stored.items() if n.startswith(last)}
    found: dict[str, Shape] = {}
    for number in range(count):
        numbers = {"layer": layers + number, "mtp": number}
        found |= {block.format(**numbers) + name: shape for name, shape in inside.items()}
        for rule in own:
            # Megatron-Core's layer has norms, and one matrix that takes [embedding; hidden].
            shape: Shape = (hidden,) if rule.norm else (hidden, 2 * hidden)
            found |= {target.format(**numbers): shape for target in rule.targets}
        for rule in architecture.rules:
            if rule.mtp_copies and rule.targets[0] in stored:
                shape = stored[rule.targets[0]]
                found |= {copy.format(**numbers): shape for copy in rule.mtp_copies}
    return found


def reconcile(
    found: Mapping[str, Shape], config: Mapping[str, Any], model: MetaModel
) -> tuple[Differences, list[str]]:
    """:func:`compare` for a directory of any origin, and a note for each spelling accepted.

    Accepted are fused experts and those in one tensor each, names without the prefix of the
    model below the head, copies of tied tensors, stored positions, and what the class itself
    passes over when it loads. Layers that predict further tokens may be absent altogether, as
    transformers leaves them, but not in part.
    """
    notes: list[str] = []
    names = {name: name for name in found}
    start = f"{model.prefix}."
    if _has(model.stored, start) and not _has(found, start):
        names = {n if n in model.stored else start + n: n for n in found}
        notes.append(f"names lack the prefix {start}")
    shapes = {name: found[stored] for name, stored in names.items()}
    differences, fused = _nearest(shapes, config, model)
    further = further_layers(architecture_of(model.model_class), config, model.stored)
    if further and not any(name in further for name in shapes):
        own = {*model.stored, *model.loaded}
        gone = tuple(name for name in differences.missing if name in own)
        differences = replace(differences, missing=gone)
        notes.append(
            "config.json promises layers that predict further tokens, and none is stored; "
            "transformers saves none, and speculative decoding with them will fail"
        )
    if fused:
        notes.append("experts are fused, as transformers holds them in memory")
    left = []
    counts: dict[str, int] = {}
    for name in differences.unexpected:
        reason = _accepted(name, shapes[name], model)
        if reason:
            counts[reason] = counts.get(reason, 0) + 1
        else:
            left.append(names[name])
    notes += [f"{count} x {reason}" for reason, count in counts.items()]
    return replace(differences, unexpected=tuple(left)), notes


def _has(names: Iterable[str], start: str) -> bool:
    return any(name.startswith(start) for name in names)


def _nearest(
    shapes: Mapping[str, Shape], config: Mapping[str, Any], model: MetaModel
) -> tuple[Differences, bool]:
    """The comparison with the spelling, saved or in memory, from which less differs."""
    held = {name: shape for name, shape in model.loaded.items() if name not in model.tied}
    architecture, results = architecture_of(model.model_class), []
    for expected in (model.stored, held):
        further = further_layers(architecture, config, expected)
        results.append(compare({**expected, **further}, shapes))
    saved, fused = results
    if len(fused) < len(saved):
        return fused, True
    return saved, False


def _accepted(name: str, shape: Shape, model: MetaModel) -> str:
    """Why a tensor that is not expected does no harm; empty where it may."""
    if name in model.tied and model.loaded[name] == shape:
        return "copy of a tied tensor"
    if _COMPUTED.search(name):
        return "stored positions, which are computed anew"
    if any(re.search(pattern, name) for pattern in model.ignored):
        return f"tensor that {model.model_class} passes over"
    return ""
