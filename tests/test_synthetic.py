"""The checkpoints of the benchmark: of the size asked for, and each converts to what they say."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from converted import assert_equal, read_tensors
from safetensors.torch import load_file
from synthetic import (
    CASES,
    Numbers,
    expected,
    model_of,
    weight_files,
    weights,
    write_checkpoint,
)

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint

SIZE = 20_000_000
NAIVE = Path(__file__).resolve().parent.parent / "benchmarks" / "bench_naive.py"


@pytest.fixture(params=CASES)
def case(request):
    """Each kind of checkpoint."""
    return CASES[request.param]


def truth(case, model):
    return {name: value.contiguous() for name, value in expected(case, model)}


def test_a_synthetic_checkpoint_converts_to_exactly_what_its_generator_says(tmp_path, case):
    """Every tensor, bit for bit; slow code that knows nothing of ckpt puts the parts together."""
    model = write_checkpoint(tmp_path / "run", case, SIZE)
    options = ConvertOptions(dtype="bf16" if case.fp32 else "keep")
    convert_checkpoint(tmp_path / "run", tmp_path / "hf", options)
    assert_equal(read_tensors(tmp_path / "hf"), truth(case, model))


@pytest.mark.slow
def test_loading_everything_with_torch_gives_the_same_tensors(tmp_path, case):
    """torch's own readers open what was written part by part."""
    model = write_checkpoint(tmp_path / "run", case, SIZE)
    command = [sys.executable, NAIVE, tmp_path / "run", tmp_path / "hf"]
    subprocess.run([*command, *(["--bf16"] if case.fp32 else [])], check=True)
    assert_equal(load_file(tmp_path / "hf" / "model.safetensors"), truth(case, model))


def test_optimizer_states_of_12_bytes_a_parameter_lie_beside_and_take_no_room(tmp_path, case):
    """They are holes in files of their own; the files of the weights have no holes."""
    model = write_checkpoint(tmp_path, case, SIZE)
    chosen = weight_files(tmp_path)
    others = [f for f in tmp_path.rglob("*") if f.is_file() and f not in chosen]
    parameters = sum(math.prod(weight.item.shape) for weight in weights(model))
    assert sum(f.stat().st_size for f in others) >= 12 * parameters
    assert sum(f.stat().st_blocks * 512 for f in others) < SIZE / 8
    sizes = [(f.stat().st_size, f.stat().st_blocks * 512) for f in chosen]
    assert all(used >= size for size, used in sizes)
    assert sum(size for size, _ in sizes) >= case.itemsize * parameters


@pytest.mark.parametrize("size", [20_000_000, 500_000_000, 2_000_000_000, 8_000_000_000])
def test_the_weights_have_about_the_size_that_was_asked_for(case, size):
    """Within a seventh, for layers are whole and their number is even."""
    items = [weight.item for weight in weights(model_of(case, size))]
    found = case.itemsize * sum(math.prod(item.shape) for item in items)
    assert size * 6 / 7 < found < size * 8 / 7


def test_no_two_parts_of_a_model_hold_the_same_bytes():
    """So a part that is written in another one's place changes the output."""
    model, numbers = model_of(CASES["moe-torch"], SIZE), Numbers()
    found = []
    for weight in weights(model):
        whole = numbers.whole(weight, CASES["moe-torch"].ranks)
        found += [row.view(torch.uint8).numpy().tobytes()[:64] for row in whole.chunk(8)]
        assert whole.isfinite().all()
    assert len(set(found)) == len(found)
