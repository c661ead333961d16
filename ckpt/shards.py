"""Safetensors on disk: headers, the assignment of tensors to files, and the index.

The format: eight bytes of header length, a JSON header of names with type, shape and byte
range, then the tensors' bytes (safetensors, README "Format").
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt.errors import ModelError
from ckpt.tensors import DType

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

INDEX_NAME = "model.safetensors.index.json"
# The original's answers have a directory of their own: vLLM loads every *.safetensors that
# lies beside config.json.
REFERENCE_FILE = "original/ckpt-reference.safetensors"
_ALIGNMENT = 8
_HEADER_LIMIT = 100 * 10**6


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: its name, element type and shape."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def assign(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Tensors in order, in files of at most ``max_bytes``; a larger tensor gets its own file.

    >>> a, b, c = (TensorSpec(n, DType.U8, (4,)) for n in "abc")
    >>> [[t.name for t in file] for file in assign([a, b, c], 8)]
    [['a', 'b'], ['c']]
    """
    files: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not files or spec.nbytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(spec)
        room -= spec.nbytes
    return files


def file_names(count: int) -> list[str]:
    """The names that transformers gives to ``count`` files of one model."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def header_bytes(specs: Sequence[TensorSpec]) -> bytes:
    """Length and header of a file that holds ``specs`` in this order without gaps."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in specs:
        end = at + spec.nbytes
        entries[spec.name] = {
            "dtype": spec.dtype.name,
            "shape": list(spec.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def index_content(files: Sequence[tuple[str, Sequence[TensorSpec]]]) -> dict[str, Any]:
    """The content of the index: which file holds each tensor, and the bytes of all."""
    weights = {spec.name: name for name, specs in files for spec in specs}
    total = sum(spec.nbytes for _, specs in files for spec in specs)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}


def read_header(file: Path) -> dict[str, TensorSpec]:
    """The tensors that a safetensors file declares, its size checked against them.

    Raises ModelError for a file that is no safetensors file, or is cut short or longer.
    """
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if length > min(_HEADER_LIMIT, size):
                raise ModelError("not a safetensors file, or cut short", file=file)
            entries = json.loads(stream.read(length))
    except FileNotFoundError as error:
        raise ModelError("the file is missing", file=file) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read its header: {error}", file=file) from error
    specs = _parse_entries(entries, file)
    end = sum(spec.nbytes for spec in specs.values())
    if size != 8 + length + end:
        raise ModelError(
            "the file is cut short or has bytes behind its tensors",
            file=file,
            expected=f"{8 + length + end} bytes",
            found=f"{size} bytes",
        )
    return specs


def _parse_entries(entries: Any, file: Path) -> dict[str, TensorSpec]:  # noqa: ANN401 - JSON
    """The tensors of a header; they must follow each other without gaps or overlaps."""
    specs: dict[str, TensorSpec] = {}
    ranges = []
    try:
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            dtype = DType.__members__.get(entry["dtype"])
            if dtype is None:
                raise ModelError(f"unknown element type {entry['dtype']}", file=file, tensor=name)
            specs[name] = TensorSpec(name, dtype, tuple(entry["shape"]))
            start, end = entry["data_offsets"]
            if any(type(number) is not int for number in (start, end, *entry["shape"])):
                raise ModelError(
                    "damaged header: sizes that are no numbers", file=file, tensor=name
                )
            ranges.append((start, end, specs[name].nbytes))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"damaged header: {error!r}", file=file) from error
    at = 0
    for start, end, nbytes in sorted(ranges):
        if start != at or end - start != nbytes:
            raise ModelError("the header's byte ranges do not fit its shapes", file=file)
        at = end
    return specs
