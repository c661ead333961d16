"""What can be known to be wrong with a model directory before a server is started."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpt.errors import ModelError, ServeError
from ckpt.manifest import MANIFEST_NAME, read_stage
from ckpt.shards import INDEX_NAME, REFERENCE_FILE, read_header

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.config import ServeOptions

_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True)
class Model:
    """A directory that may be served, and what matters about it."""

    directory: Path
    config: dict[str, Any]
    dtype: str
    trained_tensor_parallel: int | None
    has_tokenizer: bool
    has_chat_template: bool
    notes: tuple[str, ...]

    @property
    def longest(self) -> int | None:
        """The longest context in tokens, if config.json names it."""
        names = ("max_position_embeddings", "n_positions")
        found = next((self.config[name] for name in names if self.config.get(name)), None)
        return None if found is None else int(found)

    @property
    def reference(self) -> Path | None:
        """The recorded answers of the original, if they lie in the directory."""
        file = self.directory / REFERENCE_FILE
        return file if file.is_file() else None


def check_model(directory: Path, options: ServeOptions) -> Model:
    """The model in ``directory``, its files complete and of the right sizes.

    Raises ModelError for one that ckpt did not finish (unless ``options.foreign``), whose
    files are missing or cut short, or whose last validation failed; ServeError for options
    that the model does not allow.
    """
    if not directory.is_dir():
        raise ModelError("no such directory", file=directory)
    converted = read_stage(directory, "convert")
    if converted is None and not options.foreign:
        raise ModelError(
            f"no {MANIFEST_NAME} here: not a finished output of ckpt",
            file=directory,
            hint="Convert again, or serve it unproven with --foreign",
        )
    if converted is not None:
        _check_outputs(directory, converted)
    config = _read_config(directory)
    stored = _check_weights(directory)
    model = Model(
        directory=directory,
        config=config,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or stored),
        trained_tensor_parallel=(converted or {}).get("training", {}).get("tensor_parallel"),
        has_tokenizer=any((directory / name).is_file() for name in _TOKENIZERS),
        has_chat_template=options.chat_template is not None or _has_template(directory),
        notes=(),
    )
    _check_options(model, options)
    return replace(model, notes=_notes(model))


def _check_options(model: Model, options: ServeOptions) -> None:
    if options.chat_template is not None and not options.chat_template.is_file():
        raise ServeError("no such chat template", file=options.chat_template)
    scaled = model.config.get("rope_scaling") or model.config.get("rope_parameters") or {}
    stretched = scaled.get("factor") or scaled.get("rope_type", "default") != "default"
    wanted, longest = options.max_model_len, model.longest
    if wanted and longest and wanted > longest and not stretched:
        raise ServeError(
            "max_model_len is beyond what the model was made for",
            expected=f"at most {longest}",
            found=wanted,
        )


def _notes(model: Model) -> tuple[str, ...]:
    notes = []
    validated = read_stage(model.directory, "validate")
    if validated is not None and validated.get("verdict") == "failed":
        raise ModelError(
            "its last validation failed", file=model.directory, hint="See ckpt validate"
        )
    if validated is None:
        notes.append("not validated: run ckpt validate before you rely on it")
    if not model.has_tokenizer:
        notes.append("no tokenizer: text requests will fail, token ids work")
    elif not model.has_chat_template:
        notes.append("no chat template: chat requests will be refused, completions work")
    return tuple(notes)


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read: {error}", file=file) from error
    if not isinstance(content, dict):
        raise ModelError("not a model's configuration", file=file)
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


def _check_weights(directory: Path) -> str:
    """Check that headers, sizes and index agree; returns the element type of most bytes."""
    placed = _read_index(directory)
    sizes: dict[str, int] = {}
    missing = set(placed)
    for name in sorted(set(placed.values()) or {"model.safetensors"}):
        specs = read_header(directory / name)
        missing -= {tensor for tensor in specs if placed.get(tensor) == name}
        for spec in specs.values():
            sizes[spec.dtype.name] = sizes.get(spec.dtype.name, 0) + spec.nbytes
    if missing:
        raise ModelError(
            f"{len(missing)} tensors are not where the index says",
            file=directory / INDEX_NAME,
            tensor=min(missing),
        )
    most = max(sizes, key=lambda name: sizes[name], default="")
    return _TYPES.get(most, "auto")


def _read_index(directory: Path) -> dict[str, str]:
    """Which file holds each tensor; empty without an index."""
    index = directory / INDEX_NAME
    if not index.is_file():
        return {}
    try:
        content = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(name) for tensor, name in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"cannot read the index: {error}", file=index) from error


def _has_template(directory: Path) -> bool:
    if any((directory / f"chat_template.{kind}").is_file() for kind in ("jinja", "json")):
        return True
    try:
        content = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
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
