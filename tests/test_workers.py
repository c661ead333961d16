"""Several processes write: the same bytes, one clear error, and no process that is left over."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import crew_jobs
import pytest
from builders import Model, hf_tensors, write_legacy, write_torch_dist
from converted import assert_equal, read_tensors

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint, crew, plan_conversion
from ckpt.convert.crew import Here, carry_through, choose_workers
from ckpt.convert.processes import Processes
from ckpt.convert.run import units_of
from ckpt.convert.staging import stage_path
from ckpt.errors import OutputError, SourceError
from ckpt.manifest import read_stage
from ckpt.progress import Silent

REPOSITORY = Path(__file__).parent.parent


def crew_of(workers, advance):
    return Here(advance) if workers == 1 else Processes(workers, advance)


def is_alive(pid):
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pids_in(place):
    return [int(file.stem) for file in place.glob("*.pid")]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_job_is_done_once_and_every_byte_is_told(workers):
    told = []
    jobs = [crew_jobs.double(number) for number in range(1, 8)]
    done = {job.name: done for job, done in carry_through(jobs, crew_of(workers, told.append))}
    assert {name: each.result[0] for name, each in done.items()} == {
        f"double {number}": 2 * number for number in range(1, 8)
    }
    assert sum(told) == sum(range(1, 8))
    processes = {each.result[1] for each in done.values()}
    assert (processes == {os.getpid()}) == (workers == 1)
    assert not any(is_alive(pid) for pid in processes - {os.getpid()})


def test_a_worker_imports_what_writing_needs_and_not_the_program():
    ((_, done),) = carry_through([crew_jobs.modules()], Processes(2, print))
    loaded = {name.split(".")[0] for name in done.result}
    assert not loaded & {"torch", "transformers", "click", "pydantic", "rich", "pytest"}
    assert "ckpt.cli" not in done.result
    assert "ckpt.convert.crew" in done.result


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_failure_ends_all_others_and_keeps_its_facts(tmp_path, workers):
    jobs = [crew_jobs.sleep(tmp_path, number=1)]
    jobs = [*(jobs if workers > 1 else []), crew_jobs.fail("broken"), crew_jobs.sleep(tmp_path)]
    started = time.monotonic()
    with pytest.raises(SourceError) as caught:
        list(carry_through(jobs, crew_of(workers, lambda _: None)))
    assert time.monotonic() - started < 30
    assert str(caught.value) == "a.pt: w: broken (expected 1, found (2, 3)). Mend it"
    assert not any(is_alive(pid) for pid in pids_in(tmp_path))


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)]
)
def test_a_worker_that_is_killed_is_an_error_with_the_name_of_its_work(tmp_path, number):
    """As the system does where memory runs out; the same jobs can then be done again."""
    jobs = [crew_jobs.sleep(tmp_path, number=1), crew_jobs.die_once(tmp_path, number, "file 7")]
    with pytest.raises(OutputError) as caught:
        list(carry_through(jobs, Processes(2, lambda _: None)))
    assert f"was killed by signal {int(number)} while it was at file 7" in str(caught.value)
    assert "give fewer --workers" in str(caught.value)
    assert not any(is_alive(pid) for pid in pids_in(tmp_path))
    ((_, done),) = carry_through(jobs[1:], Processes(2, lambda _: None))
    assert done.result == "done"


SLEEPERS = """
import sys
from crew_jobs import sleep
from ckpt.convert.crew import carry_through
from ckpt.convert.processes import Processes
if __name__ != "__main__":
    raise SystemExit("the main module was imported again")
list(carry_through([sleep(sys.argv[1], number=n) for n in range(3)], Processes(3, print)))
"""


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_no_worker_outlives_its_parent_however_that_ends(tmp_path, number):
    """A script without a guard around its main part works as well."""
    (tmp_path / "main.py").write_text(SLEEPERS)
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: len(pids_in(tmp_path)) == 3)
    pids = pids_in(tmp_path)
    assert all(map(is_alive, pids))
    if number is signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    process.wait(30)
    wait_for(lambda: not any(map(is_alive, pids)), seconds=5)
    said = process.communicate()[1]
    assert said.count("Traceback") == (number is signal.SIGINT), said


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_legacy(tmp_path_factory.mktemp("source") / "run", Model(), tp=2, pp=3)


@pytest.mark.parametrize(
    "writer", [write_legacy, pytest.param(write_torch_dist, marks=pytest.mark.slow)]
)
def test_the_bytes_are_the_same_for_1_2_and_7_workers(tmp_path, writer):
    """So is the report, but for seconds, and nothing else is left."""
    source, reports = writer(tmp_path / "run", Model(), tp=2), []
    for workers in (1, 2, 7):
        out = tmp_path / f"out{workers}"
        options = ConvertOptions(max_shard_size="15kB", workers=workers)
        convert_checkpoint(source, out, options)
        assert_equal(read_tensors(out), hf_tensors(Model()))
        section = dict(read_stage(out, "convert"))
        assert section.pop("options")["workers"] == str(workers)
        reports.append({key: section[key] for key in section if key not in {"seconds", "finished"}})
    assert reports[0] == reports[1] == reports[2]
    assert len(reports[0]["outputs"]) > 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out1", "out2", "out7", "run"]


class Heard(Silent):
    def __init__(self):
        self.total = self.begun = self.bytes = 0
        self.events = []

    def start(self, label, total=None, unit="B", *, done=0):
        self.total, self.begun, self.bytes = total, done, done

    def advance(self, amount):
        self.bytes += amount

    def event(self, name, facts):
        self.events.append({"event": name, **facts})


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_counts_all_bytes_and_tells_of_each_file(tmp_path, source, workers):
    heard = Heard()
    options = ConvertOptions(max_shard_size="60kB", workers=workers)
    convert_checkpoint(source, tmp_path / "out", options, progress=heard)
    assert heard.bytes == heard.total == sum(t.nbytes for t in hf_tensors(Model()).values())
    outputs = {item["name"]: item for item in read_stage(tmp_path / "out", "convert")["outputs"]}
    assert [each["number"] for each in heard.events] == list(range(1, len(heard.events) + 1))
    assert {each["of"] for each in heard.events} == {len(heard.events)}
    for each in heard.events:
        assert each["event"] == "shard"
        assert {key: each[key] for key in ("name", "size", "sha256")} == outputs[each["name"]]
        assert each["seconds"] > 0
        assert not each["resumed"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_is_lost_midway_is_one_error_and_leaves_no_half_file(
    tmp_path, source, monkeypatch, workers
):
    """The rerun keeps what was finished."""
    options = ConvertOptions(max_shard_size="15kB", workers=workers)
    units = units_of(plan_conversion(source, options), options)
    last = next(iter(units[-1].stamps))
    moved = Path(f"{last}.away")

    class Loses(Heard):
        def event(self, name, facts):
            super().event(name, facts)
            if len(self.events) == 2:
                Path(last).rename(moved)

    heard, out = Loses(), tmp_path / "out"
    try:
        with pytest.raises(SourceError, match="No such file"):
            convert_checkpoint(source, out, options, progress=heard)
    finally:
        moved.rename(last)
    stage = stage_path(out)
    assert not list(stage.glob("*.part"))
    files = {path.name for path in stage.glob("*.safetensors")}
    assert files == {f.name.removesuffix(".receipt.json") for f in stage.glob("*.receipt.json")}
    assert len(files) >= 2
    again = Heard()
    convert_checkpoint(source, out, options, progress=again)
    assert {each["name"] for each in again.events if each["resumed"]} == files
    assert again.begun > 0
    assert again.bytes == again.total
    assert_equal(read_tensors(out), hf_tensors(Model()))


SLOW = """
import time
from ckpt.convert import read
original = read.fill_window
def slow(*values, **named):
    time.sleep(0.05)
    return original(*values, **named)
read.fill_window = slow
"""


def start_slow(tmp_path, *arguments):
    """The command, with every process of it slow, in a process group of its own."""
    (tmp_path / "slow").mkdir(exist_ok=True)
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW)
    path = os.pathsep.join([str(tmp_path / "slow"), str(REPOSITORY)])
    return subprocess.Popen(
        [sys.executable, "-m", "ckpt", "convert", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip


def children(pid):
    """The processes below one, at any depth."""
    try:
        own = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(child) for child in own] + [each for child in own for each in children(child)]


@pytest.mark.parametrize(
    ("number", "code", "group"),
    [(signal.SIGINT, 130, True),
     pytest.param(signal.SIGINT, 130, False, marks=pytest.mark.slow),
     pytest.param(signal.SIGTERM, -15, False, marks=pytest.mark.slow),
     pytest.param(signal.SIGKILL, -9, False, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_command_that_is_ended_ends_its_workers_and_the_rerun_goes_on(
    tmp_path, source, number, code, group
):
    out, options = tmp_path / "out", ConvertOptions(max_shard_size="15kB")
    process = start_slow(tmp_path, source, out, "--max-shard-size", "15kB", "--workers", 3)
    wait_for(lambda: len(list(stage_path(out).glob("*.receipt.json"))) > 2, seconds=60)
    below = children(process.pid)
    assert len(below) >= 3
    if group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    assert process.wait(30) == code
    wait_for(lambda: not any(map(is_alive, below)), seconds=5)
    said = process.communicate()[1]
    assert "Traceback" not in said
    if number is signal.SIGINT:
        assert said.splitlines()[-1] == "interrupted"
        assert not list(stage_path(out).glob("*.part"))
    kept = {path.name for path in stage_path(out).glob("*.receipt.json")}
    heard = Heard()
    convert_checkpoint(source, out, options, progress=heard)
    assert sum(each["resumed"] for each in heard.events) == len(kept) > 2
    assert_equal(read_tensors(out), hf_tensors(Model()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "slow"]


def test_a_worker_that_is_killed_is_named_by_its_file_and_the_rerun_goes_on(tmp_path, source):
    out = tmp_path / "out"
    process = start_slow(
        tmp_path, source, out, "--max-shard-size", "60kB", "--workers", 2, "--json"
    )
    wait_for(lambda: list(stage_path(out).glob("*.part")), seconds=60)
    workers = [
        pid for pid in children(process.pid)
        if "multiprocessing.spawn" in Path(f"/proc/{pid}/cmdline").read_text()
    ]  # fmt: skip
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 1
    last = json.loads(output.splitlines()[-1])
    assert last["event"] == "error"
    assert "was killed by signal 9 while it was at model-" in last["message"]
    assert said.splitlines()[-1].startswith("error: a worker process was killed by signal 9")
    assert not list(stage_path(out).glob("*.part"))
    convert_checkpoint(source, out, ConvertOptions(max_shard_size="60kB"))
    assert_equal(read_tensors(out), hf_tensors(Model()))


@pytest.mark.parametrize(
    ("cpus", "files", "gigabytes", "expected"),
    [
        (2, 100, 1000, 1),
        (3, 100, 1000, 1),
        (8, 100, 1000, 4),
        (64, 100, 1000, 8),
        (64, 3, 1000, 3),
        (64, 100, 3.9, 1),
        (64, 100, 8, 2),
        (64, 100, 20, 5),
        (64, 0, 0, 1),
    ],
)
def test_auto_goes_by_cpus_files_and_bytes(monkeypatch, cpus, files, gigabytes, expected):
    monkeypatch.setattr(crew, "usable_cpus", lambda: cpus)
    assert choose_workers(None, files, int(gigabytes * 10**9)) == expected
    assert choose_workers(5, files, 0) == max(1, min(5, files))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", 16), ("400000 100000", 4), ("50000 100000", 1), ("9900000 100000", 16),
     ("", 16), ("1 2 3", 16), (None, 16)],
)  # fmt: skip
def test_a_container_has_no_more_cpus_than_its_limit(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr(crew.os, "sched_getaffinity", lambda _: set(range(16)))
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert crew.usable_cpus(tmp_path / "cpu.max") == expected


def test_a_unit_is_small_to_send_and_the_same_when_it_arrives(source):
    options = ConvertOptions(max_shard_size="60kB")
    for unit in units_of(plan_conversion(source, options), options):
        arrived = pickle.loads(pickle.dumps(unit))
        assert arrived == unit
        assert arrived.digest() == unit.digest()
