"""Files of torch.save as spans: every tensor's bytes are where the view says."""

from __future__ import annotations

import contextlib
import zipfile

import numpy as np
import pytest
import torch
from builders import with_other_pickle
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.convert.read import Files, fill
from ckpt.errors import CkptError, SourceError
from ckpt.rectangles import rectangles
from ckpt.sources.torch_archive import read_archive
from ckpt.sources.unpickle import Reader
from ckpt.tensors import contiguous_strides

BASE = torch.arange(60, dtype=torch.float32).reshape(5, 12)
TENSORS = {
    "plain": BASE.clone(),
    "turned": BASE.T,
    "strided": BASE[::2, 1::3],
    "second": BASE[3:],  # the same storage, another offset
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "bf16": BASE.bfloat16(),
    "fp16": BASE.half(),
    "double": BASE.double(),
    "flags": BASE > 30,
    "bytes": BASE.to(torch.uint8),
    "longs": BASE.long(),
    "fp8": BASE.to(torch.float8_e4m3fn),
    "parameter": torch.nn.Parameter(BASE.clone()),
}


def stored_bytes(view):
    """The view's elements in C order, read through rectangles."""
    window = np.zeros(view.nbytes, np.uint8)
    with Files() as files:
        for copy in rectangles(view, contiguous_strides(view.shape), 0):
            fill(files, copy, window, 0)
    return window.tobytes()


def bytes_of(tensor):
    return bytes(tensor.detach().contiguous().untyped_storage()) if tensor.numel() else b""


@pytest.mark.parametrize(
    ("name", "modern"),
    [(name, True) for name in TENSORS] + [(name, False) for name in TENSORS if name != "fp8"],
)
def test_every_kind_of_tensor_is_found_by_its_bytes(tmp_path, name, modern):
    """Strides, shared storages, offsets, all element types; in both forms of the format."""
    saved = TENSORS if modern else {key: TENSORS[key] for key in TENSORS if key != "fp8"}
    torch.save(saved, tmp_path / "f.pt", _use_new_zipfile_serialization=modern)
    archive = read_archive(tmp_path / "f.pt", Reader())
    view, expected = archive.view(archive.root[name], name=name), TENSORS[name]
    assert view.shape == tuple(expected.shape)
    assert view.dtype.torch_name == str(expected.dtype).removeprefix("torch.")
    assert stored_bytes(view) == bytes_of(expected.detach().clone().contiguous())


def test_archives_end_to_end_in_one_file_are_read_by_offset(tmp_path):
    """As the items of a .distcp file lie."""
    places = []
    with (tmp_path / "f").open("wb") as stream:
        for number in range(3):
            begin = stream.tell()
            torch.save(BASE + number, tmp_path / "one")
            stream.write((tmp_path / "one").read_bytes())
            places.append((begin, stream.tell() - begin))
    for number, (offset, length) in enumerate(places):
        archive = read_archive(tmp_path / "f", Reader(), offset=offset, length=length)
        assert stored_bytes(archive.view(archive.root, name="x")) == bytes_of(BASE + number)


def test_a_directory_in_its_64_bit_form_is_read(tmp_path, monkeypatch):
    """Archives beyond 4 GiB keep sizes in the ZIP64 extra field."""
    torch.save({"w": BASE}, tmp_path / "small")
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
    (tmp_path / "wide").write_bytes(
        with_other_pickle((tmp_path / "small").read_bytes(), lambda content: content)
    )
    assert b"PK\x06\x07" in (tmp_path / "wide").read_bytes()
    archive = read_archive(tmp_path / "wide", Reader())
    assert stored_bytes(archive.view(archive.root["w"], name="w")) == bytes_of(BASE)


def test_a_file_cut_anywhere_is_an_error_with_its_name(tmp_path):
    """Never a shorter tensor, never another exception."""
    for modern in (True, False):
        whole = tmp_path / f"whole{modern}.pt"
        torch.save({"w": BASE}, whole, _use_new_zipfile_serialization=modern)
        content = whole.read_bytes()
        for kept in range(0, len(content) - 1, 41):
            cut = tmp_path / "cut.pt"
            cut.write_bytes(content[:kept])
            with pytest.raises(SourceError, match=r"cut\.pt"):
                read_archive(cut, Reader())


def test_a_compressed_archive_and_a_foreign_one_are_refused(tmp_path):
    """torch.save never compresses, so offsets into the file would be wrong."""
    for name, method, entry in (
        ("compressed", zipfile.ZIP_DEFLATED, "archive/data.pkl"),
        ("foreign", zipfile.ZIP_STORED, "word/document.xml"),
    ):
        with zipfile.ZipFile(tmp_path / name, "w", method) as archive:
            archive.writestr(entry, b"x" * 500)
        with pytest.raises(SourceError, match=name):
            read_archive(tmp_path / name, Reader())
    with pytest.raises(SourceError, match="no such file"):
        read_archive(tmp_path / "absent", Reader())
    (tmp_path / "text").write_text("hello")
    with pytest.raises(SourceError, match=r"not a file of torch\.save"):
        read_archive(tmp_path / "text", Reader())


def test_a_big_endian_file_is_refused(tmp_path):
    """Bytes are copied as they are."""
    file = tmp_path / "big"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"N.")
        archive.writestr("archive/byteorder", b"big")
    with pytest.raises(SourceError, match="big-endian"):
        read_archive(file, Reader())


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((6, 12), (12, 1), 0),  # one row too many
        ((5, 12), (12, 1), 1),
        ((5, 12), (13, 1), 0),
        ((5, 12), (-12, 1), 59),
        ((5, 12), (12, 1), -1),
        ((-5, -12), (12, 1), 0),
        ((5, 12), (12,), 0),
    ],
)
def test_a_tensor_that_reaches_past_its_storage_is_refused(tmp_path, shape, strides, offset):
    """Else it would be filled with bytes of the next one."""
    file = tmp_path / "f.pt"
    torch.save({"w": BASE}, file)
    archive = read_archive(file, Reader())
    tensor = archive.root["w"]
    tensor.shape, tensor.strides, tensor.offset = shape, strides, offset
    with pytest.raises(SourceError, match="w"):
        archive.view(tensor, name="w")


def test_an_element_type_that_no_weight_has_is_refused_when_it_is_a_weight(tmp_path):
    """An optimizer may hold such types; they are read as their names."""
    file = tmp_path / "f.pt"
    torch.save({"w": BASE.to(torch.uint16), "type": torch.complex64}, file)
    archive = read_archive(file, Reader())
    with pytest.raises(SourceError, match=r"element type is not supported.*uint16"):
        archive.view(archive.root["w"], name="w")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_bytes_never_escape_as_a_bug(tmp_path_factory, data):
    """Any byte may be wrong: the file reads, or the error is one of ours."""
    file = tmp_path_factory.mktemp("x") / "f.pt"
    torch.save({"w": BASE, "args": {"a": [1, "two"]}}, file)
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    with contextlib.suppress(CkptError):
        archive = read_archive(file, Reader())
        if isinstance(archive.root, dict) and hasattr(archive.root.get("w"), "storage"):
            archive.view(archive.root["w"], name="w")
