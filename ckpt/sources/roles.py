"""What the entries of a pipeline's layer list are, told by the names of their tensors.

DeepSpeed numbers every entry of the list, functions included, so that the first decoder
layer is 2 in one code base and 3 in another. Files (``layer_05-...``), modules without a
pipeline (``sequential.5.``) and parameters (``5.input_layernorm.weight``) use these numbers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpt.errors import SourceError
from ckpt.sources import names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_NUMBERED = re.compile(r"(?:sequential\.)?(\d+)\.(.+)")
_TIED = re.compile(r"tied_modules\.[^.]+\.(.+)")
_HEADS = ("lm_head.weight", "final_linear.weight", "output_layer.weight")
_EMBEDDINGS = ("word_embeddings.weight", "position_embeddings.weight")
_NORM = re.compile(r"((norm|final_layernorm)\.)?(weight|bias|scale)")
_EMBEDDING = "embedding.word_embeddings.weight"


def plain_names(keys: Iterable[str], file: object) -> dict[str, str]:
    """The canonical name of every stored name, layers counted from 0.

    Raises SourceError for an entry of unknown role, for decoder layers whose numbers have a
    gap, and for two names of one tensor.
    """
    found: dict[str, str] = {}
    groups: dict[int, list[tuple[str, str]]] = {}
    for key in keys:
        plain = names.strip_prefixes(key)
        if numbered := _NUMBERED.fullmatch(plain):
            groups.setdefault(int(numbered[1]), []).append((key, numbered[2]))
        elif tied := _TIED.fullmatch(plain):
            found[key] = names.canonical(f"embedding.{tied[1]}")
        else:
            found[key] = names.canonical(plain)
    found |= _of_groups(groups, set(found.values()), file)
    _check_once(found, file)
    return found


def _of_groups(
    groups: Mapping[int, Sequence[tuple[str, str]]], known: set[str], file: object
) -> dict[str, str]:
    found: dict[str, str] = {}
    layers: list[int] = []
    for number in sorted(groups):
        prefix = _role([rest for _, rest in groups[number]], number, file)
        if prefix == "decoder.layers.":
            prefix = f"decoder.layers.{len(layers)}."
            layers.append(number)
        for key, rest in groups[number]:
            name = _name(prefix, rest)
            if name == _EMBEDDING and name in known:  # the tied module once more, as the head
                name = "output_layer.weight"
            found[key] = name
            known.add(name)
    missing = sorted(set(range(layers[0], layers[-1])) - set(layers)) if layers else []
    if missing:
        listed = ", ".join(f"layer_{number:02d}-model_*" for number in missing)
        raise SourceError(f"decoder layers are missing: {listed}", file=file)
    return found


def _role(keys: Sequence[str], number: int, file: object) -> str:
    """The prefix of the names of one entry."""
    if any(key.endswith(_EMBEDDINGS) for key in keys):
        return "embedding."
    if any(".dense" in key or "query_key_value" in key for key in keys):
        return "decoder.layers."
    if all(_NORM.fullmatch(key) for key in keys):
        return "decoder.final_layernorm."
    if set(keys) & set(_HEADS):
        return "output_layer."
    raise SourceError(
        f"pipeline layer {number} is of unknown role",
        file=file,
        found=", ".join(sorted(keys)[:5]),
    )


def _name(prefix: str, rest: str) -> str:
    if prefix in {"decoder.final_layernorm.", "output_layer."}:
        return prefix + rest.rpartition(".")[2].replace("scale", "weight")
    return names.canonical(prefix + rest.removeprefix("embed."))


def _check_once(found: Mapping[str, str], file: object) -> None:
    for name, keys in _by_name(found):
        if len(keys) > 1:
            raise SourceError(
                "two entries are the same tensor", file=file, tensor=name, found=" and ".join(keys)
            )


def _by_name(found: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    by_name: dict[str, list[str]] = {}
    for key, name in found.items():
        by_name.setdefault(name, []).append(key)
    yield from by_name.items()
