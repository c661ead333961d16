"""The ``torch_dist`` format: the index, the chunks that it names, and damage to either."""

from __future__ import annotations

import contextlib
import pickle

import pytest
import torch
from builders import Item, Model, megatron_tensors, write_torch_dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.config import ConvertOptions
from ckpt.convert import plan_conversion
from ckpt.errors import CkptError, SourceError
from ckpt.sources import open_source
from ckpt.tensors import DType

MODEL = Model()


def index_of(source):
    (file,) = source.glob("iter_*/.metadata")
    return file


def change_index(source, change):
    file = index_of(source)
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("options", [{}, {"stacked": False}, {"halves": True}, {"tp": 3}])
def test_names_and_shapes_are_those_of_the_whole_model(tmp_path, options):
    """One tensor for each layer, wherever its chunks lie; without spans as well."""
    source = write_torch_dist(tmp_path / "run", MODEL, **options)
    expected = {n: tuple(t.shape) for n, t in megatron_tensors(MODEL, options.get("tp", 1)).items()}
    for spans in (True, False):
        checkpoint = open_source(source, spans=spans)
        assert {tensor.name for tensor in checkpoint.tensors} == set(expected)
        assert dict(checkpoint.shapes) == expected
        assert checkpoint.dtypes() == {DType.F32: len(expected)}


def test_a15_optimizer_states_are_skipped_and_their_bytes_never_opened(tmp_path):
    """12 bytes a parameter lie beside the model."""
    source = write_torch_dist(tmp_path / "run", MODEL, optimizer=True)
    checkpoint = open_source(source)
    reasons = {item.reason: item.count for item in checkpoint.skipped}
    items = len(pickle.loads(index_of(source).read_bytes()).state_dict_metadata)
    weights = len(checkpoint.raw_names)
    assert reasons["optimizer state"] == 3 * weights
    assert weights + sum(reasons.values()) == items
    held = sum(shard.view.nbytes for tensor in checkpoint.tensors for shard in tensor.shards)
    assert held == sum(tensor.nbytes for tensor in megatron_tensors(MODEL, 1).values())


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "sub/file", "..", "", "a\0b", 5, None]
)
def test_an_index_that_points_outside_its_directory_is_refused(tmp_path, path):
    source = write_torch_dist(tmp_path / "run", MODEL, common="common_state")
    for name in ("embedding.word_embeddings.weight", "common_state"):

        def change(metadata, name=name):
            for key, place in metadata.storage_data.items():
                if key.fqn == name:
                    place.relative_path = path

        change_index(source, change)
        with pytest.raises(SourceError, match=r"outside the directory|damaged index"):
            open_source(source)


def _set_each(metadata, name, value):
    for part in metadata.storage_data.values():
        setattr(part, name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.__dict__.pop("storage_data"), "not the index"),
        (lambda m: setattr(m, "storage_data", [1]), "not the index"),
        (lambda m: m.storage_data.clear(), "names no file for its part"),
        (lambda m: _set_each(m, "length", -1), "damaged index"),
        (lambda m: _set_each(m, "offset", "0"), "damaged index"),
        (lambda m: [p.__dict__.pop("length") for p in m.storage_data.values()], "damaged index"),
        (lambda m: m.storage_data.update({"x": 5}), "damaged index"),
        (lambda m: m.state_dict_metadata.update({5: 5}), "damaged index"),
        (lambda m: _entry(m).chunks.pop(), "gap or overlap"),
        (lambda m: _entry(m).chunks.append(_entry(m).chunks[0]), "gap or overlap"),
        (lambda m: setattr(_entry(m), "size", torch.Size([9])), "damaged index"),
        (lambda m: setattr(_entry(m), "size", torch.Size([900, 60])), "gap or overlap"),
        (lambda m: setattr(_entry(m).properties, "dtype", torch.float16), "not what the index"),
        (lambda m: setattr(_entry(m).properties, "dtype", torch.complex64), "not supported"),
        (lambda m: setattr(_entry(m), "properties", None), "not supported"),
        (lambda m: setattr(_entry(m).chunks[0], "sizes", torch.Size([1, 1])), "not what the index"),
        (lambda m: setattr(_entry(m).chunks[0], "offsets", None), "damaged index"),
    ],
)
def test_an_index_that_contradicts_itself_or_the_files_is_an_error_and_no_bug(
    tmp_path, change, message
):
    source = write_torch_dist(tmp_path / "run", MODEL, tp=2)
    change_index(source, change)
    with pytest.raises(CkptError, match=message):
        plan_conversion(source, ConvertOptions())


def _entry(metadata):
    return metadata.state_dict_metadata["embedding.word_embeddings.weight"]


def test_a_missing_and_a_short_file_are_named(tmp_path):
    source = write_torch_dist(tmp_path / "run", MODEL, tp=2)
    (file,) = source.glob("iter_*/__1_0.distcp")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(SourceError, match=r"__1_0\.distcp: the file is shorter"):
        open_source(source)
    file.unlink()
    with pytest.raises(SourceError, match=r"__1_0\.distcp: .*missing"):
        open_source(source)


def test_an_item_that_is_no_tensor_is_refused(tmp_path):
    """The index says a tensor, the file holds a dictionary."""

    def edit(items, _common):
        items["decoder.final_layernorm.weight"].parts[(0,)] = {"not": "a tensor"}

    source = write_torch_dist(tmp_path / "run", MODEL, edit=edit)
    with pytest.raises(SourceError, match="holds no tensor"):
        open_source(source)


def test_a14_what_holds_no_arguments_is_refused(tmp_path):
    """common.pt without args, and a common.pt that is no dictionary."""
    source = write_torch_dist(tmp_path / "run", MODEL, edit=lambda _, common: common.pop("args"))
    with pytest.raises(SourceError, match="no training arguments: the common state has no args"):
        plan_conversion(source, ConvertOptions())
    (file,) = source.glob("iter_*/common.pt")
    torch.save([1, 2], file)
    with pytest.raises(SourceError, match="not a dictionary"):
        open_source(source)


def test_two_keys_of_one_tensor_are_refused(tmp_path):
    """Under another prefix or spelling; neither is chosen silently."""
    for number, key in enumerate(["module.output_layer.weight", "decoder.final_norm.weight"]):

        def edit(items, _common, key=key):
            old = "output_layer.weight" if "output" in key else "decoder.final_layernorm.weight"
            items[key] = items[old]

        source = write_torch_dist(tmp_path / str(number), MODEL, edit=edit)
        with pytest.raises(SourceError, match="two keys are the same tensor"):
            open_source(source)


@pytest.mark.parametrize("size", [(), (4, 60, 36), (2, 60, 36)])
def test_a13_a_stack_of_layers_that_is_not_whole_is_refused(tmp_path, size):
    """A layer without parts, or parts without a layer."""

    def change(metadata):
        entry = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
        entry.size = torch.Size(size)
        if not size:
            entry.chunks = []

    source = write_torch_dist(tmp_path / "run", MODEL)
    change_index(source, change)
    with pytest.raises(SourceError, match=r"leave out entries|lies outside it"):
        open_source(source)


def test_chunks_of_several_layers_in_one_file_are_taken_apart(tmp_path):
    """A pipeline rank may store its layers as one chunk."""

    def edit(items, _common):
        key = "decoder.layers.mlp.linear_fc2.weight"
        item = items[key]
        whole = torch.cat([item.parts[start] for start in sorted(item.parts)])
        items[key] = Item(item.shape, item.dtype, {(0, 0, 0): whole[:2], (2, 0, 0): whole[2:]})

    source = write_torch_dist(tmp_path / "run", MODEL, edit=edit)
    checkpoint = open_source(source)
    for tensor in checkpoint.tensors:
        if tensor.name.endswith("linear_fc2.weight"):
            (shard,) = tensor.shards
            expected = megatron_tensors(MODEL, 1)[tensor.name].numpy().tobytes()
            with open(shard.view.file, "rb") as stream:  # noqa: PTH123 - a path in a view
                stream.seek(shard.view.offset)
                assert stream.read(len(expected)) == expected


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_bytes_of_the_index_never_escape_as_a_bug(tmp_path_factory, data):
    """Any byte may be wrong: the plan is made, or the error is one of ours."""
    source = write_torch_dist(tmp_path_factory.mktemp("x") / "run", Model(layers=1))
    content = bytearray(index_of(source).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    index_of(source).write_bytes(content)
    with contextlib.suppress(CkptError):
        plan_conversion(source, ConvertOptions())


def test_a20_an_object_of_no_known_kind_is_refused_by_name(tmp_path):
    """What is stored beside the tensors may change what the model computes."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    def change(metadata):
        metadata.state_dict_metadata["decoder.adapters/shard_0_1"] = BytesStorageMetadata()

    source = write_torch_dist(tmp_path / "run", MODEL)
    change_index(source, change)
    for spans in (True, False):
        with pytest.raises(SourceError, match=r"no known kind: decoder\.adapters/shard_0_1"):
            open_source(source, spans=spans)
