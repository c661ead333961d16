"""Layout rules against slow, plain NumPy code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.convert.read import Files, clip, fill
from ckpt.errors import PlanError
from ckpt.layout import Cut, Layout, Sizes, copies_for, cut, place
from ckpt.rectangles import rectangles
from ckpt.tensors import DType, Shard, View, contiguous_strides


def stored(path, arrays):
    """Arrays in one file, and a view of each."""
    views, content = [], b""
    for array in arrays:
        views.append(View.contiguous(str(path), len(content), DType.I32, array.shape))
        content += array.tobytes()
    path.write_bytes(content)
    return views


def carry_out(copies, shape):
    window = np.full(int(np.prod(shape)) * 4, 255, np.uint8)
    with Files() as files:
        for copy in copies:
            fill(files, copy, window, 0)
    return window.view(np.int32).reshape(shape)


@given(
    groups=st.integers(1, 4), per_group=st.integers(1, 3), head_dim=st.integers(1, 3),
    ranks=st.integers(1, 5), bias=st.booleans(),
)  # fmt: skip
def test_grouped_queries_come_out_by_kind_whatever_the_ranks(
    tmp_path_factory, groups, per_group, head_dim, ranks, bias
):
    """Also when a rank holds no whole group: the fused rows are cut evenly."""
    rows = groups * (per_group + 2) * head_dim
    if rows % ranks:
        ranks = 1
    width = () if bias else (2,)
    whole = np.arange(rows * (1 if bias else 2), dtype=np.int32).reshape(rows, *width)
    views = stored(tmp_path_factory.mktemp("x") / "f", np.split(whole, ranks))
    shards = [Shard(view, rank=rank) for rank, view in enumerate(views)]
    placed = place(shards, Layout(dim=0), None, 0)
    assert placed.shape == whole.shape
    sizes = Sizes(groups * per_group, groups, head_dim, 0)
    expected = {"q": [], "k": [], "v": []}
    for group in whole.reshape(groups, per_group + 2, head_dim, *width):
        expected["q"] += list(group[:per_group])
        expected["k"].append(group[per_group])
        expected["v"].append(group[per_group + 1])
    for target, kind in zip(cut(rows, Cut.GROUPED_QKV, sizes), "qkv", strict=True):
        copies = copies_for(placed, target, transposed=False, base=0)
        found = carry_out(copies, (target.rows, *width))
        assert np.array_equal(found, np.concatenate(expected[kind]))


@given(
    groups=st.integers(1, 3), per_group=st.integers(1, 3), head_dim=st.integers(1, 3),
    ranks=st.integers(1, 4),
)  # fmt: skip
@settings(deadline=None)
def test_gates_come_out_behind_their_queries(tmp_path_factory, groups, per_group, head_dim, ranks):
    """A head of the class is [query; gate]; Megatron has a group's gates together."""
    rows = 2 * groups * (per_group + 1) * head_dim
    ranks = ranks if rows % ranks == 0 else 1
    whole = np.arange(rows * 2, dtype=np.int32).reshape(rows, 2)
    views = stored(tmp_path_factory.mktemp("x") / "f", np.split(whole, ranks))
    shards = [Shard(view, rank=rank) for rank, view in enumerate(views)]
    placed = place(shards, Layout(dim=0), None, 0)
    expected = {"q": [], "k": [], "v": []}
    for group in whole.reshape(groups, 2 * per_group + 2, head_dim, 2):
        for head in range(per_group):
            expected["q"] += [group[head], group[per_group + head]]
        expected["k"].append(group[-2])
        expected["v"].append(group[-1])
    sizes = Sizes(groups * per_group, groups, head_dim, 0)
    for target, kind in zip(cut(rows, Cut.GATED_QKV, sizes), "qkv", strict=True):
        copies = copies_for(placed, target, transposed=False, base=0)
        found = carry_out(copies, (target.rows, 2))
        assert np.array_equal(found, np.concatenate(expected[kind]))


@given(
    per_rank=st.integers(1, 2), ranks=st.integers(1, 3), ratio=st.integers(1, 3),
    key_dim=st.integers(1, 3), value_dim=st.integers(1, 3),
)  # fmt: skip
@settings(deadline=None)
def test_a_delta_nets_rows_come_out_by_key_head(
    tmp_path_factory, per_rank, ranks, ratio, key_dim, value_dim
):
    """A rank holds its heads of q, k, v, z, b, a; Hugging Face has a key head's together."""
    keys = per_rank * ranks
    sizes = Sizes(1, 1, 1, 0, delta_heads=(keys, keys * ratio), delta_dims=(key_dim, value_dim))
    widths = [key_dim, key_dim, ratio * value_dim, ratio * value_dim, ratio, ratio]
    heads, at = [], 0
    for _ in range(keys):
        heads.append([np.arange(at + n * 9, at + n * 9 + w) for n, w in enumerate(widths)])
        at += 100
    of_rank = [
        np.concatenate([head[kind] for kind in range(6) for head in part]).astype(np.int32)
        for part in (heads[n * per_rank :][:per_rank] for n in range(ranks))
    ]
    views = stored(tmp_path_factory.mktemp("x") / "f", [part[:, None] for part in of_rank])
    shards = [Shard(view, rank=rank) for rank, view in enumerate(views)]
    names = ("q", "k", "v", "z", "b", "a")
    blocks = [width * keys for width in widths]
    placed = place(shards, Layout(dim=0, blocks=names), None, 0, blocks)
    rows = placed.shape[0]
    truths = [
        np.concatenate([np.concatenate(head[:4]) for head in heads]),
        np.concatenate([np.concatenate(head[4:]) for head in heads]),
    ]
    for target, truth in zip(cut(rows, Cut.DELTA, sizes), truths, strict=True):
        copies = copies_for(placed, target, transposed=False, base=0)
        assert np.array_equal(carry_out(copies, (target.rows, 1)).ravel(), truth)


def test_blocks_that_ranks_cannot_share_are_refused():
    """The sizes of the arguments and the rows of the files must be those of one model."""
    views = [View.contiguous("f", 0, DType.F32, (6, 2))] * 2
    shards = [Shard(view, rank=rank) for rank, view in enumerate(views)]
    layout = Layout(dim=0, blocks=("q", "k"))
    for blocks in ((6, 8), (5, 7)):
        with pytest.raises(PlanError, match=r"blocks q \+ k"):
            place(shards, layout, None, 0, blocks)
    with pytest.raises(PlanError, match="13 rows"):
        cut(13, Cut.DELTA, Sizes(1, 1, 1, 0, delta_heads=(1, 1), delta_dims=(2, 3)))
    with pytest.raises(PlanError, match="13 rows"):
        cut(13, Cut.GATED_QKV, Sizes(2, 1, 3, 0))


@given(half=st.integers(1, 4), ranks=st.integers(1, 4), width=st.integers(1, 3))
def test_gate_and_up_are_halves_of_each_rank(tmp_path_factory, half, ranks, width):
    """Rank files hold [gate_r; up_r]."""
    gate = np.arange(half * ranks * width, dtype=np.int32).reshape(half * ranks, width)
    up = gate + 1000
    pairs = zip(np.split(gate, ranks), np.split(up, ranks), strict=True)
    views = stored(tmp_path_factory.mktemp("x") / "f", [np.concatenate(pair) for pair in pairs])
    shards = [Shard(view, rank=rank) for rank, view in enumerate(views)]
    whole = place(shards, Layout(dim=0, parts=2), None, 0)
    targets = cut(whole.shape[0], Cut.GATE_UP, Sizes(1, 1, 1, 0))
    for target, truth in zip(targets, (gate, up), strict=True):
        copies = copies_for(whole, target, transposed=False, base=0)
        assert np.array_equal(carry_out(copies, truth.shape), truth)


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    first=st.integers(0, 40),
    length=st.integers(1, 60),
)
def test_rectangles_and_their_clips_move_any_strided_view(
    tmp_path_factory, shape, order, first, length
):
    """Any order of dimensions on either side; windows of any length see just their bytes."""
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    (view,) = stored(tmp_path_factory.mktemp("x") / "f", [array])
    axes = list(range(len(shape)))
    order.shuffle(axes)
    turned = View(
        view.file, view.offset, view.dtype,
        tuple(view.shape[a] for a in axes), tuple(view.strides[a] for a in axes),
    )  # fmt: skip
    copies = list(rectangles(turned, contiguous_strides(turned.shape), 0))
    truth = np.ascontiguousarray(array.transpose(axes))
    assert np.array_equal(carry_out(copies, truth.shape), truth)
    begin = min(first * 4, truth.nbytes)
    end = min(begin + length * 4, truth.nbytes)
    window = np.zeros(end - begin, np.uint8)
    with Files() as files:
        for copy in copies:
            for part in clip(copy, begin, end):
                fill(files, part, window, begin)
    assert window.tobytes() == truth.tobytes()[begin:end]


@given(rows=st.integers(1, 5), columns=st.integers(1, 5), ranks=st.integers(1, 3))
def test_row_parallel_shards_join_side_by_side_also_transposed(
    tmp_path_factory, rows, columns, ranks
):
    """Dimension 1 over ranks; Hugging Face's Conv1D wants the transpose."""
    whole = np.arange(rows * columns * ranks, dtype=np.int32).reshape(rows, columns * ranks)
    views = stored(tmp_path_factory.mktemp("x") / "f", np.split(whole, ranks, axis=1))
    shards = [Shard(view, rank=rank) for rank, view in enumerate(views)]
    placed = place(shards, Layout(dim=1), None, 0)
    (target,) = cut(rows, Cut.WHOLE, Sizes(1, 1, 1, 0))
    plain = carry_out(copies_for(placed, target, transposed=False, base=0), whole.shape)
    turned = carry_out(copies_for(placed, target, transposed=True, base=0), whole.T.shape)
    assert np.array_equal(plain, whole)
    assert np.array_equal(turned, whole.T)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    ranks=st.integers(1, 3),
    width=st.integers(1, 3),
)
def test_unequal_blocks_are_joined_over_ranks_and_parted_again(
    tmp_path_factory, sizes, ranks, width
):
    """A rank holds its share of each block in turn; the targets are the blocks."""
    blocks = [
        np.arange(size * ranks * width, dtype=np.int32).reshape(-1, width) + 1000 * number
        for number, size in enumerate(sizes)
    ]
    shares = zip(*(np.split(block, ranks) for block in blocks), strict=True)
    views = stored(tmp_path_factory.mktemp("x") / "f", [np.concatenate(rank) for rank in shares])
    shards = [Shard(view, rank=rank) for rank, view in enumerate(views)]
    rows = tuple(size * ranks for size in sizes)
    names = tuple("abc"[: len(sizes)])
    whole = place(shards, Layout(dim=0, blocks=names), None, 0, rows)
    targets = cut(whole.shape[0], Cut.BLOCKS, Sizes(1, 1, 1, 0, rows))
    for target, truth in zip(targets, blocks, strict=True):
        copies = copies_for(whole, target, transposed=False, base=0)
        assert np.array_equal(carry_out(copies, truth.shape), truth)
    with pytest.raises(PlanError, match="rows"):
        cut(whole.shape[0] + 1, Cut.BLOCKS, Sizes(1, 1, 1, 0, rows))


def test_flat_and_interleaved_targets(tmp_path):
    """One tensor of all queries, keys, values; and gate and up rows in turns."""
    whole = np.arange(12, dtype=np.int32).reshape(12, 1)
    (view,) = stored(tmp_path / "f", [whole])
    placed = place([Shard(view, rank=0)], Layout(dim=0), None, 0)
    (flat,) = cut(12, Cut.FLAT_QKV, Sizes(2, 2, 2, 0))
    found = carry_out(copies_for(placed, flat, transposed=False, base=0), (12, 1)).ravel()
    assert found.tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    (turns,) = cut(12, Cut.INTERLEAVED_GATE_UP, Sizes(1, 1, 1, 0))
    found = carry_out(copies_for(placed, turns, transposed=False, base=0), (12, 1)).ravel()
    assert found.tolist() == [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]


@pytest.mark.parametrize(
    "starts", [[(0, 0), (1, 0)], [(0, 0), (3, 0)], [(0, 0)], [(0, 0), (2, 0), (2, 0)]]
)
def test_parts_must_cover_the_whole_exactly_once(starts):
    """A gap, an overlap and a part outside are refused."""
    view = View.contiguous("f", 0, DType.F32, (2, 3))
    with pytest.raises(PlanError):
        place([Shard(view, start=start) for start in starts], Layout(dim=0), (4, 3), 0)


def test_ranks_that_do_not_fit_together_are_refused():
    """Another width beside the joined dimension, and copies of another shape."""
    a, b = (View.contiguous("f", 0, DType.F32, shape) for shape in ((2, 3), (2, 4)))
    for layout in (Layout(dim=0), Layout()):
        with pytest.raises(PlanError):
            place([Shard(a, rank=0), Shard(b, rank=1)], layout, None, 0)
    with pytest.raises(PlanError, match="30 rows"):
        cut(31, Cut.GROUPED_QKV, Sizes(3, 1, 6, 0))
