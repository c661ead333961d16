"""Recorded references: written in a training job, found beside the checkpoint, read back."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt.errors import ValidationError
from ckpt.sources.locate import Located
from ckpt.validate.recorded import (
    REFERENCE_NAME,
    Reference,
    find_recorded,
    read_recorded,
    read_reference,
    record_reference,
    write_reference,
)

NO_MODEL: Any = None  # what forward= is given does not matter
IDS = torch.arange(12).reshape(2, 6)
LOGITS = torch.randn(2, 6, 20, generator=torch.Generator().manual_seed(3))


class Layer(torch.nn.Module):
    def forward(self, x):
        return x * 2, None  # Megatron's layers give a context beside it


class TinyGpt(torch.nn.Module):
    """Called as a GPTModel is: logits [B, S, V] from tokens, positions and a mask."""

    def __init__(self, *, dtype=torch.float32):
        super().__init__()
        self.embedding = torch.nn.Module()
        self.weight = torch.nn.Parameter(torch.randn(20, 4, dtype=dtype))
        self.embedding.forward = lambda ids: self.weight[ids].transpose(0, 1)
        self.decoder = torch.nn.Module()
        self.layers = [Layer(), Layer()]
        self.decoder.layers = torch.nn.ModuleList(self.layers)
        self.seen: Any = None

    def forward(self, tokens, positions, mask):
        self.seen = (positions, mask, self.training)
        state = self.embedding(tokens)
        for layer in self.layers:
            state, _ = layer(state)
        return (state @ self.weight.T).transpose(0, 1).float()  # as the half-precision wrapper


class Group:
    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


def parallel(monkeypatch, *, tp=1, tp_rank=0, pp=1, cp=1, data_rank=0):
    """Megatron's parallel state, as a training job has it."""
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_pipeline_model_parallel_world_size=lambda: pp,
        get_context_parallel_world_size=lambda: cp,
        get_tensor_model_parallel_group=lambda: Group(tp),
        get_tensor_model_parallel_rank=lambda: tp_rank,
        get_data_parallel_rank=lambda with_context_parallel: data_rank,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)

    def all_gather(parts, local, group):
        for rank, part in enumerate(parts):
            part.copy_(local + rank)

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)


def written(file):
    assert file is not None
    return file


def metadata(file):
    with safe_open(file, framework="pt") as opened:
        return opened.metadata()


def test_a_megatron_model_is_recorded_with_its_layers(tmp_path):
    model = TinyGpt()
    directory = tmp_path / "iter_0000250"
    file = written(record_reference(model, IDS, directory, hidden_states=True))
    assert file == directory / REFERENCE_NAME
    found = read_reference(file)
    assert torch.equal(found.input_ids, IDS)
    assert sorted(found.hidden) == [0, 1, 2]
    assert torch.allclose(found.hidden[2], 4 * model.weight.detach()[IDS])
    assert torch.allclose(found.logits, 4 * model.weight.detach()[IDS] @ model.weight.detach().T)
    assert metadata(file)["iteration"] == "250"
    assert metadata(file)["dtype"] == "float32"
    assert metadata(file)["producer"].startswith("ckpt ")
    assert not model._forward_hooks
    assert not model.layers[0]._forward_hooks


def test_the_mask_is_true_where_a_position_must_not_look(tmp_path):
    """The other way round a right model looks wrong."""
    model = TinyGpt()
    record_reference(model, IDS, tmp_path)
    positions, mask, _ = model.seen
    assert mask.shape == (1, 1, 6, 6)
    assert mask[0, 0, 0].tolist() == [False, True, True, True, True, True]
    assert positions[1].tolist() == list(range(6))


def test_dropout_is_off_meanwhile_and_on_again_afterwards(tmp_path):
    model = TinyGpt().train()
    record_reference(model, IDS, tmp_path)
    assert model.seen[2] is False
    assert model.training


def test_the_precision_is_that_of_the_weights(tmp_path):
    """Megatron's wrapper answers in float32 whatever the model computes in."""
    file = written(record_reference(TinyGpt(dtype=torch.bfloat16), IDS, tmp_path))
    assert read_reference(file).is_half
    assert load_file(file)["logits"].dtype == torch.float32


def test_columns_of_tensor_parallel_ranks_are_gathered(tmp_path, monkeypatch):
    parallel(monkeypatch, tp=2)
    model = TinyGpt()
    found = read_reference(written(record_reference(model, IDS, tmp_path)))
    assert found.logits.shape == (2, 6, 40)
    assert torch.equal(found.logits[..., :20] + 1, found.logits[..., 20:])
    model.parallel_output = False  # type: ignore[assignment] # Megatron has gathered them itself
    found = read_reference(written(record_reference(model, IDS, tmp_path)))
    assert found.logits.shape == (2, 6, 20)


@pytest.mark.parametrize("rank", [{"tp_rank": 1, "tp": 2}, {"data_rank": 1}])
def test_one_rank_writes(tmp_path, monkeypatch, rank):
    parallel(monkeypatch, **rank)
    assert record_reference(TinyGpt(), IDS, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spread", [{"pp": 2}, {"cp": 2}])
def test_a_model_in_stages_needs_a_forward_of_its_own(tmp_path, monkeypatch, spread):
    parallel(monkeypatch, **spread)
    with pytest.raises(ValidationError, match="forward="):
        record_reference(TinyGpt(), IDS, tmp_path)
    assert record_reference(NO_MODEL, IDS, tmp_path, forward=lambda _model, _ids: None) is None
    file = written(
        record_reference(NO_MODEL, IDS, tmp_path, forward=lambda _model, _ids: LOGITS, iteration=7)
    )
    assert torch.equal(read_reference(file).logits, LOGITS)
    assert metadata(file)["iteration"] == "7"


def test_what_proves_nothing_is_not_recorded(tmp_path):
    with pytest.raises(ValidationError, match="NaN"):
        record_reference(NO_MODEL, IDS, tmp_path, forward=lambda *_: LOGITS * torch.nan)
    with pytest.raises(ValidationError, match="do not fit"):
        record_reference(NO_MODEL, IDS, tmp_path, forward=lambda *_: LOGITS[:, :3])
    with pytest.raises(ValidationError, match="not a Megatron GPTModel"):
        record_reference(torch.nn.Identity(), IDS, tmp_path, hidden_states=True)
    assert not (tmp_path / REFERENCE_NAME).exists()


def located(directory, iteration=10):
    directory.mkdir(parents=True, exist_ok=True)
    return Located(directory, "torch", iteration)


def test_it_is_found_inside_the_iteration_before_the_one_above(tmp_path):
    at = located(tmp_path / "iter_0000010")
    assert find_recorded(at, None) is None
    above = write_reference(tmp_path, Reference(IDS, LOGITS, iteration="10"))
    assert find_recorded(at, None) == above
    inside = write_reference(at.directory, Reference(IDS, LOGITS))
    assert find_recorded(at, None) == inside


@pytest.mark.parametrize("iteration", [None, "11"])
def test_one_above_that_names_no_or_another_iteration_is_not_taken(tmp_path, iteration):
    write_reference(tmp_path, Reference(IDS, LOGITS, iteration=iteration))
    assert find_recorded(located(tmp_path / "iter_0000010"), None) is None


def test_one_of_another_iteration_is_refused(tmp_path):
    file = write_reference(tmp_path, Reference(IDS, LOGITS, iteration="11"))
    with pytest.raises(ValidationError, match="another iteration"):
        read_recorded(file, located(tmp_path))


def test_two_separate_files_are_read(tmp_path):
    """fp32 logits are taken before those of the training's own precision."""
    save_file({"input_ids": IDS.int()}, tmp_path / "inputs.safetensors")
    tensors = {"logits": LOGITS.bfloat16(), "logits_fp32": LOGITS}
    save_file(tensors, tmp_path / "logits.safetensors")
    file = find_recorded(located(tmp_path / "x"), tmp_path)
    assert file == tmp_path / "logits.safetensors"
    found = read_reference(written(file))
    assert torch.equal(found.logits, LOGITS)
    assert found.input_ids.dtype == torch.int64
    assert not found.is_half


def test_half_precision_is_told_by_the_stored_type(tmp_path):
    save_file({"input_ids": IDS, "logits": LOGITS.bfloat16()}, tmp_path / REFERENCE_NAME)
    found = read_recorded(tmp_path / REFERENCE_NAME, located(tmp_path))
    assert found.dtype == "bfloat16"
    assert "bfloat16" in found.notes[0]


def test_half_precision_is_told_by_rounded_values(tmp_path):
    """Megatron's wrapper casts to float32 what it computed in half precision."""
    file = tmp_path / "logits.safetensors"
    for dtype in (torch.bfloat16, torch.float16):
        save_file({"input_ids": IDS, "logits": LOGITS.to(dtype).float()}, file)
        assert read_reference(file).dtype == str(dtype).removeprefix("torch.")
    save_file({"input_ids": IDS, "logits": LOGITS}, file)
    assert read_reference(file).dtype is None


def test_what_was_named_must_be_there(tmp_path):
    at = located(tmp_path)
    for given in (tmp_path, tmp_path / "absent.safetensors"):
        with pytest.raises(ValidationError, match="no "):
            find_recorded(at, given)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"logits": LOGITS}, "lacks input_ids"),
        ({"input_ids": IDS}, "lacks logits"),
        ({"input_ids": IDS, "logits": LOGITS[:, :5].contiguous()}, "do not fit"),
        ({"input_ids": IDS.float(), "logits": LOGITS}, "do not fit"),
        ({"input_ids": IDS, "logits": LOGITS.long()}, "do not fit"),
        ({"input_ids": IDS[0].contiguous(), "logits": LOGITS[0].contiguous()}, "do not fit"),
    ],
)
def test_a_file_of_other_content_is_refused(tmp_path, tensors, message):
    save_file(tensors, tmp_path / REFERENCE_NAME)
    with pytest.raises(ValidationError, match=message):
        read_reference(tmp_path / REFERENCE_NAME)


def test_a_damaged_file_is_refused(tmp_path):
    file = write_reference(tmp_path, Reference(IDS, LOGITS))
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValidationError, match="cannot read"):
        read_reference(file)
