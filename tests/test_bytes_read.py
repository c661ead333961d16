"""Optimizer states lie beside the weights, several times their size: they are never read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Item, Model, write_legacy, write_torch_dist
from tiny_megatron import Ranks, TinyModel, write_dcp, write_zarr

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint
from ckpt.inspection import inspect_directory

IO = Path("/proc/self/io")
STATES = 2**22  # elements; 16 MiB, far more than the model
ROOM = 2**17  # for the names of the states, which the index and the pickles do hold


def moments() -> torch.Tensor:
    return torch.arange(STATES, dtype=torch.float32)


def dist(root: Path, *, optimizer: bool) -> Path:
    def edit(items: dict[str, Item], _common: dict[str, Any]) -> None:
        if optimizer:
            for kind in ("exp_avg", "exp_avg_sq", "param"):
                item = Item((STATES,), torch.float32, {(0,): moments()})
                items[f"optimizer.state.{kind}.embedding.word_embeddings.weight"] = item

    return write_torch_dist(root, Model(), tp=2, edit=edit)


def legacy(root: Path, *, optimizer: bool) -> Path:
    """States in the ranks' own files, and in the distributed optimizer's beside them."""

    def edit(state: dict[str, Any], _tp: int, _pp: int) -> None:
        if optimizer:
            state["optimizer"] = {"optimizer": {"state": {0: {"exp_avg": moments()}}}}

    write_legacy(root, Model(), tp=2, edit=edit)
    if optimizer:
        for directory in root.glob("iter_*/mp_rank_*"):
            torch.save({0: moments()}, directory / "distrib_optim.pt")
    return root


def zarr(root: Path, *, optimizer: bool) -> Path:
    write_zarr(root, TinyModel("llama"), Ranks(tp=2))
    if optimizer:
        (iteration,) = root.glob("iter_*")
        array = iteration / "optimizer.state.exp_avg.embedding.word_embeddings.weight"
        array.mkdir()
        header = {"shape": [STATES], "chunks": [STATES], "dtype": "<f4", "order": "C"}
        (array / ".zarray").write_text(json.dumps(header))
        (array / "0").write_bytes(moments().numpy().tobytes())
    return root


def dcp(root: Path, *, optimizer: bool) -> Path:
    def edit(state: dict[str, Any]) -> None:
        state["optimizer"] = {"state": {"exp_avg": moments()}} if optimizer else {}

    return write_dcp(root, TinyModel("llama"), fsdp=True, edit=edit)


def bytes_read() -> int:
    """What this process has read so far, by any call and of any file."""
    return int(dict(line.split(": ") for line in IO.read_text().splitlines())["rchar"])


@pytest.mark.skipif(not IO.is_file(), reason="the system does not count what is read")
@pytest.mark.parametrize("write", [dist, legacy, zarr, dcp])
def test_a15_states_of_the_optimizer_cost_no_reading(tmp_path, write):
    """Their bytes are stored, inspecting and converting read no more than without them."""
    sizes, inspected, converted = [], [], []
    convert_checkpoint(write(tmp_path / "warm", optimizer=True), tmp_path / "w", ConvertOptions())
    for optimizer in (False, True):
        source = write(tmp_path / str(optimizer), optimizer=optimizer)
        sizes.append(sum(file.stat().st_size for file in source.rglob("*") if file.is_file()))
        start = bytes_read()
        inspect_directory(source)
        middle = bytes_read()
        convert_checkpoint(source, tmp_path / f"out-{optimizer}", ConvertOptions())
        inspected.append(middle - start)
        converted.append(bytes_read() - middle)
    assert sizes[1] - sizes[0] >= 4 * STATES
    assert converted[0] > 2**17  # the weights are counted
    assert inspected[1] - inspected[0] < ROOM
    assert converted[1] - converted[0] < ROOM
