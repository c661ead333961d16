"""Megatron-Core's ``torch_dist`` format: global tensors cut into chunks, indexed by ``.metadata``.

The index is a pickle of torch.distributed.checkpoint.metadata.Metadata; a chunk is a whole
``torch.save`` archive inside a ``.distcp`` file.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.sources import names
from ckpt.sources.checkpoint import Checkpoint, parallelism_of
from ckpt.sources.common_state import ARGS_HINT, COMMON_FILE, plain_args, read_common_file
from ckpt.sources.dcp_places import checked_places
from ckpt.sources.global_tensors import model_tensors
from ckpt.sources.torch_archive import OpenFile, TorchArchive, read_archive, read_item
from ckpt.sources.unpickle import Reader, TensorRef
from ckpt.tensors import DType, Shard, SourceTensor, View

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckpt.sources.locate import Located


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A stored part of a global tensor: where it belongs and which bytes hold it."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Item:
    name: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


def read(located: Located, *, spans: bool) -> Checkpoint:
    """The checkpoint in a ``torch_dist`` directory.

    Without ``spans`` only names, types and shapes are read; the views then point to the
    chunks' archives instead of to their elements. Raises SourceError for an index that
    is damaged, and for files that are missing or shorter than it says.
    """
    directory, reader = located.directory, Reader()
    index = directory / ".metadata"
    content = _read_bytes(index)
    if spans:
        metadata = reader.load(content, file=str(index))
    else:  # the save plans of all ranks are half of the index, and say nothing that is said here
        metadata = reader.load_without(content, "all_local_plans", file=str(index))
    places = checked_places(metadata, index)
    common, common_files = _read_common(directory, metadata, reader)
    items, skipped = _list_items(metadata, places, directory)
    _check_files(items, directory)
    tensors = model_tensors(_stored(items, directory, reader, spans=spans))
    args = plain_args(common)
    return Checkpoint(
        format="torch_dist",
        directory=directory,
        iteration=located.iteration,
        args=args,
        parallelism=parallelism_of(args),
        tensors=tensors,
        shapes={tensor.name: tensor.shape for tensor in tensors},
        skipped=names.count_skipped(skipped),
        files=tuple(directory / name for name in sorted(_file_names(items))),
        metadata_files=(index, *common_files),
        foreign_classes=reader.foreign_classes,
        notes=located.notes,
        raw_names=tuple(item.name for item in items),
    )


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SourceError(f"cannot read: {error.strerror}", file=file) from error


def _read_common(
    directory: Path,
    metadata: Any,  # noqa: ANN401 - unpickled
    reader: Reader,
) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """The unsharded state: ``common.pt``, or since 0.19 the object ``common_state``."""
    file = directory / COMMON_FILE
    if file.is_file():
        return read_common_file(file, reader), (file,)
    for key, place in metadata.storage_data.items():
        if key.fqn == "common_state" or key.fqn.startswith("common_state/"):
            archive = _open(directory, place, reader)
            root = archive.root[0] if isinstance(archive.root, list) else archive.root
            if isinstance(root, dict):
                return root, ()
    raise SourceError(
        "the training arguments are missing: no common.pt and no common_state object",
        file=directory,
        hint=ARGS_HINT,
    )


def _open(directory: Path, place: Any, reader: Reader) -> TorchArchive:  # noqa: ANN401
    file = directory / place.relative_path
    return read_archive(file, reader, offset=place.offset, length=place.length)


def _list_items(
    metadata: Any,  # noqa: ANN401 - unpickled
    places: dict[Any, Any],
    directory: Path,
) -> tuple[list[_Item], list[tuple[str, str]]]:
    items, skipped = [], []
    for name, entry in metadata.state_dict_metadata.items():
        reason = names.skip_reason(name)
        if name == "common_state" or name.startswith("common_state/"):
            continue
        if reason:
            skipped.append((name, reason))
        elif not hasattr(entry, "chunks"):
            skipped.append((name, "an object that is no tensor"))
        else:
            items.append(_item(name, entry, places, directory))
    return items, skipped


def _item(name: str, entry: Any, places: dict[Any, Any], directory: Path) -> _Item:  # noqa: ANN401
    dtype = _dtype(getattr(entry, "properties", None))
    if dtype is None:
        raise SourceError("element type is not supported", file=directory, tensor=name)
    chunks = []
    for chunk in entry.chunks:
        start, shape = tuple(chunk.offsets), tuple(chunk.sizes)
        place = places.get((name, start))
        if place is None:
            raise SourceError(
                f"the index names no file for its part at {list(start)}",
                file=directory / ".metadata",
                tensor=name,
            )
        chunks.append(_Chunk(start, shape, place.relative_path, place.offset, place.length))
    return _Item(name, dtype, tuple(entry.size), tuple(chunks))


def _dtype(properties: Any) -> DType | None:  # noqa: ANN401 - unpickled
    found = getattr(properties, "dtype", None)
    state = getattr(properties, "state", None)
    if found is None and isinstance(state, tuple) and state:
        found = state[0]
    return found if isinstance(found, DType) else None


def _check_files(items: list[_Item], directory: Path) -> None:
    ends: dict[str, int] = {}
    for item in items:
        for chunk in item.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
    for name, end in ends.items():
        file = directory / name
        if not file.is_file():
            raise SourceError("a file that the index names is missing", file=file)
        if file.stat().st_size < end:
            raise SourceError(
                "the file is shorter than the index says",
                file=file,
                expected=f"at least {end} bytes",
                found=f"{file.stat().st_size} bytes",
                hint="Copy it again from the training cluster",
            )


def _stored(
    items: list[_Item], directory: Path, reader: Reader, *, spans: bool
) -> list[SourceTensor]:
    """The global tensors under their keys in the index."""
    views = _views if spans else _archives
    found = views(items, directory, reader)
    return [
        SourceTensor(
            item.name,
            item.dtype,
            tuple(Shard(next(parts), start=chunk.start) for chunk in item.chunks),
            item.shape,
        )
        for item, parts in zip(items, found, strict=True)
    ]


def _archives(items: list[_Item], directory: Path, _: Reader) -> Iterator[Iterator[View]]:
    """Views that point to the chunks' archives, for each item."""
    files = {name: str(directory / name) for name in _file_names(items)}
    for item in items:
        yield (
            View.contiguous(files[chunk.file], chunk.offset, item.dtype, chunk.shape)
            for chunk in item.chunks
        )


def _views(items: list[_Item], directory: Path, reader: Reader) -> Iterator[Iterator[View]]:
    """Views of the chunks' elements, for each item; every file is opened once."""
    by_file: dict[str, list[tuple[_Item, _Chunk]]] = {}
    for item in items:
        for chunk in item.chunks:
            by_file.setdefault(chunk.file, []).append((item, chunk))
    views: dict[tuple[str, tuple[int, ...]], View] = {}
    for name, stored in by_file.items():
        with closing(OpenFile(directory / name)) as opened:
            for item, chunk in sorted(stored, key=lambda pair: pair[1].offset):
                views[item.name, chunk.start] = _view(opened, item, chunk, reader)
    for item in items:
        yield (views[item.name, chunk.start] for chunk in item.chunks)


def _view(opened: OpenFile, item: _Item, chunk: _Chunk, reader: Reader) -> View:
    """The elements of a chunk; its archive must hold what the index says."""
    archive = read_item(opened, reader, offset=chunk.offset, length=chunk.length)
    root = archive.root
    if not isinstance(root, TensorRef):
        raise SourceError("holds no tensor", file=opened.path, tensor=item.name)
    if root.shape != chunk.shape or root.dtype is not item.dtype:
        raise SourceError(
            "the stored part is not what the index says",
            file=opened.path,
            tensor=item.name,
            expected=f"{item.dtype.name} {list(chunk.shape)}",
            found=f"{root.dtype.name} {list(root.shape)}",
        )
    return archive.view(root, name=item.name)


def _file_names(items: list[_Item]) -> set[str]:
    return {chunk.file for item in items for chunk in item.chunks}
