"""Files of ``torch.save`` as spans: their pickles are read, their tensors never are.

A file is a zip archive whose members are stored uncompressed (PyTorch 1.6 and newer:
torch/serialization.py, caffe2/serialize/inline_container.cc), or, before that, a sequence
of pickles followed by the storages. In a ``.distcp`` file many archives lie end to end.
"""

from __future__ import annotations

import io
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.errors import SourceError
from ckpt.sources.unpickle import Reader, StorageRef, TensorRef
from ckpt.tensors import DType, View

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_END_RECORD = struct.Struct("<4s4H2LH")
_END_RECORD_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_CENTRAL_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_TAIL_BYTES = 64 * 1024
_PICKLE_LIMIT_BYTES = 4 * 2**30
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_CUT_HINT = "The file seems cut short or damaged; copy it again from the training cluster"


@dataclass(frozen=True)
class Member:
    """One record of an archive: where its bytes begin in the file, and how many they are."""

    offset: int
    size: int


class TorchArchive:
    """One saved object: its pickle's content, and where its storages lie."""

    def __init__(self, file: Path, members: Mapping[str, Member], root: Any) -> None:  # noqa: ANN401
        """``members`` are storages by key; ``root`` is the unpickled object."""
        self.file, self._members, self.root = file, members, root

    def view(self, tensor: TensorRef, *, name: str) -> View:
        """Where the elements of a tensor lie; raises SourceError if they reach past their record.

        ``name`` is the tensor's name for the message.
        """
        member = self._members.get(tensor.storage.key)
        if member is None:
            raise SourceError("its storage is not in the file", file=self.file, tensor=name)
        if not isinstance(tensor.dtype, DType):
            raise SourceError(
                "element type is not supported", file=self.file, tensor=name, found=tensor.dtype
            )
        if len(tensor.shape) != len(tensor.strides) or min((*tensor.shape, 0)) < 0:
            raise SourceError("shape and strides do not fit", file=self.file, tensor=name)
        steps = zip(tensor.shape, tensor.strides, strict=True)
        last = tensor.offset + sum((length - 1) * stride for length, stride in steps)
        needed = (last + 1) * tensor.dtype.itemsize if 0 not in tensor.shape else 0
        if needed > member.size or tensor.offset < 0 or min((*tensor.strides, 0)) < 0:
            raise SourceError(
                "the tensor reaches past its storage",
                file=self.file,
                tensor=name,
                expected=f"at least {needed} bytes",
                found=f"{member.size} bytes",
                hint=_CUT_HINT,
            )
        offset = member.offset + tensor.offset * tensor.dtype.itemsize
        return View(str(self.file), offset, tensor.dtype, tensor.shape, tensor.strides)


def read_archive(
    file: Path, reader: Reader, *, offset: int = 0, length: int | None = None
) -> TorchArchive:
    """The object saved in ``file``, or in its ``length`` bytes from ``offset`` on.

    Raises SourceError for a file that is no torch archive, is cut short or compressed.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = size - offset if length is None else length
            if offset + length > size or offset < 0:
                raise SourceError(
                    "the file is shorter than its metadata says",
                    file=file,
                    expected=f"{offset + length} bytes",
                    found=f"{size} bytes",
                    hint=_CUT_HINT,
                )
            fd = stream.fileno()
            if os.pread(fd, 4, offset) != b"PK\x03\x04":
                return _read_legacy(file, stream, reader, size)
            members = _read_directory(fd, file, offset, length)
            return _load(fd, file, members, reader)
    except FileNotFoundError as error:
        raise SourceError("no such file", file=file) from error
    except OSError as error:
        raise SourceError(f"cannot read: {error.strerror}", file=file) from error
    except (OverflowError, ValueError, struct.error) as error:
        raise SourceError(f"damaged archive: {error}", file=file, hint=_CUT_HINT) from error


def _load(fd: int, file: Path, members: dict[str, Member], reader: Reader) -> TorchArchive:
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise SourceError("not a file of torch.save: no data.pkl in it", file=file)
    prefix = pickles[0][: -len("data.pkl")]
    order = members.get(f"{prefix}byteorder")
    if order is not None and _read(fd, file, order).strip() == b"big":
        raise SourceError("saved on a big-endian machine, which is not supported", file=file)
    root = reader.load(_read(fd, file, members[pickles[0]]), file=str(file))
    start = f"{prefix}data/"
    storages = {
        name[len(start) :]: _behind_header(fd, file, member)
        for name, member in members.items()
        if name.startswith(start)
    }
    return TorchArchive(file, storages, root)


def _behind_header(fd: int, file: Path, entry: Member) -> Member:
    header = os.pread(fd, _LOCAL_HEADER.size, entry.offset)
    if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
        raise SourceError("damaged archive: a record's header is missing", file=file)
    name_length, extra_length = _LOCAL_HEADER.unpack(header)[-2:]
    start = entry.offset + _LOCAL_HEADER.size + name_length + extra_length
    return Member(start, entry.size)


def _read(fd: int, file: Path, entry: Member) -> bytes:
    if entry.size > _PICKLE_LIMIT_BYTES:
        raise SourceError(f"a pickle of {entry.size} bytes is too large to be one")
    record = _behind_header(fd, file, entry)
    return os.pread(fd, record.size, record.offset)


def _read_directory(fd: int, file: Path, offset: int, length: int) -> dict[str, Member]:
    """Members of a zip archive; offsets are those of their local headers in the file."""
    tail_start = max(offset, offset + length - _TAIL_BYTES)
    tail = os.pread(fd, offset + length - tail_start, tail_start)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _END_RECORD.size:
        raise SourceError(
            "the archive's directory is missing at its end", file=file, hint=_CUT_HINT
        )
    record = _END_RECORD.unpack_from(tail, at)
    size, start = record[5], record[6]
    end = tail_start + at
    locator = os.pread(fd, _LOCATOR_64.size, end - _LOCATOR_64.size)
    if locator[:4] == b"PK\x06\x07":
        where = offset + _LOCATOR_64.unpack(locator)[2]
        record_64 = os.pread(fd, _END_RECORD_64.size, where)
        if len(record_64) < _END_RECORD_64.size or record_64[:4] != b"PK\x06\x06":
            raise SourceError("damaged archive directory", file=file, hint=_CUT_HINT)
        size, start = _END_RECORD_64.unpack(record_64)[-2:]
        end = where
    directory = os.pread(fd, size, offset + start) if start + size <= length else b""
    if len(directory) != size or offset + start + size > end:
        raise SourceError("damaged archive directory", file=file, hint=_CUT_HINT)
    return _parse_directory(directory, file, offset, end)


def _parse_directory(directory: bytes, file: Path, offset: int, end: int) -> dict[str, Member]:
    members: dict[str, Member] = {}
    at = 0
    while at + _CENTRAL_ENTRY.size <= len(directory):
        entry = _CENTRAL_ENTRY.unpack_from(directory, at)
        method, stored, plain = entry[4], entry[8], entry[9]
        name_length, extra_length, comment_length = entry[10:13]
        header = entry[16]
        at += _CENTRAL_ENTRY.size
        name = directory[at : at + name_length].decode("utf-8", "replace")
        extra = directory[at + name_length : at + name_length + extra_length]
        at += name_length + extra_length + comment_length
        plain, stored, header = _wide_sizes(extra, plain, stored, header)
        if method != 0 or stored != plain:
            raise SourceError(f"record {name} is compressed, which torch never does", file=file)
        if offset + header + plain > end:
            raise SourceError(f"record {name} reaches past the archive", file=file, hint=_CUT_HINT)
        members[name] = Member(offset + header, plain)
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
    if reader.load_stream(stream, file=str(file)) != _LEGACY_MAGIC:
        raise SourceError("not a file of torch.save", file=file)
    reader.load_stream(stream, file=str(file))
    reader.load_stream(stream, file=str(file))
    storages: dict[str, StorageRef] = {}
    root = reader.load_stream(stream, file=str(file))
    _collect_storages(root, storages)
    keys = reader.load_stream(stream, file=str(file))
    members: dict[str, Member] = {}
    for key in keys:
        count = int.from_bytes(stream.read(8), "little")
        itemsize = storages[key].dtype.itemsize if key in storages else 1
        members[str(key)] = Member(stream.tell(), count * itemsize)
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
