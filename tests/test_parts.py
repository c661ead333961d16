"""Parts of tensors: flat runs become boxes, and what a rank holds can be cut and stacked."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import PlanError
from ckpt.parts import Held, Placed, flat_boxes, held_by_ranks, stack_rows
from ckpt.tensors import DType, Shard, View, contiguous_strides

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def view(shape, offset=0):
    return View.contiguous("file", offset, DType.F32, shape)


@given(SHAPES, st.data())
def test_boxes_of_a_flat_run_hold_its_elements_in_order(shape, data):
    """Slow and plain: number the elements, take the boxes, and read the run again."""
    size = int(np.prod(shape))
    first = data.draw(st.integers(0, size))
    end = data.draw(st.integers(first, size))
    numbers = np.arange(size).reshape(shape)
    found = []
    boxes = list(flat_boxes(shape, first, end))
    for start, length in boxes:
        index = tuple(slice(s, s + n) for s, n in zip(start, length, strict=True))
        found += numbers[index].flatten().tolist()
    assert found == list(range(first, end))
    assert len(boxes) <= 2 * len(shape) - 1


def elements(held):
    """What a tensor of parts holds: offsets of its elements in the file, by place."""
    table = np.full(held.shape, -1)
    for part in held.parts:
        for index in np.ndindex(part.view.shape):
            steps = zip(index, part.view.strides, strict=True)
            offset = part.view.offset // 4 + sum(i * s for i, s in steps)
            place = tuple(s + i for s, i in zip(part.start, index, strict=True))
            assert table[place] == -1
            table[place] = offset
    return table


def in_pieces(shape, cuts):
    """A tensor whose flat elements are cut at these places."""
    parts = []
    size = int(np.prod(shape))
    edges = sorted({0, size, *(cut % size for cut in cuts)})
    for first, end in pairwise(edges):
        at = first
        for start, length in flat_boxes(shape, first, end):
            strides = contiguous_strides(length)
            parts.append(Placed(View("file", at * 4, DType.F32, length, strides), start))
            at += int(np.prod(length))
    return Held(shape, tuple(parts))


@given(SHAPES, st.lists(st.integers(0, 200), max_size=5), st.data())
def test_tensors_in_pieces_narrow_and_stack_like_arrays(shape, cuts, data):
    """As NumPy does with the numbered elements."""
    held = in_pieces(shape, cuts)
    truth = np.arange(int(np.prod(shape))).reshape(shape)
    assert np.array_equal(elements(held), truth)
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim] - 1))
    length = data.draw(st.integers(1, shape[dim] - start))
    narrow = held.narrow(dim, start, length)
    assert np.array_equal(elements(narrow), truth.take(range(start, start + length), dim))
    whole = Held.whole(view(narrow.shape, offset=4000))
    if dim == 0:
        stacked = stack_rows([whole, held.narrow(0, start, length)])
        assert np.array_equal(elements(stacked)[length:], elements(narrow))


def test_a_rank_whose_parts_leave_a_gap_is_refused():
    """Each rank's parts must make a tensor of their own."""
    parts = [Shard(view((2, 3)), start=(0, 0), rank=0), Shard(view((1, 3)), start=(3, 0), rank=0)]
    with pytest.raises(PlanError, match="gap"):
        held_by_ranks(parts)
    assert held_by_ranks([Shard(view((2, 3)), rank=1), Shard(view((2, 3)), rank=0)])
