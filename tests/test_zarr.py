"""The ``zarr`` format: arrays that are converted bit for bit, and those that are refused."""

from __future__ import annotations

import contextlib
import json
import shutil
from typing import Any

import pytest
import torch
from converted import assert_converts
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_megatron import Ranks, TinyModel, write_torch_dist, write_zarr

from ckpt.config import ConvertOptions
from ckpt.convert import plan_conversion
from ckpt.errors import CkptError, SourceError
from ckpt.inspection import inspect_directory
from ckpt.sources import open_source

MODEL = TinyModel("llama")
EMBEDDING = "embedding.word_embeddings.weight"
FORMS: dict[str, tuple[Ranks, dict[str, Any]]] = {
    "one": (Ranks(), dict()),
    "tp2-te": (Ranks(tp=2), dict(te=True)),
    "tp2-single-prefix-optimizer": (
        Ranks(tp=2),
        dict(te=True, single=True, prefix="module.", optimizer=True),
    ),
    "tp2-nested": (Ranks(tp=2), dict(separator="/")),
    "cut-short": (Ranks(), dict(cut_short=True)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "deepseek-mtp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chunks_of_every_key_form_give_the_exact_tensors(tmp_path, family, form, dtype):
    """A dense, a biased, an expert and a latent-attention family."""
    model, (ranks, options) = TinyModel(family, dtype=dtype), FORMS[form]
    source = write_zarr(tmp_path / "run", model, ranks, **options)
    assert_converts(source, model, tmp_path / "out")


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3moe", "deepseek"])
def test_a05_experts_keep_their_numbers(tmp_path, family, grouped):
    model = TinyModel(family)
    source = write_zarr(tmp_path / "run", model, Ranks(tp=2, ep=2), te=True, grouped=grouped)
    assert_converts(source, model, tmp_path / "out")


def test_inspect_says_what_torch_dist_would_say(tmp_path):
    """The same model in both formats differs in the format's name, the place and the file sizes."""
    facts = []
    for number, write in enumerate([write_zarr, write_torch_dist]):
        source = write(tmp_path / str(number), TinyModel("mixtral"), Ranks(tp=2, ep=2))
        facts.append(inspect_directory(source).as_dict())
    differ = {key for key in facts[0] if facts[0][key] != facts[1][key]}
    assert facts[0]["format"] == "zarr"
    assert facts[0]["convertible"]
    # only torch_dist's writer adds the state of random numbers
    assert differ == {"format", "directory", "size", "left_out"}


def test_optimizer_arrays_are_left_out_by_name_and_never_opened(tmp_path):
    """Damaged ones do not matter."""
    source = write_zarr(tmp_path / "run", MODEL, Ranks(), optimizer=True)
    for directory in source.glob("iter_*/optimizer.*"):
        shutil.rmtree(directory)
        directory.mkdir()
        (directory / ".zarray").write_text("damaged")
    checkpoint = open_source(source)
    reasons = {item.reason: item.count for item in checkpoint.skipped}
    assert reasons["optimizer state"] == len(checkpoint.raw_names)
    assert not any(file.parent.name.startswith("optimizer") for file in checkpoint.files)
    assert_converts(source, MODEL, tmp_path / "out")


def change_header(source, **changes):
    (file,) = source.glob(f"iter_*/{EMBEDDING}/.zarray")
    header = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in header.items() if value is not ...}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compressor": {"id": "blosc"}}, "another compressor.*expected null.*blosc"),
        ({"filters": [{"id": "delta"}]}, "another filters.*delta"),
        ({"order": "F"}, 'another order.*expected "C", found "F"'),
        ({"zarr_format": 3}, "another zarr_format"),
        ({"dtype": ">f4"}, "big-endian.*>f4"),
        ({"dtype": "<V2"}, "element type is not supported.*<V2"),
        ({"dtype": [["a", "<f4"]]}, "element type is not supported"),
        ({"dtype": "<f2"}, "chunk of the wrong size"),
        ({"dimension_separator": "-"}, "dimension_separator"),
        ({"dimension_separator": "/"}, "a chunk is missing"),
        ({"shape": ...}, "cannot read.*shape"),
        ({"order": ...}, "cannot read.*order"),
        ({"shape": [640]}, "shape and chunks do not fit"),
        ({"shape": 5}, "cannot read"),
        ({"shape": [0, 0]}, "shape and chunks do not fit"),
        ({"chunks": [0, 64]}, "shape and chunks do not fit"),
        ({"chunks": [True, 64]}, "shape and chunks do not fit"),
        ({"chunks": ["64", "64"]}, "shape and chunks do not fit"),
        ({"shape": [10**15, 10**15], "chunks": [1, 1]}, r"chunk 0\.1 is missing"),
    ],
)
def test_an_array_that_is_not_plain_is_refused_by_name(tmp_path, changes, message):
    """Each of these would put other numbers in the place of weights."""
    source = write_zarr(tmp_path / "run", MODEL, Ranks())
    change_header(source, **changes)
    with pytest.raises(SourceError, match=f"{EMBEDDING}.*({message})"):
        open_source(source)


def test_a_missing_chunk_is_no_fill_value(tmp_path):
    """zarr itself would read the fill value in its place."""
    source = write_zarr(tmp_path / "run", MODEL, Ranks(tp=2))
    change_header(source, fill_value=0.0)
    (file,) = source.glob(f"iter_*/{EMBEDDING}/1.0")
    file.unlink()
    with pytest.raises(SourceError, match=f"{EMBEDDING}: chunk 1.0 is missing.*2 chunks, found 1"):
        open_source(source)


@pytest.mark.parametrize("size", [0, 100, -1, 1])
def test_a_chunk_of_the_wrong_size_is_refused_by_name(tmp_path, size):
    """Empty, short, a byte short and a byte too long."""
    source = write_zarr(tmp_path / "run", MODEL, Ranks(tp=2))
    (file,) = source.glob(f"iter_*/{EMBEDDING}/1.0")
    content = file.read_bytes()
    file.write_bytes(content[:size] if size != 1 else content + b"x")
    with pytest.raises(SourceError, match=rf"{EMBEDDING}/1\.0: a chunk of the wrong size"):
        open_source(source)


@pytest.mark.parametrize("name", ["2.0", "0.1", "0.0.0", "0.0.7c1b.partial"])
def test_a_file_that_is_no_chunk_of_its_array_is_refused(tmp_path, name):
    source = write_zarr(tmp_path / "run", MODEL, Ranks(tp=2))
    (directory,) = source.glob(f"iter_*/{EMBEDDING}")
    shutil.copy(directory / "0.0", directory / name)
    with pytest.raises(SourceError, match=f"{EMBEDDING}/{name}: no chunk of this array"):
        open_source(source)


def test_an_array_without_its_header_and_an_unknown_object_are_refused(tmp_path):
    source = write_zarr(tmp_path / "run", MODEL, Ranks())
    (file,) = source.glob(f"iter_*/{EMBEDDING}/.zarray")
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(SourceError, match=f"{EMBEDDING}: chunks of an array without its .zarray"):
        open_source(source)
    file.write_bytes(content)
    unknown = file.parent.parent / "decoder.adapters"
    unknown.mkdir()
    torch.save([{"scale": 2}], unknown / "shard_0_1.pt")
    with pytest.raises(SourceError, match=r"decoder\.adapters: an object .* no known kind"):
        open_source(source)


def test_a20_an_array_that_no_rule_knows_stops_the_run(tmp_path):
    source = write_zarr(tmp_path / "run", MODEL, Ranks())
    (directory,) = source.glob(f"iter_*/{EMBEDDING}")
    shutil.copytree(directory, directory.parent / "decoder.adapters.weight")
    with pytest.raises(CkptError, match=r"decoder\.adapters\.weight"):
        plan_conversion(source, ConvertOptions())


def test_a14_without_common_pt_the_arguments_are_asked_for(tmp_path):
    source = write_zarr(tmp_path / "run", MODEL, Ranks())
    (file,) = source.glob("iter_*/common.pt")
    file.unlink()
    with pytest.raises(SourceError, match=r"no training arguments: no common\.pt.*--set"):
        plan_conversion(source, ConvertOptions())


def test_a19_an_interrupted_save_is_no_checkpoint(tmp_path):
    """``metadata.json`` is the last file that a save writes."""
    source = write_zarr(tmp_path / "run", MODEL, Ranks())
    (file,) = source.glob("iter_*/metadata.json")
    for content in (None, "", "[]", "{}"):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        with pytest.raises(SourceError, match="iteration is incomplete"):
            open_source(source)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_headers_never_escape_as_a_bug(tmp_path_factory, data):
    """Any byte may be wrong: the plan is made, or the error is one of ours."""
    model = TinyModel("llama", args={"num_layers": 1})
    source = write_zarr(tmp_path_factory.mktemp("x") / "run", model, Ranks())
    file = next(source.glob(f"iter_*/{EMBEDDING}/.zarray"))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    with contextlib.suppress(CkptError):
        plan_conversion(source, ConvertOptions())
