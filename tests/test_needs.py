"""What a conversion needs is said before it begins, and a disk that is too small stops it first."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import Model, write_legacy
from click.testing import CliRunner

from ckpt.cli import main
from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint, needs, plan_conversion, rates
from ckpt.convert.needs import RESERVE_BYTES, needs_of
from ckpt.convert.staging import stage_path
from ckpt.errors import OutputError
from ckpt.progress import Silent
from ckpt.rectangles import Copy

if TYPE_CHECKING:
    from pathlib import Path

MODEL = Model()
SMALL_FILES = ConvertOptions(max_shard_size=40_000)


@pytest.fixture
def source(tmp_path):
    return write_legacy(tmp_path / "run", MODEL, tp=2)


class Notes(Silent):
    """Remembers what is said, and fails where a thing must not begin."""

    def __init__(self, *, forbidden=""):
        self.notes, self.started, self.forbidden = [], [], forbidden

    def note(self, text):
        self.notes.append(text)

    def start(self, label, total=None, unit="B", **_):
        assert label != self.forbidden
        self.started.append(label)


class StoppedError(Exception):
    """Stands for a kill."""


def with_room(monkeypatch, free):
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def test_the_files_are_those_that_are_written_to_the_byte(tmp_path, source):
    """Names, sizes with headers, numbers of tensors, and the bytes of all."""
    planned = plan_conversion(source, SMALL_FILES)
    found = needs_of(planned, tmp_path / "out", 1)
    convert_checkpoint(source, tmp_path / "out", SMALL_FILES)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert [(s.name, s.nbytes) for s in found.shards] == [(f.name, f.stat().st_size) for f in files]
    assert sum(shard.tensors for shard in found.shards) == len(planned.plan.targets)
    assert found.written_bytes == sum(file.stat().st_size for file in files)
    assert found.read_bytes == planned.plan.nbytes
    norms = 2 * MODEL.layers + 1
    assert found.compared_bytes == 2 * 4 * norms * MODEL.hidden


def test_the_plan_says_the_needs(tmp_path, source):
    """In text and as JSON: bytes, room, memory, time and the list of files."""
    command = ["convert", str(source), str(tmp_path / "a" / "b" / "out"), "--plan"]
    text = CliRunner().invoke(main, command).stdout
    planned = plan_conversion(source, ConvertOptions())
    found = json.loads(CliRunner().invoke(main, [*command, "--json", "--quiet"]).stdout)["needs"]
    assert found["read_bytes"] == planned.plan.nbytes
    assert found["files"] == len(found["shards"]) == 1
    assert found["shards"][0]["name"] == "model.safetensors"
    assert found["disk"]["place"] == str(tmp_path)
    assert found["disk"]["needed_bytes"] == found["written_bytes"] + RESERVE_BYTES
    assert found["disk"]["enough"] is True
    assert found["memory_per_worker_bytes"] < 300e6
    assert 0 < found["estimate"]["at_least_seconds"] < 1
    assert "little to read" in found["estimate"]["text"]
    assert f"free at {tmp_path}\n" in text
    assert text.count("model.safetensors  ") == 1
    assert "to write, 64 MiB to stay free), " in text
    assert text.count("\nmemory: at most ") == 1


def test_a_run_says_its_needs_in_one_line_before_it_writes(tmp_path, source):
    progress = Notes()
    convert_checkpoint(source, tmp_path / "out", ConvertOptions(), progress=progress)
    (line,) = [note for note in progress.notes if note.startswith("needs: ")]
    assert "of disk" in line
    assert "memory for each of 1 worker;" in line


def test_a_disk_that_is_too_small_stops_before_anything_is_compared(
    tmp_path, source, monkeypatch
):  # fmt: skip
    """Before the proof too, with what is needed and what is there, and nothing is left."""
    with_room(monkeypatch, RESERVE_BYTES + 1000)
    monkeypatch.setattr("ckpt.convert.prove_conversion", lambda *_: pytest.fail("it was proved"))
    progress = Notes(forbidden="comparing stored copies")
    with pytest.raises(OutputError, match="not enough room") as raised:
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(), progress=progress)
    assert raised.value.file == str(tmp_path)
    assert raised.value.found == "67.1 MB"
    assert raised.value.expected.endswith("MB free")
    assert list(tmp_path.iterdir()) == [source]


def test_a_plan_of_what_does_not_fit_is_printed_and_says_so(tmp_path, source, monkeypatch):
    with_room(monkeypatch, 1000)
    done = CliRunner().invoke(main, ["convert", str(source), str(tmp_path / "out"), "--plan"])
    assert done.exit_code == 0
    assert ": NOT ENOUGH\n" in done.stdout


def test_finished_files_of_an_interrupted_run_need_no_room(tmp_path, source, monkeypatch):
    """A run that goes on needs what is still to be written; another one what is not freed."""
    out, planned = tmp_path / "out", plan_conversion(source, SMALL_FILES)
    first = needs_of(planned, out, 1)

    class Killed(Notes):
        def advance(self, amount):
            self.done = getattr(self, "done", 0) + amount
            if self.done > planned.plan.nbytes / 2:
                raise StoppedError

    with pytest.raises(StoppedError):
        convert_checkpoint(source, out, SMALL_FILES, progress=Killed())
    kept = sum(file.stat().st_size for file in stage_path(out).glob("*.safetensors"))
    assert kept > 0
    again = needs_of(planned, out, 1)
    assert again.room.needed == first.room.needed - kept
    assert again.room.kept_bytes == kept
    assert again.written_bytes == first.written_bytes - kept
    assert 0 < again.read_bytes < first.read_bytes - kept / 2
    assert again.shards == first.shards
    other = needs_of(plan_conversion(source, ConvertOptions(dtype="fp16")), out, 1).room
    assert (other.kept_bytes, other.freed_bytes) == (0, kept)
    with_room(monkeypatch, again.room.needed)
    convert_checkpoint(source, out, SMALL_FILES)
    assert (out / "config.json").is_file()


def test_a_part_needs_what_its_own_files_need(tmp_path, source):
    planned = plan_conversion(source, SMALL_FILES)
    names = [name for name, _ in planned.files]
    parts = [needs_of(planned, tmp_path / "out", 1, set(own)) for own in (names[:2], names[2:])]
    whole = needs_of(planned, tmp_path / "out", 1)
    assert [len(part.shards) for part in parts] == [2, len(names) - 2]
    for name in ("read_bytes", "written_bytes"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
    assert parts[0].compared_bytes == whole.compared_bytes * 2 // len(names)
    assert parts[0].room.needed == parts[0].written_bytes + RESERVE_BYTES


def test_a_place_whose_room_nobody_knows_is_tried(tmp_path, source, monkeypatch):
    def unknown(_):
        raise OSError(38, "Function not implemented")

    planned = plan_conversion(source, ConvertOptions())
    monkeypatch.setattr(needs.shutil, "disk_usage", unknown)
    room = needs_of(planned, tmp_path / "out", 1).room
    assert room.free is None
    room.check()


def rectangles_of(file: Path, nbytes: int, count: int = 12) -> list[Copy]:
    each = nbytes // count
    return [
        Copy(str(file), n * each, each, 0, each, 1, each - n, 2) for n in range(count)
    ]  # fmt: skip


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file of 3 MiB that counts as large."""
    monkeypatch.setattr(rates, "SMALL_BYTES", 2**20)
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(3 * 2**20))
    return file


def test_the_read_rate_is_that_of_places_spread_over_the_source(large, monkeypatch):
    """A few large reads, and the rate is their bytes by their time."""
    read, clock = [], iter(range(999))
    plain = os.pread

    def pread(fd, count, offset):
        read.append((offset, count))
        return plain(fd, count, offset)

    monkeypatch.setattr(rates.os, "pread", pread)
    monkeypatch.setattr(rates, "LIMIT_SECONDS", 999.0)
    monkeypatch.setattr(rates.time, "monotonic", lambda: next(clock) / 1000)
    found = rates.measure_reads(rectangles_of(large, 3 * 2**20))
    assert found.places == len(read) == 6
    assert max(offset for offset, _ in read) > 2 * 2**20
    assert found.per_second == pytest.approx(sum(count for _, count in read) / (6 * 0.002))


def test_the_measurement_ends_in_time(large, monkeypatch):
    """A disk that hangs is asked once."""
    monkeypatch.setattr(rates, "LIMIT_SECONDS", 0.02)
    plain = os.pread

    def slow(fd, count, offset):
        time.sleep(0.03)
        return plain(fd, count, offset)

    monkeypatch.setattr(rates.os, "pread", slow)
    found = rates.measure_reads(rectangles_of(large, 3 * 2**20))
    assert found.places == 1
    assert 0 < found.per_second < 2**18 / 0.03


def test_holes_are_not_measured(tmp_path, monkeypatch):
    """They would be read as fast as memory, which says nothing of the disk."""
    monkeypatch.setattr(rates, "SMALL_BYTES", 2**20)
    file = tmp_path / "sparse"
    with file.open("wb") as stream:
        stream.truncate(2**30)
    assert "holes" in rates.measure_reads(rectangles_of(file, 2**30)).lacks


def test_other_machines_and_small_sources_are_not_measured(large):
    remote = [copy._replace(file=f"s3://bucket{copy.file}") for copy in rectangles_of(large, 2**22)]
    assert "not on this machine" in rates.measure_reads(remote).lacks
    assert "little" in rates.measure_reads(rectangles_of(large, 2**19)).lacks


def test_an_estimate_says_what_it_rests_on(tmp_path, source):
    """The slower of reading and hashing, since they go on at the same time; then the copies."""
    plain = needs_of(plan_conversion(source, ConvertOptions()), tmp_path / "out", 1)
    changes = {"read_bytes": 10**12, "compared_bytes": 10**11, "written_bytes": 10**12}
    changes |= {"reads": rates.ReadRate(10**9, 8), "hashed_per_second": 2e9}
    found = replace(plain, **changes)
    assert found.least_seconds == 1000 + 100
    assert found.as_dict()["estimate"]["text"] == (
        "at least 18 min: reading at 1.0 GB/s as measured now at 8 places, hashing at 2.0 GB/s a "
        "worker, 1 worker; the output disk is not measured"
    )
    assert replace(found, hashed_per_second=5e8).least_seconds == 2000 + 100
    assert replace(found, hashed_per_second=5e8, workers=4).least_seconds == 1000 + 100


def test_the_hash_rate_takes_milliseconds():
    started = time.process_time()
    assert rates.hash_rate() > 10**6
    assert time.process_time() - started < 1
