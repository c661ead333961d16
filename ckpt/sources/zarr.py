"""Megatron-Core's ``zarr`` format, which its versions up to 0.13 could write.

A directory for each key of the sharded state dict: a zarr v2 array, whose ``.zarray`` says
shape, chunks and element type, and whose chunks are raw files ``i.j.k`` in C order
(zarr-specs, docs/v2/v2.0.rst; megatron/core/dist_checkpointing/strategies/zarr.py). The keys
are those of ``torch_dist``. Objects that are no tensors are directories of ``shard_*.pt``.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.sources import names
from ckpt.sources.checkpoint import Checkpoint, parallelism_of
from ckpt.sources.common_state import COMMON_FILE, read_common_file, stored_args
from ckpt.sources.global_tensors import model_tensors
from ckpt.sources.unpickle import Reader
from ckpt.storage import beside, read_ahead, scan
from ckpt.tensors import DType, Shard, SourceTensor, View, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt.sources.locate import Located

HEADER = ".zarray"
_CHUNK = re.compile(r"\d+([./]\d+)*")
_OBJECT = re.compile(r"shard_[\d._]+\.pt")
# "bfloat16" is no type of zarr's; Megatron writes the word so that TensorStore can read it.
_DTYPES = {
    "<f8": DType.F64,
    "<f4": DType.F32,
    "<f2": DType.F16,
    "bfloat16": DType.BF16,
    "<i8": DType.I64,
    "<i4": DType.I32,
    "<i2": DType.I16,
    "|i1": DType.I8,
    "|u1": DType.U8,
    "|b1": DType.BOOL,
}
# What the header must say; anything else would change where an element lies.
_PLAIN = {"zarr_format": 2, "order": "C", "compressor": None, "filters": None}


@dataclass(frozen=True)
class _Header:
    """One array: its shape, the shape of its chunks, and how their files are named."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: DType
    separator: str

    @property
    def grid(self) -> tuple[int, ...]:
        """How many chunks lie along each axis; those at the far edges may be cut short."""
        return tuple(-(-whole // part) for whole, part in zip(self.shape, self.chunks, strict=True))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's file; at the edges too, where it is filled up."""
        return prod(self.chunks) * self.dtype.itemsize


def read(located: Located, *, spans: bool) -> Checkpoint:
    """The checkpoint in a ``zarr`` directory; its spans are known whether asked for or not.

    Raises SourceError for arrays that are compressed, filtered, big-endian or in Fortran
    order, and for chunks that are missing or of a wrong size.
    """
    del spans
    directory, reader = located.directory, Reader()
    common = directory / COMMON_FILE
    found = read_common_file(common, reader) if common.is_file() else None
    args = stored_args(found, directory)
    keys, skipped = _list_keys(directory)
    read_ahead([key / HEADER for key in keys])
    stored = [_tensor(key) for key in keys]
    tensors = model_tensors(stored)
    views = (shard.view for tensor in stored for shard in tensor.shards)
    return Checkpoint(
        format="zarr",
        directory=directory,
        iteration=located.iteration,
        args=args.values,
        missing_args=args.missing,
        parallelism=parallelism_of(args.values),
        tensors=tensors,
        shapes={tensor.name: tensor.shape for tensor in tensors},
        skipped=names.count_skipped(skipped),
        files=tuple(sorted(beside(directory, view.file) for view in views)),
        metadata_files=(
            *((common,) if found else ()),
            *args.files,
            *(key / HEADER for key in keys),
        ),
        foreign_classes=reader.foreign_classes,
        notes=(*located.notes, *args.notes),
        raw_names=tuple(key.name for key in keys),
    )


def _list_keys(directory: Path) -> tuple[list[Path], list[tuple[str, str]]]:
    """Directories of arrays, and what is left out on purpose."""
    keys, skipped = [], []
    for path in sorted(path for path in directory.iterdir() if path.is_dir()):
        reason = names.skip_reason(path.name)
        if reason:
            skipped.append((path.name, reason))
        elif (path / HEADER).is_file():
            keys.append(path)
        else:
            _refuse_unknown(path)
    return keys, skipped


def _refuse_unknown(path: Path) -> None:
    """Raise SourceError for a directory that holds a part of the state; others mean nothing."""
    found = sorted(item.name for item in path.iterdir())
    if any(_OBJECT.fullmatch(name) for name in found):
        raise SourceError("an object that is no tensor and of no known kind", file=path)
    if any(_CHUNK.fullmatch(name) for name in found):
        raise SourceError(
            f"chunks of an array without its {HEADER}",
            file=path,
            hint="Copy it again from the training cluster",
        )


def _tensor(path: Path) -> SourceTensor:
    header = _read_header(path)
    _check_chunks(path, header)
    shards = []
    for index in _places(header):
        start = tuple(at * part for at, part in zip(index, header.chunks, strict=True))
        inside = tuple(
            min(part, whole - at)
            for part, whole, at in zip(header.chunks, header.shape, start, strict=True)
        )
        file = str(path / _file_name(index, header.separator))
        view = View.contiguous(file, 0, header.dtype, header.chunks)
        shards.append(Shard(view.box((0,) * len(inside), inside), start=start))
    return SourceTensor(path.name, header.dtype, tuple(shards), header.shape)


def _places(header: _Header) -> Iterator[tuple[int, ...]]:
    """Places of the grid in C order, however many a damaged header may claim."""
    steps = contiguous_strides(header.grid)
    for number in itertools.count():
        if number == prod(header.grid):
            return
        places = zip(steps, header.grid, strict=True)
        yield tuple(number // step % count for step, count in places)


def _file_name(index: tuple[int, ...], separator: str) -> str:
    return separator.join(str(at) for at in index) or "0"


def _read_header(path: Path) -> _Header:
    file = path / HEADER
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        for name, value in _PLAIN.items():
            if found[name] != value:
                raise SourceError(
                    f"an array with another {name} than Megatron writes",
                    file=file,
                    expected=json.dumps(value),
                    found=json.dumps(found[name]),
                )
        separator = found.get("dimension_separator", ".")
        shape, chunks = tuple(found["shape"]), tuple(found["chunks"])
        dtype = found["dtype"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"cannot read: {error!r}", file=file) from error
    _check_sizes(shape, chunks, file)
    if separator not in {".", "/"}:
        raise SourceError("an unknown dimension_separator", file=file, found=repr(separator)[:40])
    return _Header(shape, chunks, _dtype(dtype, file), separator)


def _check_sizes(shape: tuple[Any, ...], chunks: tuple[Any, ...], file: Path) -> None:
    numbers = all(type(value) is int for value in (*shape, *chunks))
    if not numbers or len(shape) != len(chunks) or min((*shape, *chunks, 1)) < 1:
        raise SourceError(
            "shape and chunks do not fit",
            file=file,
            expected="as many positive numbers in each",
            found=f"{list(shape)} and {list(chunks)}"[:80],
        )


def _dtype(name: object, file: Path) -> DType:
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        big = isinstance(name, str) and name.startswith(">")
        raise SourceError(
            "big-endian elements are not supported" if big else "element type is not supported",
            file=file,
            found=repr(name)[:40],
        )
    return dtype


def _check_chunks(path: Path, header: _Header) -> None:
    """Raise SourceError unless exactly the files of the grid are there, each of full size.

    zarr takes a missing chunk for one that holds the fill value: here its weights are lost.
    """
    found = dict(_files(path, header.separator))
    if len(found) < prod(header.grid) or not found:
        names_ = (_file_name(index, header.separator) for index in _places(header))
        missing = next(name for name in names_ if name not in found)
        raise SourceError(
            f"chunk {missing} is missing, its weights are lost",
            file=path,
            expected=f"{prod(header.grid)} chunks",
            found=len(found),
            hint="Copy it again from the training cluster",
        )
    for index in _places(header):
        name = _file_name(index, header.separator)
        size = found.pop(name, None)
        if size != header.chunk_bytes:
            raise SourceError(
                "a chunk is missing" if size is None else "a chunk of the wrong size",
                file=path / name,
                expected=f"{header.chunk_bytes} bytes",
                found=f"{size} bytes",
                hint="Copy it again from the training cluster",
            )
    if found:
        raise SourceError("no chunk of this array", file=path / min(found))


def _files(path: Path, separator: str, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Names and sizes of an array's files, hidden ones left out."""
    for entry in scan(path):
        if entry.name.startswith("."):
            continue
        if separator == "/" and entry.is_directory:
            yield from _files(path / entry.name, separator, f"{prefix}{entry.name}/")
        else:
            yield f"{prefix}{entry.name}", entry.size
