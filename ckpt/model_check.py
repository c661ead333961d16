"""Whether a Hugging Face directory is whole: every header against the index and the model.

Only headers are read. The model is the one that transformers builds from config.json; spellings
that loaders accept as well are taken and said.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt.completeness import reconcile
from ckpt.errors import ModelError
from ckpt.inspection import Inspection
from ckpt.metamodel import ModelBuilder
from ckpt.shards import INDEX_NAME, read_header
from ckpt.tensors import DType

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt.metamodel import MetaModel
    from ckpt.shards import TensorSpec

_SHOWN = 8
# Mistral's own format lies beside the weights; transformers and vLLM pass over it.
_OTHER_FORMAT = re.compile(r"consolidated.*\.safetensors")


@dataclass(frozen=True)
class ModelCheck:
    """What was found, and every difference by its kind; none means that the model is whole."""

    facts: Mapping[str, Any]
    differences: Mapping[str, list[str]]
    notes: tuple[str, ...] = ()
    compared: bool = True

    @property
    def passed(self) -> bool:
        """Whether the tensors were compared with a model and no difference was found."""
        return self.compared and not self.differences

    def as_dict(self) -> dict[str, Any]:
        """Everything for machines."""
        return {
            **self.facts,
            "differences": dict(self.differences),
            "notes": list(self.notes),
            "passed": self.passed,
        }

    def as_text(self) -> str:
        """One fact a line, then the differences, the first few of each kind by name."""
        facts: dict[str, Any] = {**self.facts, "notes": list(self.notes) or "none"}
        for kind, items in self.differences.items():
            more = [f"and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
            facts[f"{kind} ({len(items)})"] = [*items[:_SHOWN], *more]
        facts["verdict"] = "not whole" if self.differences else "whole"
        if not self.compared:
            facts["verdict"] = f"unknown: no model to compare with; files {facts['verdict']}"
        return Inspection(facts).as_text()


@dataclass
class _Found:
    """Tensors of all files, and what is wrong with files and index."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, kind: str, item: str) -> None:
        """Note a difference."""
        self.wrong.setdefault(kind, []).append(item)


def check_model(path: Path, *, cache: Path | None = None) -> ModelCheck:
    """Compare headers, index and config.json of the model in ``path``.

    ``cache`` is a directory for models that transformers built.
    Raises ModelError where there is no config.json, nothing in safetensors, or a config.json
    from which transformers cannot build its model.
    """
    with ModelBuilder(cache) as builder:
        config = _read_config(path / "config.json")
        found = _read_files(path)
        meta = builder.build(config)
    _compare_model(found, meta, config)
    stored = [spec.dtype for spec in found.specs.values()]
    named = config.get("dtype") or config.get("torch_dtype") or "no element type"
    facts = {
        "directory": str(path),
        "model": meta.model_class or "unknown",
        "transformers": meta.transformers or "not loaded",
        "files": len(set(found.files.values())),
        "tensors": len(found.specs),
        "parameters": sum(prod(spec.shape) for spec in found.specs.values()),
        "dtypes": {dtype.name: stored.count(dtype) for dtype in DType if dtype in stored},
        "config_says": named,
    }
    _note_dtypes(found, named)
    return ModelCheck(facts, found.wrong, tuple(found.notes), compared=not meta.lacks)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read: {error}", file=file) from error
    if not isinstance(config, dict):
        raise ModelError("not the settings of a model", file=file, found=type(config).__name__)
    return config


def _read_files(path: Path) -> _Found:
    """Headers of every file, compared with the index."""
    found = _Found()
    there = sorted(file.name for file in path.glob("*.safetensors"))
    pickled = sorted(file.name for file in path.glob("pytorch_model*.bin"))
    if pickled:
        found.notes.append(f"only safetensors are checked, not {', '.join(pickled[:3])}")
    index = path / INDEX_NAME
    named, total = _read_index(index) if index.is_file() else (None, None)
    if not there and named is None:
        raise ModelError(
            "no weights in safetensors here; only these are checked",
            file=path,
            expected="*.safetensors",
            found=", ".join(pickled) or "none",
        )
    expected = set(named.values()) if named is not None else {"model.safetensors"}
    for name in sorted(expected - set(there)):
        found.add("files missing", name)
    for name in there:
        if name not in expected:
            _note_orphan(found, name)
        else:
            _read_file(path, name, found)
    if named is not None:
        _compare_index(found, named, total)
    return found


def _note_orphan(found: _Found, name: str) -> None:
    if _OTHER_FORMAT.fullmatch(name):
        found.notes.append(f"{name} is in another format and was passed over")
    else:
        found.add("files that belong to nothing", name)


def _read_file(path: Path, name: str, found: _Found) -> None:
    try:
        specs = read_header(path / name)
    except ModelError as error:
        found.add("files damaged", str(error))
        return
    for tensor, spec in specs.items():
        if tensor in found.files:
            found.add("stored twice", f"{tensor} in {found.files[tensor]} and {name}")
        found.specs[tensor], found.files[tensor] = spec, name


def _read_index(file: Path) -> tuple[dict[str, str], int | None]:
    """The file of each tensor, and the bytes of all, as the index has them."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        named = {str(name): str(place) for name, place in content["weight_map"].items()}
        total = (content.get("metadata") or {}).get("total_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"cannot read the index: {error!r}", file=file) from error
    return named, total


def _compare_index(found: _Found, named: Mapping[str, str], total: int | None) -> None:
    for tensor, place in named.items():
        actual = found.files.get(tensor)
        if actual is None:
            found.add("index entries in no file", f"{tensor} (the index says {place})")
        elif actual != place:
            found.add("index entries of another file", f"{tensor} in {actual}, not in {place}")
    for tensor, place in found.files.items():
        if tensor not in named:
            found.add("tensors that the index lacks", f"{tensor} in {place}")
    size = sum(spec.nbytes for spec in found.specs.values())
    if total is not None and total != size:
        found.add("total_size of the index", f"{total}, but the tensors have {size} bytes")


def _compare_model(found: _Found, meta: MetaModel, config: Mapping[str, Any]) -> None:
    """Names and shapes against the model of config.json."""
    if meta.lacks:
        found.notes.append(f"not compared with config.json: {meta.lacks}")
        return
    if config.get("quantization_config"):
        found.notes.append("not compared with config.json: the weights are quantized")
        return
    shapes = {name: spec.shape for name, spec in found.specs.items()}
    differences, notes = reconcile(shapes, config, meta)
    found.notes += notes
    for name in differences.missing:
        found.add("missing", name)
    for name in differences.unexpected:
        found.add("unexpected", name)
    for name, wanted, got in differences.shapes:
        found.add("of another shape", f"{name}: expected {list(wanted)}, found {list(got)}")


def _note_dtypes(found: _Found, named: str) -> None:
    """The main element type, by bytes, beside the one that config.json names."""
    sizes: dict[DType, int] = {}
    for spec in found.specs.values():
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
    if not sizes:
        return
    main = max(sizes, key=lambda dtype: sizes[dtype])
    if main.torch_name != named:
        found.notes.append(f"most bytes are {main.torch_name}, config.json says {named}")
