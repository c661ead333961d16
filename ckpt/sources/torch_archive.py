"""Files of ``torch.save`` as spans: their pickles are read, their tensors never are.

A file is a zip archive whose members are stored uncompressed (PyTorch 1.6 and newer:
torch/serialization.py, caffe2/serialize/inline_container.cc), or, before that, a sequence
of pickles followed by the storages. In a ``.distcp`` file many archives lie end to end.
"""

from __future__ import annotations

import io
import os
import struct
from contextlib import closing
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.sources.opened import open_file
from ckpt.sources.unpickle import Reader, StorageRef, TensorRef
from ckpt.tensors import DType, View

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckpt.sources.opened import OpenFile

    Member = tuple[int, int]  # a record: where its bytes begin in the file, and how many they are

_END_RECORD = struct.Struct("<4s4H2LH")
_END_RECORD_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
# Of a directory's entry what is read: method, sizes, lengths of name, extra field and comment,
# and where the record's own header is.
_CENTRAL_ENTRY = struct.Struct("<10xH8xLLHHH8xL")
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_LOCAL_LENGTHS = struct.Struct("<2H")  # of the name and of the extra field, in a local header
_CRC = struct.Struct("<16xL")  # of a directory's entry
_CRC_LENGTHS = struct.Struct("<3H")  # of its name, extra field and comment
_TAIL_BYTES = 64 * 1024
_WINDOW_BYTES = 1024
_PICKLE_LIMIT_BYTES = 4 * 2**30
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_CUT_HINT = "The file seems cut short or damaged; copy it again from the training cluster"


class TorchArchive:
    """One saved object: its pickle's content, and where its storages lie."""

    def __init__(self, file: Path, members: Mapping[str, Member], root: Any) -> None:  # noqa: ANN401
        """``members`` are storages by key; ``root`` is the unpickled object."""
        self.file, self._members, self.root = file, members, root
        self._name = str(file)
        self.fingerprint = b""  # equal for copies of one file; empty where nothing tells

    def view(self, tensor: TensorRef, *, name: str) -> View:
        """Where the elements of a tensor lie; raises SourceError if they reach past their record.

        ``name`` is the tensor's name for the message.
        """
        member = self._members.get(tensor.storage.key)
        if member is None:
            raise SourceError("its storage is not in the file", file=self.file, tensor=name)
        dtype, shape = tensor.dtype, tensor.shape
        if not isinstance(dtype, DType):
            raise SourceError(
                "element type is not supported", file=self.file, tensor=name, found=dtype
            )
        extent = _extent(shape, tensor.strides)
        if extent is None:
            raise SourceError("shape and strides do not fit", file=self.file, tensor=name)
        start, size = member
        needed = (tensor.offset + extent) * dtype.itemsize if extent else 0
        if needed > size or tensor.offset < 0:
            raise SourceError(
                "the tensor reaches past its storage",
                file=self.file,
                tensor=name,
                expected=f"at least {needed} bytes",
                found=f"{size} bytes",
                hint=_CUT_HINT,
            )
        return View(
            self._name, start + tensor.offset * dtype.itemsize, dtype, shape, tensor.strides
        )


@lru_cache(2**16)
def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """How many elements lie from the first one to the last, None where this makes no sense."""
    if len(shape) != len(strides) or min((*shape, *strides), default=0) < 0:
        return None
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def read_archive(
    file: Path,
    reader: Reader,
    *,
    offset: int = 0,
    length: int | None = None,
    spans: bool = True,
) -> TorchArchive:
    """The object saved in ``file``, or in its ``length`` bytes from ``offset`` on.

    Without ``spans`` its storages' bytes are taken to begin at their headers. Raises
    SourceError for a file that is no torch archive, is cut short or compressed.
    """
    with closing(open_file(file)) as opened:
        return read_item(opened, reader, offset=offset, length=length, spans=spans)


def read_item(
    opened: OpenFile,
    reader: Reader,
    *,
    offset: int = 0,
    length: int | None = None,
    spans: bool = True,
) -> TorchArchive:
    """As :func:`read_archive`, from a file that is open."""
    file, size = opened.path, opened.size
    length = size - offset if length is None else length
    if offset + length > size or offset < 0:
        raise SourceError(
            "the file is shorter than its metadata says",
            file=file,
            expected=f"{offset + length} bytes",
            found=f"{size} bytes",
            hint=_CUT_HINT,
        )
    try:
        if opened.read(offset, 4) != b"PK\x03\x04":
            with opened.stream() as stream:
                return _read_legacy(file, stream, reader, size)
        directory, end = _read_directory(opened, offset, length)
        members = _parse_directory(directory, file, offset, end)
        archive = _load(opened, members, reader, spans=spans)
        archive.fingerprint = _fingerprint(directory) if length == size else b""
        return archive  # noqa: TRY300 - errors of all of it are caught
    except OSError as error:
        raise SourceError(f"cannot read: {error.strerror}", file=file) from error
    except (OverflowError, ValueError, struct.error) as error:
        raise SourceError(f"damaged archive: {error}", file=file, hint=_CUT_HINT) from error


def _load(
    opened: OpenFile, members: dict[str, Member], reader: Reader, *, spans: bool
) -> TorchArchive:
    file = opened.path
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise SourceError("not a file of torch.save: no data.pkl in it", file=file)
    prefix = pickles[0][: -len("data.pkl")]
    content = _read(opened, members[pickles[0]])
    order = members.get(f"{prefix}byteorder")
    if order is not None and _read(opened, order).strip() == b"big":
        raise SourceError("saved on a big-endian machine, which is not supported", file=file)
    root = reader.load(content, file=str(file))
    start = f"{prefix}data/"
    skipped = len(start)
    stored = {name[skipped:]: at for name, at in members.items() if name.startswith(start)}
    if spans:
        opened.expect((at, _LOCAL_HEADER.size) for at, size in stored.values() if size)
    storages = {
        key: _behind_header(opened, member) if spans and member[1] else member
        for key, member in stored.items()
    }
    return TorchArchive(file, storages, root)


def _behind_header(opened: OpenFile, entry: Member) -> Member:
    offset, size = entry
    header = opened.read(offset, _LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
        raise SourceError("damaged archive: a record's header is missing", file=opened.path)
    name_length, extra_length = _LOCAL_LENGTHS.unpack_from(header, 26)
    return offset + _LOCAL_HEADER.size + name_length + extra_length, size


def _read(opened: OpenFile, entry: Member) -> bytes:
    if entry[1] > _PICKLE_LIMIT_BYTES:
        raise SourceError(f"a pickle of {entry[1]} bytes is too large to be one")
    return opened.read(*_behind_header(opened, entry))


def _fingerprint(directory: bytes) -> bytes:
    """A hash over all records' names, sizes and checksums; empty without checksums.

    torch.serialization.set_crc32_options(False) gives every record the same one.
    """
    first = _CRC.unpack_from(directory, 0)
    second = _CENTRAL_ENTRY.size + sum(_CRC_LENGTHS.unpack_from(directory, 28))
    if (
        second + _CENTRAL_ENTRY.size > len(directory)
        or _CRC.unpack_from(directory, second) == first
    ):
        return b""
    return sha256(directory).digest()


def _read_directory(opened: OpenFile, offset: int, length: int) -> tuple[bytes, int]:
    """A zip archive's directory, and where it ends in the file."""
    file, stop = opened.path, offset + length
    for most in (_WINDOW_BYTES, _TAIL_BYTES):  # torch writes no comment behind the end record
        tail_start = max(offset, stop - most)
        tail = opened.read(tail_start, stop - tail_start)
        at = tail.rfind(b"PK\x05\x06")
        if at >= 0:
            break
    if at < 0 or len(tail) - at < _END_RECORD.size:
        raise SourceError(
            "the archive's directory is missing at its end", file=file, hint=_CUT_HINT
        )
    record = _END_RECORD.unpack_from(tail, at)
    size, start = record[5], record[6]
    end = tail_start + at
    locator = opened.read(end - _LOCATOR_64.size, _LOCATOR_64.size)
    if locator[:4] == b"PK\x06\x07":
        where = offset + _LOCATOR_64.unpack(locator)[2]
        record_64 = opened.read(where, _END_RECORD_64.size)
        if len(record_64) < _END_RECORD_64.size or record_64[:4] != b"PK\x06\x06":
            raise SourceError("damaged archive directory", file=file, hint=_CUT_HINT)
        size, start = _END_RECORD_64.unpack(record_64)[-2:]
        end = where
    directory = opened.read(offset + start, size) if start + size <= length else b""
    if len(directory) != size or offset + start + size > end:
        raise SourceError("damaged archive directory", file=file, hint=_CUT_HINT)
    return directory, end


def _parse_directory(directory: bytes, file: Path, offset: int, end: int) -> dict[str, Member]:
    """Members of a zip archive; offsets are those of their local headers in the file."""
    members: dict[str, Member] = {}
    at, fixed = 0, _CENTRAL_ENTRY.size
    unpack, last = _CENTRAL_ENTRY.unpack_from, len(directory) - fixed
    while at <= last:
        method, stored, plain, length, extra_length, comment_length, header = unpack(directory, at)
        at += fixed + length
        name = directory[at - length : at].decode("utf-8", "replace")
        if extra_length:
            extra = directory[at : at + extra_length]
            plain, stored, header = _wide_sizes(extra, plain, stored, header)
        at += extra_length + comment_length
        if method or stored != plain:
            raise SourceError(f"record {name} is compressed, which torch never does", file=file)
        if offset + header + plain > end:
            raise SourceError(f"record {name} reaches past the archive", file=file, hint=_CUT_HINT)
        members[name] = (offset + header, plain)
    return members


def _wide_sizes(extra: bytes, plain: int, stored: int, header: int) -> tuple[int, int, int]:
    """Replace sizes of 0xFFFFFFFF by those of the ZIP64 extra field (APPNOTE 4.5.3)."""
    values = [plain, stored, header]
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = io.BytesIO(extra[at + 4 : at + 4 + length])
            for index, value in enumerate(values):
                if value == 0xFFFFFFFF:  # noqa: PLR2004 - the format's own marker
                    values[index] = int.from_bytes(wide.read(8), "little")
        at += 4 + length
    return values[0], values[1], values[2]


def _read_legacy(file: Path, stream: Any, reader: Reader, size: int) -> TorchArchive:  # noqa: ANN401
    """The form before PyTorch 1.6: magic, protocol, system, object, keys, then storages."""
    stream.seek(0)
    head = stream.read(2)
    if head[:1] != b"\x80":
        raise SourceError("not a file of torch.save", file=file)
    stream.seek(0)
    if reader.load_next(stream, file=str(file)) != _LEGACY_MAGIC:
        raise SourceError("not a file of torch.save", file=file)
    reader.load_next(stream, file=str(file))
    reader.load_next(stream, file=str(file))
    storages: dict[str, StorageRef] = {}
    root = reader.load_next(stream, file=str(file))
    _collect_storages(root, storages)
    keys = reader.load_next(stream, file=str(file))
    members: dict[str, Member] = {}
    for key in keys:
        count = int.from_bytes(stream.read(8), "little")
        itemsize = storages[key].dtype.itemsize if key in storages else 1
        members[str(key)] = (stream.tell(), count * itemsize)
        if key not in storages or stream.tell() + count * itemsize > size:
            raise SourceError("a storage reaches past the file", file=file, hint=_CUT_HINT)
        stream.seek(count * itemsize, os.SEEK_CUR)
    return TorchArchive(file, members, root)


def _collect_storages(value: object, found: dict[str, StorageRef]) -> None:
    if isinstance(value, TensorRef):
        found[value.storage.key] = value.storage
    elif isinstance(value, dict):
        for item in value.values():
            _collect_storages(item, found)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect_storages(item, found)
