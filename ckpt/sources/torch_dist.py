"""Megatron-Core's ``torch_dist`` format: global tensors cut into chunks, indexed by ``.metadata``.

The index is a pickle of torch.distributed.checkpoint.metadata.Metadata; a chunk is a whole
``torch.save`` archive inside a ``.distcp`` file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.sources import names
from ckpt.sources.checkpoint import Checkpoint, parallelism_of
from ckpt.sources.common_state import ARGS_HINT, COMMON_FILE, plain_args, read_common_file
from ckpt.sources.global_tensors import model_tensors
from ckpt.sources.torch_archive import TorchArchive, read_archive
from ckpt.sources.unpickle import Reader, TensorRef
from ckpt.tensors import DType, Shard, SourceTensor, View

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.sources.locate import Located


@dataclass(frozen=True)
class _Chunk:
    """A stored part of a global tensor: where it belongs and which bytes hold it."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
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
    metadata = reader.load(_read_bytes(index), file=str(index))
    _check_index(metadata, index)
    common, common_files = _read_common(directory, metadata, reader)
    items, skipped = _list_items(metadata, directory)
    _check_files(items, directory)
    opener = _Opener(directory, reader) if spans else None
    tensors = model_tensors(_stored(items, directory, opener))
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
        files=tuple(sorted({directory / chunk.file for item in items for chunk in item.chunks})),
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


def _check_index(metadata: Any, index: Path) -> None:  # noqa: ANN401 - unpickled
    """Raise SourceError unless everything that is read from the index has the form it must."""
    needed = ("state_dict_metadata", "storage_data")
    if not all(isinstance(getattr(metadata, name, None), dict) for name in needed):
        raise SourceError("not the index of a distributed checkpoint", file=index)
    try:
        for key, place in metadata.storage_data.items():
            _check_place(key, place, index)
        for name, entry in metadata.state_dict_metadata.items():
            _check_entry(name, entry)
    except (AttributeError, TypeError, ValueError) as error:
        raise SourceError(f"damaged index: {error}", file=index) from error


def _check_entry(name: Any, entry: Any) -> None:  # noqa: ANN401 - unpickled
    if not isinstance(name, str):
        raise TypeError(f"{name!r:.40} where a name must be")
    if hasattr(entry, "chunks"):
        _check_numbers(*entry.size)
    for chunk in getattr(entry, "chunks", ()):
        _check_numbers(*chunk.offsets, *chunk.sizes)
        places = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        if any(start + length > whole for start, length, whole in places):
            raise ValueError(f"a part of {name} lies outside it")


def _check_place(key: Any, place: Any, index: Path) -> None:  # noqa: ANN401 - unpickled
    if not isinstance(key.fqn, str):
        raise TypeError(f"{key.fqn!r:.40} where a name must be")
    _check_numbers(*(getattr(key, "offset", None) or ()), place.offset, place.length)
    name = place.relative_path
    if PurePath(name).name != name or name in {"", ".."} or "\0" in name:
        raise SourceError(
            f"the index points outside the directory: {name}", file=index, tensor=key.fqn
        )


def _check_numbers(*values: object) -> None:
    for value in values:
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{value!r:.40} where a size or a position must be")


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


def _list_items(metadata: Any, directory: Path) -> tuple[list[_Item], list[tuple[str, str]]]:  # noqa: ANN401
    places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for key, place in metadata.storage_data.items():
        offset = getattr(key, "offset", None)
        places[key.fqn, None if offset is None else tuple(offset)] = place
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


class _Opener:
    """Finds the elements inside the chunks' archives."""

    def __init__(self, directory: Path, reader: Reader) -> None:
        self._directory, self._reader = directory, reader

    def view(self, item: _Item, chunk: _Chunk) -> View:
        """The elements of a chunk; its archive must hold what the index says."""
        file = self._directory / chunk.file
        archive = read_archive(file, self._reader, offset=chunk.offset, length=chunk.length)
        root = archive.root
        if not isinstance(root, TensorRef):
            raise SourceError("holds no tensor", file=file, tensor=item.name)
        if root.shape != chunk.shape or root.dtype is not item.dtype:
            raise SourceError(
                "the stored part is not what the index says",
                file=file,
                tensor=item.name,
                expected=f"{item.dtype.name} {list(chunk.shape)}",
                found=f"{root.dtype.name} {list(root.shape)}",
            )
        return archive.view(root, name=item.name)


def _stored(items: list[_Item], directory: Path, opener: _Opener | None) -> list[SourceTensor]:
    """The global tensors under their keys in the index."""
    tensors: list[SourceTensor] = []
    for item in items:
        shards = []
        for chunk in item.chunks:
            if opener is None:
                file = str(directory / chunk.file)
                view = View.contiguous(file, chunk.offset, item.dtype, chunk.shape)
            else:
                view = opener.view(item, chunk)
            shards.append(Shard(view, start=chunk.start))
        tensors.append(SourceTensor(item.name, item.dtype, tuple(shards), item.shape))
    return tensors
