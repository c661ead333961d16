"""Options: what a pipeline file may say, and what it is told when it says something else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from ckpt.config import (
    ConvertOptions,
    PipelineOptions,
    load_pipeline,
    parse_options,
    parse_size,
)
from ckpt.errors import OptionsError


def write(tmp_path, **changes):
    content = {"source": {"path": "run"}, "output": "out", **changes}
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def test_a_short_pipeline_has_the_defaults_of_every_stage(tmp_path):
    options = load_pipeline(write(tmp_path))
    assert options == PipelineOptions(
        source=dataclasses.replace(options.source, path=tmp_path / "run"), output=tmp_path / "out"
    )
    assert options.convert == ConvertOptions()
    assert options.source.iteration == "latest"


def test_relative_paths_count_from_the_file(tmp_path):
    options = load_pipeline(
        write(tmp_path, convert={"tokenizer": "tok"}, source={"path": "/abs", "iteration": 7})
    )
    assert options.convert.tokenizer == tmp_path / "tok"
    assert options.source.path == Path("/abs")
    assert options.source.iteration == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"convrt": {}}, ["convrt: unknown key", "did you mean convert?"]),
        ({"convert": {"dtpye": "bf16"}}, ["convert.dtpye: unknown key", "did you mean dtype?"]),
        ({"convert": {"zzz": 1}}, ["convert.zzz", "allowed: dtype, max_shard_size"]),
        ({"convert": {"dtype": "int3"}}, ["convert.dtype", "'keep', 'bf16'", "found 'int3'"]),
        ({"convert": {"max_shard_size": "5 parsecs"}}, ["convert.max_shard_size", "not a size"]),
        ({"convert": {"max_shard_size": "0GB"}}, ["at least one byte"]),
        ({"convert": {"vocab_size": 0}}, ["convert.vocab_size", "found 0"]),
        ({"source": {}}, ["source.path: required, but missing"]),
        ({"source": {"path": "run", "iteration": "newest"}}, ["source.iteration", "'newest'"]),
        ({"source": {"path": "run", "iteration": -1}}, ["source.iteration", "found -1"]),
        ({"output": None}, ["output"]),
        ({"quantize": {"enabled": True}}, ["quantize.enabled", "found True"]),
        ({"serve": {"port": 99999}}, ["serve.port", "found 99999"]),
        ({"validate": {"min_cosine": 1.5}}, ["validate.min_cosine", "found 1.5"]),
    ],
)
def test_a_wrong_entry_is_named_with_stage_key_value_and_what_is_allowed(tmp_path, changes, words):
    file = write(tmp_path, **changes)
    with pytest.raises(OptionsError) as caught:
        load_pipeline(file)
    for word in (str(file), *words):
        assert word in str(caught.value)


def test_every_fault_is_listed_and_not_the_first_one(tmp_path):
    file = write(tmp_path, convert={"dtype": "x", "speed": 9}, serve={"port": -1})
    with pytest.raises(OptionsError) as caught:
        load_pipeline(file)
    for word in ("convert.dtype", "convert.speed", "serve.port"):
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "7", "a: [", "\x00", "source: run\noutput: out"])
def test_a_file_that_is_no_pipeline_is_an_error_with_its_name(tmp_path, text):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(OptionsError, match=r"p\.yaml"):
        load_pipeline(tmp_path / "p.yaml")
    with pytest.raises(OptionsError, match="absent"):
        load_pipeline(tmp_path / "absent")


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 kB", 1500), ("512MiB", 512 * 2**20), ("2tib", 2 * 2**40),
     (3000, 3000), (" 7 B ", 7)],
)  # fmt: skip
def test_sizes_have_decimal_and_binary_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e3", "5 G B", "5PB", None, "0"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_options_are_frozen_and_strict():
    options = parse_options(ConvertOptions, {"max_shard_size": "1MB"})
    assert options.max_shard_size == 10**6
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.dtype = "fp16"
    with pytest.raises(OptionsError, match="overrides"):
        parse_options(ConvertOptions, {"overrides": 5})
