"""Checkpoints that vanish, change or get shorter while they are read: never a wrong output."""

from __future__ import annotations

import shutil
from itertools import product

import pytest
from builders import Model, write_legacy, write_torch_dist
from faults import assert_refused, check_left, contents, slow_but
from tiny_deepspeed import llama, write_layers, write_ranks, write_universal, write_zero3
from tiny_megatron import Ranks, TinyModel, write_dcp, write_zarr

from ckpt.config import ConvertOptions
from ckpt.convert import plan_conversion
from ckpt.convert.run import units_of
from ckpt.convert.staging import stage_path

SMALL = Model()
# What happens to a checkpoint: a program; ``file`` is one of its rank files, ``source`` all of it.
FAULTS = {
    "deleted": "shutil.rmtree(source)",
    "one deleted": "file.unlink()",
    "overwritten": "file.open('r+b').write(b'x' * 4096)",
    "replaced": "other = file.with_name('x'); shutil.copyfile(file, other); other.replace(file)",
    "cut short": "os.truncate(file, file.stat().st_size // 2)",
    "emptied": "os.truncate(file, 0)",
    "longer": "file.open('ab').write(b'x')",
    "a directory": "file.unlink(); file.mkdir()",
    "a dead link": "file.unlink(); file.symlink_to('/nowhere')",
}
# When: planned, nothing written; half of the files written; in the middle of one, files open.
MOMENTS = {
    "planned": "os.mkdir .*partial",
    "half written": r"open .*/model-00006-.*\.part",
    "while read": None,
}
ONCE_ALL_ARE_OPEN = """
from ckpt.convert import read
read.WINDOW_BYTES = 2**16
fill = read.fill_window
def watched(files, *values):
    fill(files, *values)
    if len(files._open) == 4:
        read.fill_window = fill
        exec(FAULT)
read.fill_window = watched
"""


def program(fault, source, file):
    begin = "import os, shutil, pathlib\n"
    begin += f"source, file = pathlib.Path({str(source)!r}), pathlib.Path({str(file)!r})\n"
    return begin + FAULTS[fault]


@pytest.fixture
def source(whole, tmp_path):
    """A copy of the checkpoint, to be hurt; times of files are those of the original."""
    return shutil.copytree(whole.source, tmp_path / "run")


def mend(whole, source):
    """Put the checkpoint back as it was."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(whole.source, source)


def without_manifest(out):
    """Of an output all but what has the source's path in it."""
    return {name: content for name, content in contents(out).items() if "manifest" not in name}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", slow_but(FAULTS, "deleted", "overwritten"))
def test_a_checkpoint_that_is_lost_or_changed_under_way_gives_one_line_or_the_right_bytes(
    forks, whole, source, fault, moment
):
    """Once it is there again, the same command goes on where it was."""
    out, (file,) = source.with_name("out"), source.glob("iter_*/mp_rank_01_001/*.pt")
    hurt, options = program(fault, source, file), whole.options
    if MOMENTS[moment]:
        done = forks.run(source, out, *options, at=MOMENTS[moment], do=hurt)
    else:
        options = options[2:]  # all in one file
        first = f"FAULT = {hurt!r}\n{ONCE_ALL_ARE_OPEN}"
        done = forks.run(source, out, *options, first=first)
    held = moment == "while read" and fault in {
        "deleted", "one deleted", "replaced", "a directory", "a dead link",
    }  # fmt: skip
    if held:  # the open files are as they were
        assert done.code == 0, done.said
        return
    assert_refused(done, "model_optim_rng.pt")
    assert "the same command" in done.said
    assert not out.exists()
    check_left(out, whole.contents)
    kept = {name.name: name.stat().st_mtime_ns for name in stage_path(out).glob("*.safetensors")}
    fine = 0 if fault == "deleted" else 4  # files that the lost one has no part in
    assert len(kept) == {"planned": fine, "half written": 5, "while read": 0}[moment]
    gone = forks.run(source, out, *options)
    if gone.code:  # a line that says what is wrong with it now
        assert_refused(gone, str(source))
    mend(whole, source)
    if not out.exists():
        done = forks.run(source, out, *options)
        assert done.code == 0, done.said
    if gone.code and fault not in {"replaced", "longer"}:
        now = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
        assert kept.items() <= now.items(), "finished files were written again"
    if gone.code:
        assert MOMENTS[moment] is None or same(whole.contents, without_manifest(out))


def same(undisturbed, found):
    """Whether all but the manifest is that of the undisturbed output."""
    return found == {name: undisturbed[name] for name in undisturbed if "manifest" not in name}


WRITERS = {  # the first one has no copies by which ranks of two saves could be told
    "torch": lambda place: write_legacy(place, SMALL, pp=3),
    "torch_dist": lambda place: write_torch_dist(place, SMALL, tp=2),
    "zarr": lambda place: write_zarr(place, TinyModel("llama"), Ranks()),
    "torch_dcp": lambda place: write_dcp(place, TinyModel("llama"), fsdp=True),
}
# What may happen to all files of a checkpoint while it is listed.
SPOILED = {
    "deleted": "shutil.rmtree(source)",
    "cut short": "for f in files: os.truncate(f, f.stat().st_size // 2)",
    "saved again": "shutil.rmtree(source); shutil.copytree(other, source)",
}


def other_save(place, format_):
    """The same model saved again: the same names and shapes, other values, and other places."""
    if format_ != "torch":
        return None  # it stands for all: what is held to stamps is the same

    def edit(state, _tp, _pp):
        content = state["model"]
        state["model"] = {name: content[name] + 1 for name in reversed(content)}

    return write_legacy(place, SMALL, pp=3, edit=edit)


@pytest.mark.parametrize(
    ("format_", "spoil", "every"),
    [
        ("torch", "saved again", 3),
        ("torch_dist", "deleted", 4),
        pytest.param("torch", "saved again", 1, marks=pytest.mark.slow),
        *(
            pytest.param(format_, spoil, 1, marks=pytest.mark.slow)
            for format_, spoil in product(WRITERS, ("deleted", "cut short"))
        ),
    ],
)
def test_a_checkpoint_that_is_lost_or_saved_again_while_it_is_listed_gives_one_line(
    forks, tmp_path, format_, spoil, every
):
    """Before each file that is opened or listed; never parts of two saves in one output."""
    pristine, out = WRITERS[format_](tmp_path / "pristine"), tmp_path / "out"
    other = other_save(tmp_path / "other", format_)
    right = []
    for save in filter(None, [other, pristine]):
        source = shutil.copytree(save, tmp_path / "run")
        done = forks.run(source, out, "--quiet")
        assert done.code == 0, done.said
        right.append(without_manifest(out))
        shutil.rmtree(out)
        shutil.rmtree(source)
    listed = next(n for n, event in enumerate(done.events) if "os.mkdir" in event)
    for step in range(1, listed + 1, every):
        source = shutil.copytree(pristine, tmp_path / "run")
        hurt = "import os, shutil, pathlib\n"
        hurt += f"source, other = pathlib.Path({str(source)!r}), {str(other)!r}\n"
        hurt += "files = [f for f in source.rglob('*') if f.is_file()]\n" + SPOILED[spoil]
        done = forks.run(source, out, "--quiet", at=step, do=hurt)
        if done.code:
            assert_refused(done)
            assert not out.exists()
        else:
            assert without_manifest(out) in right, done.events[step - 1]
            shutil.rmtree(out)
        shutil.rmtree(source, ignore_errors=True)


DEEPSPEED = {
    "layers": lambda place: write_layers(place, llama(2)),
    "ranks": lambda place: write_ranks(place, llama(2)),
    "zero3": lambda place: write_zero3(place, llama(2), dp=3),
    "universal": lambda place: write_universal(place, llama(2)),
}


@pytest.mark.parametrize("format_", [*WRITERS, *DEEPSPEED])
def test_every_file_that_weights_come_from_is_held_to_its_stamp(tmp_path, format_):
    """None is left out because its path was spelt otherwise."""
    source = {**WRITERS, **DEEPSPEED}[format_](tmp_path / "run")
    link = tmp_path / "link"
    link.symlink_to(source)
    for place in (source, link):
        conversion = plan_conversion(place, ConvertOptions())
        for unit in units_of(conversion, ConvertOptions()):
            assert {copy.file for copy in unit.copies()} == set(unit.stamps)
