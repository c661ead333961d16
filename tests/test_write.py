"""Carrying out a plan: bounded windows, casts, receipts, and faults of either disk."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from converted import apply_steps, windows
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckpt.convert import read, write
from ckpt.convert.checks import compare_copies
from ckpt.convert.maps import CastReport
from ckpt.convert.plan import Check, Target
from ckpt.convert.read import Files
from ckpt.convert.steps import AddOne, Cast, result_dtype
from ckpt.convert.units import Unit, read_receipt, write_unit
from ckpt.errors import OutputError, SourceError
from ckpt.rectangles import Copy, rectangles
from ckpt.shards import TensorSpec
from ckpt.tensors import DType, View, contiguous_strides

NAME = "model.safetensors"


def target_of(tensor, file, steps=(), name="w"):
    """A whole tensor stored in a file of its own, to be written after ``steps``."""
    dtype = DType.from_torch_name(str(tensor.dtype).removeprefix("torch."))
    file.write_bytes(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()))
    view = View.contiguous(str(file), 0, dtype, tuple(tensor.shape))
    copies = tuple(rectangles(view, contiguous_strides(view.shape), 0))
    spec = TensorSpec(name, result_dtype(dtype, tuple(steps)), tuple(tensor.shape))
    return Target(spec, dtype, copies, tuple(steps))


def written(tmp_path, *targets):
    unit = Unit(NAME, targets, allow_nonfinite=True)
    report = write_unit(unit, tmp_path, lambda _: None)
    return report, load_file(tmp_path / NAME)


@settings(deadline=None)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9), window=st.integers(1, 12),
    turned=st.booleans(), ranks=st.integers(1, 3),
)  # fmt: skip
def test_windows_of_any_size_give_the_same_bytes(
    tmp_path_factory, rows, columns, window, turned, ranks
):
    """Shards side by side, transposed or not; the window cuts rows and shards anywhere."""
    place = tmp_path_factory.mktemp("x")
    whole = np.arange(rows * columns * ranks, dtype=np.int32).reshape(rows, columns * ranks)
    expected = np.ascontiguousarray(whole.T if turned else whole)
    strides = (1, rows) if turned else (columns * ranks, 1)
    copies = []
    for rank, part in enumerate(np.split(whole, ranks, axis=1)):
        (place / str(rank)).write_bytes(np.ascontiguousarray(part).tobytes())
        view = View.contiguous(str(place / str(rank)), 0, DType.I32, part.shape)
        copies += rectangles(view, strides, rank * columns * strides[1] * 4)
    with pytest.MonkeyPatch.context() as patch, Files() as files:
        patch.setattr(read, "WINDOW_BYTES", 4 * window)
        found = list(windows(files, copies, expected.nbytes))
    assert b"".join(part.tobytes() for part in found) == expected.tobytes()
    assert all(part.nbytes <= 4 * window for part in found)


@pytest.mark.parametrize("window", [8, 24, 1 << 20])
@pytest.mark.parametrize("to", [DType.F32, DType.F16, DType.BF16])
@pytest.mark.parametrize("start", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a27_casts_round_as_torch_does(tmp_path, monkeypatch, start, to, window):
    """Ties to even, infinities, NaN, subnormals, negative zero; in windows of any size."""
    monkeypatch.setattr(read, "WINDOW_BYTES", window)
    values = torch.tensor(
        [1.0, -0.0, math.pi, 1 + 2**-8, 1 + 3 * 2**-8, 65504, 65519, 65520, 70000, -1e38, 1e-30,
         6e-8, 2e-8, -3e-8, math.inf, -math.inf, math.nan, 0.1]
    ).to(start)  # fmt: skip
    report, found = written(tmp_path, target_of(values, tmp_path / "f", [Cast(to)]))
    expected = values.to(getattr(torch, to.torch_name))
    # torch's bits of a NaN depend on the length of the tensor; which NaN is test_maps.py's part.
    assert found["w"].isnan().tolist() == values.isnan().tolist()
    bits = {torch.float32: torch.int32}.get(expected.dtype, torch.int16)
    numbers = ~values.isnan()
    assert torch.equal(found["w"][numbers].view(bits), expected[numbers].view(bits))
    over = int((expected.isinf() & ~values.isinf()).sum())
    under = int(((expected == 0) & (values != 0)).sum())
    assert report.overflowed == ({"w": over} if over else {})
    assert report.underflowed == ({"w": under} if under else {})
    assert report.nonfinite == {"w": int((~values.isfinite()).sum())}


def test_one_plus_a_gain_is_summed_in_fp32(tmp_path):
    """1 + w needs more bits than a 16-bit w has; the type follows only when it is asked for."""
    gains = (torch.rand(40) - 0.5).bfloat16()
    report = CastReport()
    stored = np.frombuffer(bytes(gains.view(torch.uint8).tolist()), np.uint8).copy()
    found = apply_steps(stored, DType.BF16, (AddOne(),), name="n", report=report)
    assert result_dtype(DType.BF16, (AddOne(),)) is DType.F32
    assert found.tobytes() == (gains.float() + 1).numpy().tobytes()
    steps = (AddOne(), Cast(DType.BF16))
    _, content = written(tmp_path, target_of(gains, tmp_path / "f", steps))
    assert torch.equal(content["w"], (gains.float() + 1).bfloat16())
    back = apply_steps(found, DType.F32, (AddOne(-1),), name="n", report=report)
    assert np.allclose(back.view(np.float32), gains.float().numpy(), atol=1e-7)


def test_a_receipt_says_what_lies_there_and_a_second_call_writes_nothing(tmp_path):
    import hashlib

    target = target_of(torch.arange(6.0), tmp_path / "f")
    first, _ = written(tmp_path, target)
    content = (tmp_path / NAME).read_bytes()
    assert first.size == len(content)
    assert first.sha256 == hashlib.sha256(content).hexdigest()
    (tmp_path / "f").unlink()  # the source is not needed any more
    again, _ = written(tmp_path, target)
    assert again == first
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("damage", ["cut", "gone", "no-receipt", "bad-receipt"])
def test_a23_a_file_that_is_not_whole_is_written_again(tmp_path, damage):
    target = target_of(torch.arange(6.0), tmp_path / "f")
    written(tmp_path, target)
    receipt = tmp_path / f"{NAME}.receipt.json"
    if damage == "cut":
        (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:-1])
    elif damage == "gone":
        (tmp_path / NAME).unlink()
    elif damage == "no-receipt":
        receipt.unlink()
    else:
        receipt.write_text("{")
    assert read_receipt(tmp_path, Unit(NAME, (target,), allow_nonfinite=True)) is None
    _, found = written(tmp_path, target)
    assert torch.equal(found["w"], torch.arange(6.0))


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EIO, "Input/output error")]
)
def test_a23_a_disk_that_refuses_leaves_no_half_file(tmp_path, monkeypatch, number, words):
    """The message says to run the same command again."""

    def refuse(_fd):
        raise OSError(number, "Input/output error")

    target = target_of(torch.arange(6.0), tmp_path / "f")
    monkeypatch.setattr(write.os, "fsync", refuse)
    with pytest.raises(OutputError, match=words) as caught:
        written(tmp_path, target)
    assert "goes on from here" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_source_that_shrinks_while_it_is_read_is_an_error_with_its_name(tmp_path):
    target = target_of(torch.arange(600.0), tmp_path / "source")
    with (tmp_path / "source").open("r+b") as stream:
        stream.truncate(1000)
    with pytest.raises(SourceError, match="source: the file changed"):
        written(tmp_path, target)
    (tmp_path / "source").unlink()
    with pytest.raises(SourceError, match=r"source.*No such file"):
        written(tmp_path, target)


def test_many_source_files_never_hold_more_than_a_few_open(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "_OPEN_FILES", 3)
    for number in range(8):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 4)
    buffer = np.zeros(4, np.uint8)
    with Files() as files:
        for number in (*range(8), 0, 7, 3):
            files.read_into(str(tmp_path / str(number)), 0, buffer)
            assert buffer.tolist() == [number] * 4
            assert len(files._open) <= 3
    assert not files._open


@pytest.mark.parametrize("gap", [1, 2, 40])
def test_rows_with_gaps_are_read_whole_or_one_by_one(tmp_path, gap):
    """Both ways give the same; wide gaps are not read."""
    array = np.arange(7 * 3 * gap, dtype=np.int32).reshape(7, 3 * gap)
    (tmp_path / "f").write_bytes(array.tobytes())
    copy = Copy(str(tmp_path / "f"), 0, 12 * gap, 0, 12, 7, 12, 4)
    with Files() as files:
        (window,) = windows(files, [copy], 7 * 3 * 4)
    assert np.array_equal(window.view(np.int32).reshape(7, 3), array[:, :3])


@pytest.mark.parametrize("at", [0, 11, 23])
def test_copies_that_differ_in_one_byte_are_found_in_any_window(tmp_path, monkeypatch, at):
    monkeypatch.setattr(read, "WINDOW_BYTES", 8)
    content = bytearray(range(24))
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "same").write_bytes(content)
    content[at] ^= 1
    (tmp_path / "b").write_bytes(content)
    view = {name: View.contiguous(str(tmp_path / name), 0, DType.F32, (6,))
            for name in ("a", "b", "same")}  # fmt: skip
    told = []
    assert compare_copies([Check("norm", view["a"], view["same"])], {}, told.append) == {}
    assert sum(told) == 24
    with pytest.raises(SourceError, match="norm: two stored copies") as caught:
        compare_copies([Check("norm", view["a"], view["b"])], {}, told.append)
    assert str(tmp_path / "a") in str(caught.value)
    assert str(tmp_path / "b") in str(caught.value)


def test_a_receipt_is_plain_json(tmp_path):
    values = torch.tensor([70000.0, 1.0])
    written(tmp_path, target_of(values, tmp_path / "f", [Cast(DType.F16)]))
    receipt = json.loads((tmp_path / f"{NAME}.receipt.json").read_text())
    assert receipt["overflowed"] == {"w": 1}


def in_one_file(tmp_path, *tensors):
    """Targets of tensors that follow one another in a source file."""
    targets, at = [], 0
    with (tmp_path / "source").open("wb") as stream:
        for number, tensor in enumerate(tensors):
            dtype = DType.from_torch_name(str(tensor.dtype).removeprefix("torch."))
            stream.write(bytes(tensor.flatten().view(torch.uint8).tolist()))
            view = View.contiguous(str(tmp_path / "source"), at, dtype, tuple(tensor.shape))
            copies = tuple(rectangles(view, contiguous_strides(view.shape), 0))
            spec = TensorSpec(f"t{number}", dtype, tuple(tensor.shape))
            targets.append(Target(spec, dtype, copies))
            at += view.nbytes
    return targets


@settings(deadline=None, max_examples=40)
@given(
    window=st.sampled_from([8, 16, 40, 4096, 8192, 12288]),
    sizes=st.lists(
        st.tuples(
            st.integers(0, 3000),
            st.sampled_from([torch.int8, torch.bfloat16, torch.float32, torch.float64]),
        ),
        min_size=1,
        max_size=6,
    ),
    direct=st.booleans(),
)
def test_tensors_of_odd_sizes_share_windows_with_and_without_direct_writes(
    tmp_path_factory, window, sizes, direct
):
    """An element is never cut in two; the file is cut to its size; safetensors reads it."""
    import hashlib

    place = tmp_path_factory.mktemp("x")
    tensors = [torch.arange(count).to(dtype) for count, dtype in sizes]
    targets = tuple(in_one_file(place, *tensors))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "WINDOW_BYTES", window)
        if not direct:
            patch.delattr(write.os, "O_DIRECT")
        report, found = written(place, *targets)
    for number, tensor in enumerate(tensors):
        assert torch.equal(found[f"t{number}"], tensor)
    content = (place / NAME).read_bytes()
    assert (report.size, report.sha256) == (len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("when", ["open", "write"])
def test_a_file_system_without_direct_writes_gets_buffered_ones(
    tmp_path, monkeypatch, when, number
):
    """Some refuse when the file is opened, some at the first write."""
    real, direct = getattr(write.os, when if when == "open" else "pwritev"), write.os.O_DIRECT
    opened = []

    def refuse(*values):
        if when == "open" and values[1] & direct:
            raise OSError(number, "no direct access here")
        if when == "write" and not opened:
            opened.append(values)
            raise OSError(number, "no direct access here")
        return real(*values)

    target = target_of(torch.arange(5000.0), tmp_path / "f")
    monkeypatch.setattr(write.os, "open" if when == "open" else "pwritev", refuse)
    _, found = written(tmp_path, target)
    assert torch.equal(found["w"], torch.arange(5000.0))


@pytest.mark.parametrize("most", [1, 511, 4096, 4097])
def test_a_disk_that_takes_less_than_it_is_given_gets_the_rest(tmp_path, monkeypatch, most):
    """A short write is no error; what follows it is not aligned any more."""
    real = write.os.pwritev

    def short(fd, buffers, at):
        return (
            real(fd, [buffers[0][:most]], at) if most > 100 or at > 9000 else real(fd, buffers, at)
        )

    target = target_of(torch.arange(3000.0), tmp_path / "f")
    monkeypatch.setattr(write.os, "pwritev", short)
    _, found = written(tmp_path, target)
    assert torch.equal(found["w"], torch.arange(3000.0))


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_source_file_that_is_not_the_planned_one_is_refused(tmp_path, monkeypatch, when):
    """Size or time of change differ: weights of two saves never meet in one output."""
    import os

    target = target_of(torch.arange(6.0), tmp_path / "f")
    state = (tmp_path / "f").stat()
    unit = Unit(NAME, (target,), {str(tmp_path / "f"): (state.st_size, state.st_mtime_ns)})

    def touch(*_):
        os.utime(tmp_path / "f", ns=(1, 1))

    if when == "before":
        touch()
    with pytest.raises(SourceError, match="changed while it was being converted") as caught:
        write_unit(unit, tmp_path, touch if when == "while" else lambda _: None)
    assert caught.value.file == str(tmp_path / "f")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_receipt_of_another_plan_counts_for_nothing(tmp_path):
    """The file has the right name and size, and other bytes."""
    one, two = torch.arange(6.0), torch.arange(6.0) + 1
    written(tmp_path, target_of(one, tmp_path / "one"))
    _, found = written(tmp_path, target_of(two, tmp_path / "two"))
    assert torch.equal(found["w"], two)


@pytest.mark.parametrize("pitch", [8, 12, 60, 40_000])
def test_transposed_rows_with_gaps_are_read_whole_or_one_by_one(tmp_path, monkeypatch, pitch):
    """A file row holds four elements of a column, then a gap; windows take some of them."""
    monkeypatch.setattr(read, "WINDOW_BYTES", 24)
    raw = np.arange(5 * pitch // 2, dtype=np.int16)
    (tmp_path / "f").write_bytes(raw.tobytes())
    copy = Copy(str(tmp_path / "f"), 0, pitch, 0, 10, 4, 10, 2, transposed=True)
    with Files() as files:
        found = b"".join(part.tobytes() for part in windows(files, [copy], 40))
    expected = np.stack([raw[row * pitch // 2 :][:4] for row in range(5)], axis=1)
    assert found == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (2, 1), (0, 0), (1, 0), (3, 1), (1, 3)])
def test_rows_that_share_bytes_are_read_one_by_one(tmp_path, strides):
    """Tensors that were expanded, or are windows over one vector, are views of few bytes."""
    stored = torch.arange(60, dtype=torch.int16)
    (tmp_path / "f").write_bytes(stored.numpy().tobytes())
    view = View(str(tmp_path / "f"), 0, DType.I16, (5, 4), strides)
    for turned in (False, True):
        expected = torch.as_strided(stored, (5, 4), strides)
        expected = expected.T.contiguous() if turned else expected.contiguous()
        copies = list(rectangles(view, (1, 5) if turned else (4, 1), 0))
        with Files() as files:
            (found,) = windows(files, copies, 40)
        assert found.tobytes() == expected.numpy().tobytes()


def test_more_source_files_than_the_process_may_open_are_closed_in_between(tmp_path):
    import resource

    for number in range(40):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 4)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(list(Path("/proc/self/fd").iterdir())) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken, hard))
    try:
        buffer = np.zeros(4, np.uint8)
        with Files() as files:
            for number in (*range(40), 3, 39):
                files.read_into(str(tmp_path / str(number)), 0, buffer)
                assert buffer.tolist() == [number] * 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_digest_of_a_unit_does_not_depend_on_how_the_source_is_spelt(tmp_path):
    """Nor do names that are no UTF-8 hinder it."""
    digests = set()
    for root in ("/data/run", "../run", "sr\udcff"):
        copy = Copy(f"{root}/a.pt", 0, 4, 0, 4, 1, 4, 4)
        target = Target(TensorSpec("w", DType.F32, (1,)), DType.F32, (copy,))
        unit = Unit(NAME, (target,), {f"{root}/a.pt": (4, 1)}, "plan", root)
        digests.add(unit.digest())
    assert len(digests) == 1
