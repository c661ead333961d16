"""What can be known to be wrong with a model directory before a server is started."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.errors import ModelError, ServeError
from ckpt.manifest import MANIFEST_NAME, read_stage
from ckpt.shards import INDEX_NAME, REFERENCE_FILE, read_header

if TYPE_CHECKING:
    from pathlib import Path

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True)
class Model:
    """A directory that may be served, and what matters about it."""

    directory: Path
    config: dict[str, Any]
    trained_tensor_parallel: int | None
    has_tokenizer: bool
    has_chat_template: bool
    notes: tuple[str, ...]

    @property
    def dtype(self) -> str:
        """The element type that config.json names."""
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16")

    @property
    def reference(self) -> Path | None:
        """The recorded answers of the original, if they lie in the directory."""
        file = self.directory / REFERENCE_FILE
        return file if file.is_file() else None


def check_model(directory: Path, *, foreign: bool) -> Model:
    """The model in ``directory``, its files complete and of the right sizes.

    Raises ModelError for one that ckpt did not finish (unless ``foreign``), whose files
    are missing or cut short, or whose last validation failed.
    """
    if not directory.is_dir():
        raise ModelError("no such directory", file=directory)
    converted = read_stage(directory, "convert")
    notes = []
    if converted is None and not foreign:
        raise ModelError(
            f"no {MANIFEST_NAME} here: not a finished output of ckpt",
            file=directory,
            hint="Convert again, or serve it unproven with --foreign",
        )
    if converted is not None:
        _check_outputs(directory, converted)
    _check_weights(directory)
    validated = read_stage(directory, "validate")
    if validated is not None and validated.get("verdict") == "failed":
        raise ModelError("its last validation failed", file=directory, hint="See ckpt validate")
    if validated is None:
        notes.append("not validated: run ckpt validate before you rely on it")
    template = _has_template(directory)
    has_tokenizer = any((directory / name).is_file() for name in _TOKENIZERS)
    if not has_tokenizer:
        notes.append("no tokenizer: text requests will fail, token ids work")
    elif not template:
        notes.append("no chat template: chat requests will be refused, completions work")
    training = (converted or {}).get("training", {})
    return Model(
        directory,
        _read_config(directory),
        training.get("tensor_parallel"),
        has_tokenizer,
        template,
        tuple(notes),
    )


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read: {error}", file=file) from error
    return content


def _check_outputs(directory: Path, section: dict[str, Any]) -> None:
    for item in section.get("outputs", []):
        file = directory / item["name"]
        size = file.stat().st_size if file.is_file() else None
        if size != item["size"]:
            raise ModelError(
                "a file is not what the conversion wrote",
                file=file,
                expected=f"{item['size']} bytes",
                found="no file" if size is None else f"{size} bytes",
                hint="Convert again",
            )


def _check_weights(directory: Path) -> None:
    index = directory / INDEX_NAME
    files = {"model.safetensors"}
    if index.is_file():
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"cannot read the index: {error}", file=index) from error
    for name in sorted(files):
        read_header(directory / name)


def _has_template(directory: Path) -> bool:
    if any((directory / f"chat_template.{kind}").is_file() for kind in ("jinja", "json")):
        return True
    try:
        content = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(content.get("chat_template"))


def free_port(host: str, port: int) -> int:
    """``port`` if nothing listens there, or a free one for 0; raises ServeError if it is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServeError(
                f"cannot listen on {host} port {port}: {error.strerror}",
                hint="Choose another --port; 0 takes a free one",
            ) from error
        return int(probe.getsockname()[1])
