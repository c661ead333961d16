"""JSON that is valid and still not what a model has: one clear error each, never a bug."""

from __future__ import annotations

import json

import pytest
import torch
from builders import Model, write_legacy
from safetensors.torch import save_file
from tiny_megatron import Ranks, TinyModel, write_torch_dist, write_zarr

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint, plan_conversion
from ckpt.convert.hf_files import read_tokenizer
from ckpt.errors import ModelError, OptionsError, PlanError, SourceError
from ckpt.inspection import inspect_directory
from ckpt.sources import open_source

DEEP = "[" * 100_000


@pytest.fixture
def model(tmp_path):
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    return tmp_path


def test_inspect_reads_a_config_without_the_usual_entries(model):
    for found in ([], None, "X", {}):
        (model / "config.json").write_text(json.dumps({"architectures": found}))
        assert inspect_directory(model).as_dict()["model"] == "unknown"


@pytest.mark.parametrize("text", ["[]", "null", "1", '"x"', DEEP])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_inspect_names_the_file_that_is_no_json_of_a_model(model, name, text):
    (model / name).write_text(text)
    with pytest.raises(ModelError, match=name):
        inspect_directory(model)


@pytest.mark.parametrize("claims", ["[]", "null", '{"a": 5}', '{"a": ["x"]}', '{"a": "../b"}'])
def test_inspect_refuses_an_index_that_names_no_files(model, claims):
    (model / "model.safetensors.index.json").write_text(f'{{"weight_map": {claims}}}')
    with pytest.raises(ModelError, match=r"index\.json"):
        inspect_directory(model)


@pytest.mark.parametrize(
    "changes",
    [{"data_offsets": [None, 24]}, {"data_offsets": [0.0, 24.0]}, {"shape": ["2", 3]},
     {"shape": [True, 6]}, {"shape": [2.0, 3]}, {"data_offsets": [0]}],
    ids=str,
)  # fmt: skip
def test_a_header_whose_sizes_are_no_numbers_is_refused(model, changes):
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    header = json.dumps({"a": entry | changes, "b": entry | {"data_offsets": [24, 48]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(48)
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors.*damaged header"):
        inspect_directory(model)


@pytest.mark.parametrize("text", [DEEP, '{"model_type": ["llama"]}', '{"model_type": 5}'])
def test_a_reference_that_names_no_model_is_refused(tmp_path, text):
    source = write_legacy(tmp_path / "run", Model())
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(OptionsError, match=r"config\.json"):
        plan_conversion(source, ConvertOptions(reference=tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", DEEP),
        ("tokenizer.json", '{"model": []}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": "b"}}}'),
        ("tokenizer.json", '{"model": {"vocab": [[1, 2], 3]}}'),
        ("tokenizer.json", '{"added_tokens": [{"id": 1}]}'),
        ("tokenizer_config.json", '"x"'),
        ("tokenizer_config.json", '{"eos_token": [1]}'),
    ],
)
def test_a_tokenizer_of_other_json_is_an_error_that_names_it(tmp_path, name, text):
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (tmp_path / name).write_text(text)
    with pytest.raises(OptionsError, match=str(tmp_path)):
        read_tokenizer(tmp_path)


def test_metadata_without_end_does_not_hide_a_checkpoint(tmp_path):
    source = write_torch_dist(tmp_path, TinyModel("llama"), Ranks())
    (source / "iter_0000007/metadata.json").write_text(DEEP)
    assert open_source(source).format == "torch_dist"


@pytest.mark.parametrize("text", ["9" * 5000, "\u0667", "\u00b2"])
def test_a_tracker_that_holds_no_plain_number_is_damaged(tmp_path, text):
    """Python would read some of them, or fail at them."""
    source = write_legacy(tmp_path / "run", Model())
    (source / "latest_checkpointed_iteration.txt").write_text(text, encoding="utf-8")
    with pytest.raises(SourceError, match="tracker file is damaged"):
        open_source(source)


def test_weights_of_whole_numbers_are_refused(tmp_path):
    """An array's header says so, and every size fits."""
    source = write_zarr(tmp_path, TinyModel("llama"), Ranks(tp=2))
    header = source / "iter_0000007/decoder.final_layernorm.weight/.zarray"
    header.write_text(header.read_text().replace("<f4", "<i4"))
    with pytest.raises(PlanError, match="weight of whole numbers"):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions())
