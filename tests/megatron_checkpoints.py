"""Checkpoints that megatron-core itself writes on the CPU, with what its model answered.

    made = write_checkpoints(root, [Layout("llama", tp=2, pp=2), Layout("qwen3", te=True)])
    made[0].directory, made[0].input_ids, made[0].logits

A call starts one program that imports Megatron once (about 5 s) and then takes 2 to 10 s for
each checkpoint, so ask for several at a time. Every tensor's values depend on its global key
alone, hence a family has the same weights under every layout (until it is trained).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Layout:
    """One checkpoint to make.

    ``vpp`` counts model chunks a pipeline rank, ``layout`` is Megatron's pipeline layout string,
    ``single`` the key form ``singleton_local_shards``, ``train`` a number of optimizer steps
    (whose state is then saved), ``overrides`` further training arguments. ``old_args`` spells
    arguments as Megatron-LM did before 0.16.
    """

    family: str
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    format: Literal["torch_dist", "torch"] = "torch_dist"
    te: bool = False
    extra: Literal["uint8", "bytesio"] = "uint8"
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    train: int = 0
    dist_opt: bool = False
    optim_sharding: str = "dp_reshardable"
    single: bool = False
    first_layers: int | None = None
    layout: str | None = None
    vocab: int | None = None
    old_args: bool = False
    positions: tuple[int, int] = (2, 128)
    overrides: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Readable and unique; used as the directory's name and as a test id."""
        words = [self.family, self.format, f"tp{self.tp}pp{self.pp}"]
        words += [f"vpp{self.vpp}"] * bool(self.vpp) + [f"ep{self.ep}"] * (self.ep > 1)
        words += [f"etp{self.etp}"] * bool(self.etp) + ["te"] * self.te + [self.dtype]
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return "-".join([*words, hashlib.sha256(text.encode()).hexdigest()[:8]])


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: the directory that holds ``iter_*``, and the answers of its model.

    ``logits`` is what the model answered in its own dtype, ``logits_fp32`` the answer of the same
    weights computed in fp32; both are cut to the real vocabulary. ``padded_logits_fp32`` is not.
    """

    layout: Layout
    directory: Path

    @cached_property
    def _answers(self):
        from safetensors.torch import load_file

        return load_file(self.directory / "answers.safetensors")

    @property
    def vocab_size(self) -> int:
        return int((self.directory / "vocab_size").read_text())

    @property
    def input_ids(self):
        return self._answers["input_ids"]

    @property
    def logits(self):
        return self._answers["logits"][..., : self.vocab_size]

    @property
    def logits_fp32(self):
        return self._answers["logits_fp32"][..., : self.vocab_size]

    @property
    def padded_logits_fp32(self):
        return self._answers["logits_fp32"]

    @property
    def mtp_logits(self):
        return self._answers["mtp_logits"][..., : self.vocab_size]

    @property
    def iteration(self) -> Path:
        """The ``iter_*`` directory."""
        number = int((self.directory / "latest_checkpointed_iteration.txt").read_text())
        return self.directory / f"iter_{number:07d}"


def first_of_each(items, key):
    """Test parameters: the first item of each key as it is, the others marked as slow."""
    import pytest

    seen: set[object] = set()
    marked = []
    for item in items:
        marks = [pytest.mark.slow] if key(item) in seen else []
        seen.add(key(item))
        marked.append(pytest.param(item, marks=marks))
    return marked


def wanted(request, name: str) -> list[Any]:
    """What the chosen tests of this module have as their parameter ``name``, each once."""
    found = []
    for item in request.session.items:
        value = getattr(item, "callspec", None) and item.callspec.params.get(name)
        if item.module is request.module and value is not None and value not in found:
            found.append(value)
    return found


def write_checkpoint(root: Path, family: str, **options) -> Checkpoint:
    """One checkpoint under ``root``; ``options`` are the fields of Layout."""
    return write_checkpoints(root, [Layout(family, **options)])[0]


def write_checkpoints(root: Path, layouts: list[Layout]) -> list[Checkpoint]:
    """The checkpoints of ``layouts`` in directories under ``root``; those there are kept."""
    made = [Checkpoint(layout, root / layout.name) for layout in layouts]
    todo = {item.directory: item.layout for item in made if not _is_finished(item.directory)}
    if todo:
        _run_worker(root, todo)
    return made


def _is_finished(directory: Path) -> bool:
    return (directory / "vocab_size").is_file()  # written last


def _run_worker(root: Path, todo: dict[Path, Layout]) -> None:
    if importlib.util.find_spec("megatron") is None:
        raise ModuleNotFoundError("tests marked megatron need megatron-core and psutil")
    root.mkdir(parents=True, exist_ok=True)
    for directory in todo:
        shutil.rmtree(directory, ignore_errors=True)  # what an interrupted run left
    lists = [{**dataclasses.asdict(layout), "directory": str(p)} for p, layout in todo.items()]
    order, log = root / f"layouts-{os.getpid()}.json", root / f"worker-{os.getpid()}.log"
    order.write_text(json.dumps(lists))
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, str(HERE / "megatron_worker.py"), str(order)],
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            check=False,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
    if done.returncode:
        raise RuntimeError(f"megatron_worker.py failed:\n{log.read_text()[-4000:]}")
