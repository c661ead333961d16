"""The files beside the weights: config.json, the index, and the tokenizer's files as they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.arch.table import Const
from ckpt.convert.facts import fact
from ckpt.errors import OptionsError

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.arch.table import Architecture
    from ckpt.tensors import DType
    from ckpt.training import TrainingArgs

# What transformers and vLLM read beside the weights; anything else stays behind.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
TEMPLATE_DIRECTORY = "additional_chat_templates"


def build_config(
    architecture: Architecture, args: TrainingArgs, *, vocab_size: int, dtype: DType
) -> dict[str, Any]:
    """The content of config.json: the table's keys filled from the training arguments."""
    config: dict[str, Any] = {"architectures": [architecture.model_class]}
    for key, value in architecture.config.items():
        config[key] = value.value if isinstance(value, Const) else fact(value, args)
    config["vocab_size"] = vocab_size
    # transformers before 4.56 reads the first name, transformers 5 the second.
    config["torch_dtype"] = config["dtype"] = dtype.torch_name
    return config


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer files of a directory, and what they say about the vocabulary."""

    files: tuple[tuple[str, Path], ...]
    size: int | None
    highest_id: int | None
    has_chat_template: bool
    special: dict[str, int]


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in ``directory``; raises OptionsError when there is none."""
    if not directory.is_dir():
        raise OptionsError(
            "no such tokenizer directory",
            file=directory,
            hint="Give --tokenizer the directory that holds tokenizer.json or tokenizer.model",
        )
    files = [(name, directory / name) for name in TOKENIZER_FILES if (directory / name).is_file()]
    templates = directory / TEMPLATE_DIRECTORY
    if templates.is_dir():
        files += [(f"{TEMPLATE_DIRECTORY}/{path.name}", path) for path in templates.glob("*.jinja")]
    names = {name for name, _ in files}
    if not names & {"tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "vocab.txt"}:
        raise OptionsError(
            "no tokenizer here", file=directory, expected="tokenizer.json or tokenizer.model"
        )
    try:
        vocabulary = _vocabulary(directory)
        special = _special(directory, vocabulary)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise OptionsError(f"damaged tokenizer files: {error!r}", file=directory) from error
    highest = max(vocabulary.values()) if vocabulary else None
    return Tokenizer(
        files=tuple(files),
        size=None if highest is None else highest + 1,
        highest_id=highest,
        has_chat_template=_has_template(directory),
        special=special,
    )


def _load(file: Path) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise OptionsError(f"cannot read: {error}", file=file) from error


def _vocabulary(directory: Path) -> dict[str, int]:
    """Token ids by token, added tokens included; empty where no JSON vocabulary is there."""
    content = _load(directory / "tokenizer.json")
    vocabulary: dict[str, int] = {}
    if isinstance(content, dict):
        model = content.get("model", {}).get("vocab", {})
        if isinstance(model, dict):
            vocabulary |= {token: int(number) for token, number in model.items()}
        else:
            vocabulary |= {entry[0]: number for number, entry in enumerate(model)}
        added = content.get("added_tokens") or []
        vocabulary |= {entry["content"]: int(entry["id"]) for entry in added}
    elif isinstance(plain := _load(directory / "vocab.json"), dict):
        vocabulary |= {token: int(number) for token, number in plain.items()}
        more = _load(directory / "added_tokens.json") or {}
        vocabulary |= {token: int(number) for token, number in more.items()}
    return vocabulary


def _has_template(directory: Path) -> bool:
    if any((directory / f"chat_template.{kind}").is_file() for kind in ("jinja", "json")):
        return True
    config = _load(directory / "tokenizer_config.json")
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _special(directory: Path, vocabulary: dict[str, int]) -> dict[str, int]:
    """Ids of the begin, end and padding tokens that tokenizer_config.json names."""
    config = _load(directory / "tokenizer_config.json") or {}
    found = {}
    for key in ("bos_token", "eos_token", "pad_token"):
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token in vocabulary:
            found[f"{key}_id"] = vocabulary[token]
    return found
