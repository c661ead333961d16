"""Disks that fail in reading and writing, by a file system that fails as it is told to."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from faults import assert_refused, check_left, contents, slow_but
from faulty_disk import faulty

from ckpt.convert.staging import stage_path

WINDOWS = "from ckpt.convert import read; read.WINDOW_BYTES = 2**16"
RANK = r"mp_rank_01_001/model_optim_rng\.pt"
MIDDLE = 700_000  # of a rank file: weights lie before and behind it


def same(whole, out):
    """The same bytes; the manifest has the source's path in it."""
    found = contents(out)
    return all(found[name] == whole.contents[name] for name in whole.contents if "man" not in name)


def stamps(place):
    return {file.name: file.stat().st_mtime_ns for file in place.glob("*.safetensors")}


@pytest.mark.parametrize("number", slow_but([errno.EIO, errno.ESTALE, errno.ETIMEDOUT], errno.EIO))
def test_a_source_that_cannot_be_read_for_a_while_is_gone_on_from(forks, whole, tmp_path, number):
    """The line has the file and the reason; what was finished stays."""
    out = tmp_path / "out"
    fault = {"call": "read", "file": RANK, "beyond": MIDDLE, "errno": number, "times": 3}
    # The first read is that of the archive's end, the second and third are of weights.
    with faulty(whole.source, tmp_path / "run", fault) as source:
        codes = []
        while not out.exists():
            done = forks.run(source, out, *whole.options, first=WINDOWS)
            codes.append(done.code)
            assert len(codes) < 6
            if done.code:
                assert_refused(done, "model_optim_rng.pt", os.strerror(number))
                check_left(out, whole.contents)
        assert 1 < len(codes) <= 4
        assert same(whole, out)


def test_a_source_that_can_never_be_read_is_named_each_time(forks, whole, tmp_path):
    out = tmp_path / "out"
    fault = {"call": "read", "file": RANK, "errno": errno.EIO}
    with faulty(whole.source, tmp_path / "run", fault) as source:
        for _ in range(2):
            done = forks.run(source, out, *whole.options)
            assert_refused(done, "mp_rank_01_001/model_optim_rng.pt", "Input/output error")
    assert not out.exists()


@pytest.mark.parametrize("most", [1000, 4097])
def test_reads_that_give_less_than_was_asked_for_are_gone_on_with(forks, whole, tmp_path, most):
    """As network file systems and signals do."""
    fault = {"call": "read", "file": RANK, "most": most}
    with faulty(whole.source, tmp_path / "run", fault) as source:
        done = forks.run(source, tmp_path / "out", *whole.options)
        assert done.code == 0, done.said
        assert same(whole, tmp_path / "out")


REFUSALS = {  # what fails on the way to the output, and what is said
    "quota": ({"call": "write", "file": "00004.*part", "beyond": 2**18}, errno.EDQUOT, "quota"),
    "quota seen late": ({"call": "close", "file": "00004.*part"}, errno.EDQUOT, "quota"),
    "write": ({"call": "write", "file": "00004.*part"}, errno.EIO, "Input/output error"),
    "flush": ({"call": "fsync", "file": "00004.*part"}, errno.EIO, "Input/output error"),
    "large file": ({"call": "write", "file": "00004.*part"}, errno.EFBIG, "ulimit -f"),
    "read-only": ({"call": "open", "file": "00004.*part"}, errno.EROFS, "Read-only"),
    "rename": ({"call": "rename", "file": "00004-of-00010.safetensors$"}, errno.EIO, "Input"),
    "receipt": ({"call": "write", "file": "00004.*receipt"}, errno.EDQUOT, "quota"),
    "config.json": ({"call": "fsync", "file": r"config\.json"}, errno.EIO, "Input/output"),
    "manifest": ({"call": "write", "file": "manifest"}, errno.EDQUOT, "quota"),
    "directory": ({"call": "fsync", "file": "ckpt-partial$"}, errno.EIO, "Input/output error"),
    "last rename": ({"call": "rename", "file": "/out$"}, errno.EIO, "put the output in place"),
}


@pytest.mark.parametrize("what", slow_but(REFUSALS, "quota", "quota seen late", "last rename"))
def test_a_disk_that_refuses_says_why_and_is_gone_on_from(forks, whole, tmp_path, what):
    """Each once, then the same command ends in the same bytes and keeps what was finished."""
    fault, number, words = REFUSALS[what]
    fault = {**fault, "errno": number, "times": 1}
    (tmp_path / "root").mkdir()
    with faulty(tmp_path / "root", tmp_path / "place", fault) as place:
        out = place / "out"
        done = forks.run(whole.source, out, *whole.options, first=WINDOWS)
        assert_refused(done, words, "the same command")
        assert not out.exists()
        check_left(out, whole.contents)
        assert not list(place.rglob("*.part"))
        before = {
            file.name: file.stat().st_mtime_ns for file in stage_path(out).glob("*.safetensors")
        }
        assert len(before) >= 3
        done = forks.run(whole.source, out, *whole.options)
        assert done.code == 0, done.said
        assert contents(out) == whole.contents
        after = stamps(out)
        changed = {name for name in before if after[name] != before[name]}
        assert changed == ({"model-00004-of-00010.safetensors"} if what == "receipt" else set())
        assert [path.name for path in place.iterdir()] == ["out"]


ODD = {  # file systems that lack something
    "no direct writes": {"call": "open", "file": "part", "errno": 22, "flag": os.O_DIRECT},
    "short writes": {"call": "write", "file": "part", "most": 5000},
    "short blocks": {"call": "write", "file": "part", "most": 8192},
    "no flush of directories": {"call": "fsync", "file": "(ckpt-partial|place)$", "errno": 22},
}


@pytest.mark.parametrize("what", slow_but(ODD, "short writes", "no flush of directories"))
def test_a_file_system_that_lacks_something_gets_the_same_bytes(forks, whole, tmp_path, what):
    """Nor does it exchange names: an older output is replaced by two renames."""
    (tmp_path / "root").mkdir()
    with faulty(tmp_path / "root", tmp_path / "place", ODD[what]) as place:
        for more in ((), ("--overwrite",)):
            done = forks.run(whole.source, place / "out", *whole.options, *more, first=WINDOWS)
            assert done.code == 0, done.said
            assert same(whole, place / "out")
        assert [path.name for path in place.iterdir()] == ["out"]
        shutil.rmtree(place / "out")
