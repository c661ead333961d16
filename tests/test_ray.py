"""Conversions on a real Ray cluster of two nodes, and on one that a run starts for itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray_jobs
import torch
from builders import Model, hf_tensors, write_legacy
from converted import assert_equal, read_tensors
from crew_jobs import double, sleep

from ckpt.config import ConvertOptions
from ckpt.convert import carry, convert_checkpoint
from ckpt.convert.crew import Job, carry_through
from ckpt.convert.staging import stage_path
from ckpt.errors import OutputError, SourceError
from ckpt.manifest import read_stage
from ckpt.progress import Silent

pytestmark = [
    pytest.mark.ray,
    # Ray leaves sockets and files to the garbage collector.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
REPOSITORY = Path(__file__).parent.parent
PYTHONPATH = os.pathsep.join(
    [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
)
OPTIONS = ConvertOptions(max_shard_size=15_000, executor="ray")


@pytest.fixture(scope="module")
def ray_place():
    """Where Ray keeps its sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="ckpt-ray-", ignore_cleanup_errors=True) as place:
        yield place


@pytest.fixture(scope="module")
def two_nodes(ray_place):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", ray_place)
        # Workers find ckpt and these tests as this process does.
        patch.setenv("PYTHONPATH", PYTHONPATH)
        with ray_jobs.cluster(2) as address:
            yield address


@pytest.fixture
def source(tmp_path):
    return write_legacy(tmp_path / "run", Model(), tp=2)


class Heard(Silent):
    def __init__(self):
        self.events, self.bytes = [], 0

    def advance(self, amount):
        self.bytes += amount

    def event(self, name, facts):
        self.events.append(facts)


def test_units_run_on_both_nodes_and_give_the_same_bytes(tmp_path, source, two_nodes, monkeypatch):
    """Each takes a moment: else the node that starts first has done them all."""
    monkeypatch.setattr(carry, "write_unit", ray_jobs.write_slowly)
    heard = Heard()
    convert_checkpoint(source, tmp_path / "out", OPTIONS, progress=heard)
    nodes = [each["node"] for each in heard.events]
    assert len(set(nodes)) == 2
    assert len(nodes) > 10
    assert heard.bytes >= sum(value.nbytes for value in hf_tensors(Model()).values())
    assert_equal(read_tensors(tmp_path / "out"), hf_tensors(Model()))
    monkeypatch.undo()
    convert_checkpoint(source, tmp_path / "here", ConvertOptions(max_shard_size="15kB"))
    outputs = [read_stage(tmp_path / name, "convert")["outputs"] for name in ("out", "here")]
    assert outputs[0] == outputs[1]


def test_a_killed_worker_is_tried_again_and_leaves_nothing(
    tmp_path, source, two_nodes, monkeypatch
):
    """Its half file is under another name, and is gone in the end."""
    monkeypatch.setattr(carry, "write_unit", ray_jobs.write_or_die)
    out = tmp_path / "out"
    convert_checkpoint(source, out, OPTIONS)
    marker = Path(tempfile.gettempdir()) / f"{read_stage(out, 'convert')['fingerprint']}.died"
    assert marker.exists()
    marker.unlink()
    assert_equal(read_tensors(out), hf_tensors(Model()))
    names = {item["name"] for item in read_stage(out, "convert")["outputs"]}
    assert {path.name for path in out.iterdir()} == names | {"ckpt-manifest.json"}


def test_a_worker_that_dies_at_every_try_is_an_error_and_the_rerun_goes_on(
    tmp_path, source, two_nodes, monkeypatch
):
    monkeypatch.setattr(carry, "write_unit", ray_jobs.write_or_always_die)
    out = tmp_path / "out"
    with pytest.raises(OutputError) as caught:
        convert_checkpoint(source, out, OPTIONS)
    assert "Ray could not do model-00003-of-" in str(caught.value)
    assert "After 3 more tries" in str(caught.value)
    assert not list(stage_path(out).glob("*.part"))
    monkeypatch.undo()
    convert_checkpoint(source, out, OPTIONS)
    assert_equal(read_tensors(out), hf_tensors(Model()))


def test_an_error_in_a_task_is_the_same_as_without_ray(tmp_path, two_nodes):
    def spoil(state, _tp_rank, _pp_rank):
        state["model"]["decoder.final_layernorm.weight"][7] = torch.nan

    source, told = write_legacy(tmp_path / "run", Model(), edit=spoil), []
    for options in (OPTIONS, ConvertOptions(max_shard_size="15kB")):
        with pytest.raises(SourceError) as caught:
            convert_checkpoint(source, tmp_path / "out", options)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "model.norm.weight: weights that are no numbers" in told[0]


def test_a_node_without_the_path_is_named(tmp_path, two_nodes):
    """As where the checkpoint lies on one node's own disk."""
    from ckpt.convert.on_ray import OnRay

    lost = Job("double 3", 3, double(3).work, (str(tmp_path / "elsewhere" / "a.pt"),))
    with pytest.raises(OutputError) as caught:
        list(carry_through([lost], OnRay(lambda _: None, None)))
    assert f"{tmp_path}/elsewhere/a.pt: node " in str(caught.value)
    assert "does not see this path" in str(caught.value)
    assert "a file system that all nodes share" in str(caught.value)


def test_the_first_failure_cancels_what_runs(tmp_path, two_nodes):
    from ckpt.convert.on_ray import OnRay

    lost = Job("double 3", 3, double(3).work, (str(tmp_path / "elsewhere"),))
    with pytest.raises(OutputError, match="does not see"):
        list(carry_through([sleep(tmp_path), lost], OnRay(lambda _: None, None)))
    assert [each.result[0] for _, each in carry_through(
        [double(1), double(2)], OnRay(lambda _: None, None)
    )] in ([2, 4], [4, 2])  # fmt: skip


def test_without_a_cluster_one_of_this_machine_is_started_and_ended(tmp_path, source, scratch):
    """The command line needs nothing more than the extra."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {"PYTHONPATH": PYTHONPATH, "RAY_TMPDIR": str(scratch)}
    done = subprocess.run(
        [sys.executable, "-m", "ckpt", "convert", str(source), str(tmp_path / "out"), "--executor",
         "ray", "--max-shard-size", "60kB", "--json"],
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *shards, last = map(json.loads, done.stdout.splitlines())
    assert last["event"] == "converted"
    assert all(shard["node"] for shard in shards)
    assert_equal(read_tensors(tmp_path / "out"), hf_tensors(Model()))
    commands = [path.read_text() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [command for command in commands if str(scratch) in command]
