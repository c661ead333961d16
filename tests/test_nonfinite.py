"""NaN and infinite weights stop a conversion by name, or pass where the user says so."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from builders import Model, hf_tensors, write_legacy
from click.testing import CliRunner
from safetensors.torch import load_file

from ckpt.cli import main
from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.convert.nonfinite import NonfiniteCount, find_nonfinite
from ckpt.errors import SourceError
from ckpt.manifest import read_stage
from ckpt.tensors import DType

NAME = "model.layers.1.mlp.down_proj.weight"
FLOATS = [dtype for dtype in DType if dtype.is_float]
ALL_BITS = {1: torch.uint8, 2: torch.uint16}


def bytes_of(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.uint8).numpy().reshape(-1)


def spoilt(*values, rank=1, dtype=torch.bfloat16, root, **options):
    """A run in which one rank's down projection holds these values."""

    def change(state, tp, _pp):
        if tp == rank:
            weight = state["model"]["decoder.layers.1.mlp.linear_fc2.weight"]
            for number, value in enumerate(values):
                weight[number + 2, number + 1] = value

    return write_legacy(root, Model(dtype=dtype), tp=2, edit=change, **options)


@pytest.mark.parametrize("dtype", [item for item in FLOATS if item.itemsize <= 2], ids=str)
def test_every_bit_pattern_is_told_as_torch_tells_it(dtype):
    """All of an 8 or 16 bit type, one at a time and together."""
    bits = torch.arange(2 ** (8 * dtype.itemsize)).to(ALL_BITS[dtype.itemsize])
    values = bits.view(getattr(torch, dtype.torch_name))
    expected = (~torch.isfinite(values.float())).nonzero().flatten()
    assert find_nonfinite(bytes_of(values), dtype).tolist() == expected.tolist()
    bad = set(expected.tolist())
    for number in [*expected[::7].tolist(), *range(0, len(bits), max(1, len(bits) // 200))]:
        found = find_nonfinite(bytes_of(values[number : number + 1]), dtype)
        assert len(found) == (number in bad)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64], ids=str)
def test_random_bits_of_wide_types_are_told_as_numpy_tells_them(dtype):
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, 8 * 20000, np.uint8)
    values = raw.view(dtype.torch_name).copy()
    values[::5] = np.resize([np.nan, np.inf, -np.inf, -np.nan], len(values[::5]))
    expected = np.flatnonzero(~np.isfinite(values))
    assert find_nonfinite(values.view(np.uint8), dtype).tolist() == expected.tolist()
    largest = np.array([np.finfo(values.dtype).max, np.finfo(values.dtype).min])
    assert find_nonfinite(largest.view(np.uint8), dtype).size == 0


@pytest.mark.parametrize("dtype", [item for item in DType if not item.is_float], ids=str)
def test_integers_are_always_numbers(dtype):
    assert find_nonfinite(np.full(16, 255, np.uint8), dtype).size == 0


def test_places_go_on_from_window_to_window():
    """The first one is remembered by its byte of the whole tensor, and by rank."""
    values = torch.zeros(40, dtype=torch.float16)
    values[[23, 31]] = math.nan
    count = NonfiniteCount(DType.F16)
    for part in values.split(10):
        count.add(bytes_of(part))
    assert (count.count, count.first) == (2, (0, 46))
    ranks = NonfiniteCount(DType.F16)
    ranks.add(bytes_of(values).reshape(4, 20))
    assert (ranks.count, ranks.first) == (2, (2, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a27_weights_that_are_no_numbers_stop_with_tensor_count_and_file(tmp_path, value, dtype):
    source = spoilt(value, 0.5, value, root=tmp_path / "run", dtype=dtype)
    with pytest.raises(SourceError) as raised:
        convert_checkpoint(source, tmp_path / "out", ConvertOptions())
    assert raised.value.tensor == NAME
    assert raised.value.found == "2 that are NaN or infinite"
    assert raised.value.file.endswith("mp_rank_01/model_optim_rng.pt")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*/*.safetensors*"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("window", [8, 56, 2**24])
def test_a27_the_file_is_that_of_the_rank_whatever_the_window(tmp_path, monkeypatch, window, rank):
    """A tensor that passes in many windows is counted in all of them."""
    monkeypatch.setattr("ckpt.convert.read.WINDOW_BYTES", window)
    source = spoilt(math.nan, math.inf, -math.inf, rank=rank, root=tmp_path / "run")
    with pytest.raises(SourceError) as raised:
        convert_checkpoint(source, tmp_path / "out", ConvertOptions())
    assert raised.value.file.endswith(f"mp_rank_{rank:02d}/model_optim_rng.pt")
    assert raised.value.found.startswith("3 ")


def test_a27_a_cast_does_not_hide_them(tmp_path):
    source = spoilt(math.inf, root=tmp_path / "run")
    with pytest.raises(SourceError, match="weights that are no numbers"):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(dtype="fp32"))


def test_a27_the_user_may_let_them_pass_and_the_manifest_says_so(tmp_path):
    """The bytes are those of the checkpoint."""
    source, out = spoilt(math.nan, math.inf, root=tmp_path / "run"), tmp_path / "out"
    arguments = ["convert", str(source), str(out), "--quiet", "--allow-nonfinite"]
    done = CliRunner().invoke(main, [*arguments, "--max-shard-size", "10kB"])
    assert done.exit_code == 0, done.output
    assert f"warning: 2 values of {NAME} are NaN or infinite, as stored" in done.stdout
    section = read_stage(out, "convert")
    assert section["nonfinite"] == {NAME: 2}
    assert section["options"]["allow_nonfinite"] == "True"
    found = {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}
    truth = hf_tensors(Model(dtype=torch.bfloat16))
    truth[NAME][2, 18 + 1], truth[NAME][3, 18 + 2] = math.nan, math.inf
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        assert torch.equal(found[name].view(torch.int16), value.view(torch.int16)), name


def test_a27_padding_that_is_left_out_may_hold_anything(tmp_path):
    def spoil(state, tp, _pp):
        if tp == 1:
            state["model"]["embedding.word_embeddings.weight"][-1] = math.nan

    source = write_legacy(tmp_path / "run", Model(), tp=2, edit=spoil)
    convert_checkpoint(source, tmp_path / "out", ConvertOptions())
    assert read_stage(tmp_path / "out", "convert")["nonfinite"] == {}
