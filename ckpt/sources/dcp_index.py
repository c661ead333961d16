"""The index of a checkpoint of ``torch.distributed.checkpoint`` (DCP), and what it points to.

``.metadata`` is a pickle of torch.distributed.checkpoint.metadata.Metadata: tensors cut into
chunks, and objects. Each chunk and each object is a whole ``torch.save`` archive inside a
``.distcp`` file (torch/distributed/checkpoint/filesystem.py).
"""

from __future__ import annotations

import stat
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt.errors import SourceError
from ckpt.sources.dcp_places import checked_places
from ckpt.sources.opened import open_file
from ckpt.sources.torch_archive import read_archive, read_item
from ckpt.sources.unpickle import Reader, TensorRef
from ckpt.storage import ahead
from ckpt.tensors import DType, Shard, SourceTensor, View

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from ckpt.sources.opened import OpenFile

INDEX = ".metadata"
_BEGIN_BYTES, _END_BYTES = 2048, 1024  # of an archive of one tensor, beside its elements


class Chunk(NamedTuple):
    """A stored part of a global tensor: where it belongs and which bytes hold it."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Item:
    """A global tensor and the chunks that cover it; those without an element are left out."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Index:
    """Names of everything that is stored, and where it lies."""

    def __init__(self, directory: Path, reader: Reader, *, spans: bool) -> None:
        """Read ``.metadata``; SourceError for an index that is damaged or points elsewhere.

        Without ``spans`` the bytes of tensors are not asked for.
        """
        self.file, self.directory = directory / INDEX, directory
        self._reader, self._spans = reader, spans
        content, file = _read_bytes(self.file), str(self.file)
        if spans:
            metadata = reader.load(content, file=file)
        else:  # the save plans of all ranks are half of the index, and say nothing said here
            metadata = reader.load_without(content, "all_local_plans", file=file)
        self._places, self._boxes = checked_places(metadata, self.file)
        self._entries: dict[str, Any] = metadata.state_dict_metadata

    def names(self) -> Iterator[str]:
        """Every name, in the order of the index."""
        return iter(self._entries)

    def is_tensor(self, name: str) -> bool:
        """Whether a tensor is stored under that name, and not an object."""
        return hasattr(self._entries[name], "chunks")

    def item(self, name: str) -> Item:
        """The tensor of that name; SourceError for a type or a chunk that cannot be read."""
        entry = self._entries[name]
        dtype = _dtype(getattr(entry, "properties", None))
        if dtype is None:
            raise SourceError("element type is not supported", file=self.directory, tensor=name)
        chunks = []
        for start, shape in self._boxes[name]:
            if 0 in shape:
                continue
            place = self._places.get((name, start))
            if place is None:
                raise SourceError(
                    f"the index names no file for its part at {list(start)}",
                    file=self.file,
                    tensor=name,
                )
            file, offset, length = place
            chunks.append(Chunk(start, shape, file, offset, length))
        return Item(name, dtype, tuple(entry.size), tuple(chunks))

    def has_object(self, name: str) -> bool:
        """Whether bytes of an object of that name are stored."""
        return (name, None) in self._places

    def object(self, name: str) -> Any:  # noqa: ANN401 - unpickled
        """The object stored under that name, unpickled by the allow-list reader."""
        file, offset, length = self._places[name, None]
        return read_archive(self.directory / file, self._reader, offset=offset, length=length).root

    def tensors(self, items: Sequence[Item]) -> list[SourceTensor]:
        """The tensors under their stored names, every shard at its known start.

        Without spans the views point to the chunks' archives instead of to their elements.
        """
        views = self._views(items) if self._spans else self._archives(items)
        return [
            SourceTensor(
                item.name,
                item.dtype,
                tuple(Shard(next(parts), start=chunk.start) for chunk in item.chunks),
                item.shape,
            )
            for item, parts in zip(items, views, strict=True)
        ]

    def _archives(self, items: Sequence[Item]) -> Iterator[Iterator[View]]:
        """Views that point to the chunks' archives, for each item."""
        files = {name: str(self.directory / name) for name in _file_names(items)}
        for item in items:
            yield (
                View.contiguous(files[chunk.file], chunk.offset, item.dtype, chunk.shape)
                for chunk in item.chunks
            )

    def _views(self, items: Sequence[Item]) -> Iterator[Iterator[View]]:
        """Views of the chunks' elements, for each item; every file is opened once."""
        by_file: dict[str, list[tuple[Item, Chunk]]] = {}
        for item in items:
            for chunk in item.chunks:
                by_file.setdefault(chunk.file, []).append((item, chunk))
        views: dict[tuple[str, tuple[int, ...]], View] = {}
        for found in ahead(self._views_in, by_file.items(), self.directory):
            views |= found
        for item in items:
            yield (views[item.name, chunk.start] for chunk in item.chunks)

    def _views_in(
        self, part: tuple[str, list[tuple[Item, Chunk]]]
    ) -> dict[tuple[str, tuple[int, ...]], View]:
        """Views of the chunks of one file, by name and start."""
        name, stored = part
        with closing(open_file(self.directory / name)) as opened:
            opened.expect(place for _, chunk in stored for place in _ends(chunk))
            return {
                (item.name, chunk.start): _view(opened, item, chunk, self._reader)
                for item, chunk in sorted(stored, key=lambda pair: pair[1].offset)
            }

    def files(self, items: Iterable[Item]) -> tuple[Path, ...]:
        """The files of the tensors; SourceError for one that is missing or too short."""
        ends: dict[str, int] = {}
        for item in items:
            for chunk in item.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
        for name, end in ends.items():
            _check_file(self.directory / name, end)
        return tuple(self.directory / name for name in sorted(ends))


def _ends(chunk: Chunk) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where a chunk's archive says what it holds: before the elements and behind them."""
    tail = min(chunk.length, _END_BYTES)
    return (chunk.offset, min(chunk.length, _BEGIN_BYTES)), (
        chunk.offset + chunk.length - tail,
        tail,
    )


def _view(opened: OpenFile, item: Item, chunk: Chunk, reader: Reader) -> View:
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


def _file_names(items: Iterable[Item]) -> set[str]:
    return {chunk.file for item in items for chunk in item.chunks}


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SourceError(f"cannot read: {error.strerror}", file=file) from error


def _dtype(properties: Any) -> DType | None:  # noqa: ANN401 - unpickled
    found = getattr(properties, "dtype", None)
    state = getattr(properties, "state", None)
    if found is None and isinstance(state, tuple) and state:
        found = state[0]
    return found if isinstance(found, DType) else None


def _check_file(file: Path, end: int) -> None:
    try:
        found = file.stat()
    except OSError:
        found = None
    if found is None or not stat.S_ISREG(found.st_mode):
        raise SourceError("a file that the index names is missing", file=file)
    if found.st_size < end:
        raise SourceError(
            "the file is shorter than the index says",
            file=file,
            expected=f"at least {end} bytes",
            found=f"{found.st_size} bytes",
            hint="Copy it again from the training cluster",
        )
