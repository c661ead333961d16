"""What the tests of faults share: a checkpoint, its undisturbed conversion, runs that are hurt."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from builders import Model, write_legacy, write_tokenizer

from ckpt.convert.staging import stage_path

if TYPE_CHECKING:
    from collections.abc import Iterable

REPOSITORY = Path(__file__).parent.parent
MODEL = Model(hidden=240, ffn=352, heads=12, groups=6, head_dim=20, vocab=1031, layers=2)
OPTIONS = ("--max-shard-size", "600kB", "--quiet")
SMALLEST = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
MANIFEST = "ckpt-manifest.json"


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit code or minus a signal, its seconds, and what it said."""

    code: int
    seconds: float
    said: str
    events: tuple[str, ...] = ()


class Forks(AbstractContextManager["Forks"]):
    """Runs of the command line in children of one warm process (``forking.py``)."""

    def __init__(self, place: Path) -> None:
        """Start it; its children's output goes to files in ``place``."""
        self._place = place
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o777)
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forking.py")), json.dumps(SMALLEST)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self._answer()

    def __exit__(self, *_: object) -> None:
        """End it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        self._process.wait(60)

    def run(self, source: Path, out: Path, *options: object, **order: Any) -> Outcome:
        """``ckpt convert``; ``order`` is for forking.py: at and do, or delay and signal."""
        arguments = ["convert", source, out, *(options or OPTIONS)]
        text, events = self._place / "stderr", self._place / "events"
        events.unlink(missing_ok=True)
        text.unlink(missing_ok=True)
        order = {
            "arguments": [str(argument) for argument in arguments],
            "places": [str(source), str(out), str(out.with_name(f".{out.name}."))],
            "stdout": str(self._place / "stdout"), "stderr": str(text), "events": str(events),
            **order,
        }  # fmt: skip
        answer = self._answer(json.dumps(order))
        seen = json.loads(events.read_text()) if events.exists() else []
        said = text.read_text() if text.exists() else ""
        return Outcome(answer["code"], answer["seconds"], said, tuple(seen))

    def _answer(self, order: str | None = None) -> dict[str, Any]:
        commands, answers = self._process.stdin, self._process.stdout
        assert commands
        assert answers
        if order is not None:
            commands.write(f"{order}\n")
            commands.flush()
        line = answers.readline()
        assert line, "the process that forks is gone"
        found: dict[str, Any] = json.loads(line)
        return found


@dataclass(frozen=True)
class Undisturbed:
    """A checkpoint, and what its conversion gives: all files, seconds, and what it touches."""

    source: Path
    options: tuple[object, ...]
    contents: dict[str, object]
    seconds: float
    events: tuple[str, ...]


def convert_undisturbed(forks: Forks, place: Path) -> Undisturbed:
    """Make the checkpoint in ``place`` and convert it twice: the second run is the warmer one."""
    source, out = make_source(place), place / "undisturbed"
    options = (*OPTIONS, "--tokenizer", place / "tokenizer")
    for _ in range(2):
        shutil.rmtree(out, ignore_errors=True)
        done = forks.run(source, out, *options)
        assert done.code == 0, done.said
    return Undisturbed(source, options, contents(out), done.seconds, done.events)


def slow_but(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Parameters of a test: those that are not ``chosen`` run with the slow tests."""
    slow = pytest.mark.slow
    return [value if value in chosen else pytest.param(value, marks=slow) for value in values]


def make_source(place: Path) -> Path:
    """A run of four ranks, and beside it a tokenizer."""
    write_tokenizer(place / "tokenizer", 1031)
    return write_legacy(place / "run", MODEL, tp=2, pp=2)


def contents(place: Path) -> dict[str, object]:
    """Every file of an output; of the manifest all but what tells of time."""
    files = {
        str(file.relative_to(place)): file.read_bytes()
        for file in sorted(place.rglob("*"))
        if not file.is_dir()
    }
    manifest = json.loads(files[MANIFEST])
    for section in manifest["stages"].values():
        del section["finished"], section["seconds"]
    return {**files, MANIFEST: manifest}


def check_left(out: Path, undisturbed: dict[str, object]) -> None:
    """After any fault: the output is absent or whole, each weight file in the stage is whole.

    config.json, without which nothing loads, is there only when all other files are.
    """
    if out.exists():
        assert contents(out) == undisturbed
    stage = stage_path(out)
    if not stage.exists():
        return
    for file in stage.glob("*.safetensors"):
        assert file.read_bytes() == undisturbed[file.name], f"half a {file.name}"
    if (stage / "config.json").exists():
        for name, content in undisturbed.items():
            assert name == MANIFEST or (stage / name).read_bytes() == content, name


def assert_refused(outcome: Outcome, *words: str) -> None:
    """Exit code 1 and one line that holds the words."""
    assert outcome.code == 1, outcome.said
    lines = outcome.said.strip().splitlines()
    assert len(lines) == 1, outcome.said
    assert lines[0].startswith("error: "), outcome.said
    for word in words:
        assert word in lines[0], outcome.said
