"""Safetensors headers and indexes: those that the library itself reads and writes."""

from __future__ import annotations

import itertools
import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckpt.errors import ModelError
from ckpt.shards import (
    TensorSpec,
    assign,
    file_names,
    header_bytes,
    index_content,
    read_header,
)
from ckpt.tensors import DType

SPECS = [
    TensorSpec("b.weight", DType.F32, (2, 3)),
    TensorSpec("a.bias", DType.BF16, (5,)),
    TensorSpec("scalar", DType.I64, ()),
    TensorSpec("none", DType.F16, (0, 4)),
    TensorSpec("ünïcode", DType.U8, (1,)),
]


def spec_list():
    sizes = st.integers(0, 9)
    return st.lists(sizes, max_size=12).map(
        lambda sizes: [TensorSpec(f"t{n}", DType.U8, (size,)) for n, size in enumerate(sizes)]
    )


@given(specs=spec_list(), limit=st.integers(1, 20))
def test_a22_files_keep_the_order_and_the_limit(specs, limit):
    """Only a tensor that is larger than the limit makes a larger file, and is alone in it."""
    files = assign(specs, limit)
    assert [spec for file in files for spec in file] == specs
    for file in files:
        size = sum(spec.nbytes for spec in file)
        assert size <= limit or sum(spec.nbytes > 0 for spec in file) == 1
    for file, following in itertools.pairwise(files):
        assert sum(spec.nbytes for spec in file) + following[0].nbytes > limit


def test_the_library_reads_a_header_of_ours(tmp_path):
    content = bytes(range(sum(spec.nbytes for spec in SPECS)))
    header = header_bytes(SPECS)
    (tmp_path / "f.safetensors").write_bytes(header + content)
    assert len(header) % 8 == 0
    found = load_file(tmp_path / "f.safetensors")
    assert found.keys() == {spec.name for spec in SPECS}
    assert bytes(found["b.weight"].view(torch.uint8).flatten().tolist()) == content[:24]
    for spec in SPECS:
        assert tuple(found[spec.name].shape) == spec.shape
    assert read_header(tmp_path / "f.safetensors") == {spec.name: spec for spec in SPECS}


def test_a_header_of_the_library_is_read(tmp_path):
    tensors = {"x": torch.zeros(3, 2).bfloat16(), "y": torch.zeros(4, dtype=torch.int64)}
    save_file(tensors, tmp_path / "f", metadata={"format": "pt"})
    assert read_header(tmp_path / "f") == {
        "x": TensorSpec("x", DType.BF16, (3, 2)),
        "y": TensorSpec("y", DType.I64, (4,)),
    }


def header(**entries):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot read|cut short"),
        (b"\x00" * 8, "cannot read"),
        (struct.pack("<Q", 2**60) + b"{}", "cut short"),
        (struct.pack("<Q", 5) + b"\xff{}[]", "cannot read"),
        (struct.pack("<Q", 4) + b"[{}]", "damaged header"),
        (header(x=5), "damaged header"),
        (header(x={"dtype": "F32"}), "damaged header"),
        (header(x=entry("I4")) + b"1234", "unknown element type I4"),
        (header(x=entry(shape=("a",))) + b"1234", "damaged header|byte ranges"),
        (header(x=entry()) + b"123", "found .* bytes"),
        (header(x=entry()) + b"12345", "bytes behind its tensors"),
        (header(x=entry(shape=(2,))) + b"1234", "byte ranges do not fit"),
        (header(x=entry(offsets=(4, 8))) + b"12345678", "byte ranges do not fit"),
        (header(x=entry(), y=entry()) + b"1234", "byte ranges do not fit"),
    ],
)
def test_a22_a_damaged_file_is_an_error_with_its_name_and_no_bug(tmp_path, content, message):
    (tmp_path / "f.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_header(tmp_path / "f.safetensors")
    assert "f.safetensors" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"f\.safetensors: the file is missing"):
        read_header(tmp_path / "f.safetensors")


def test_a22_names_and_index_are_those_that_transformers_writes(tmp_path):
    """Its own save_pretrained of a tiny model in many files is the pattern."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="1KB")
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert file_names(len(files)) == files
    assert file_names(1) == ["model.safetensors"]
    theirs = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    ours = index_content([(name, list(read_header(tmp_path / name).values())) for name in files])
    assert ours["weight_map"] == theirs["weight_map"]
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
