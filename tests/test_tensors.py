"""Views against NumPy: the same elements, by byte offsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.tensors import DType, View, contiguous_strides

START = 48  # bytes before the first element


def elements(view, stored):
    """Every element by the definition of a view: offset plus index times stride."""
    found = np.zeros(view.shape, stored.dtype)
    flat = stored.ravel()
    for index in np.ndindex(*view.shape):
        steps = sum(i * s for i, s in zip(index, view.strides, strict=True))
        found[index] = flat[(view.offset - START) // view.dtype.itemsize + steps]
    return found


@given(shape=st.lists(st.integers(1, 5), min_size=2, max_size=4), data=st.data())
def test_any_chain_of_view_operations_sees_what_numpy_sees(shape, data):
    stored = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    array, view = stored, View.contiguous("f", START, DType.I32, tuple(shape))
    for _ in range(data.draw(st.integers(1, 4))):
        dim = data.draw(st.integers(0, array.ndim - 1))
        start = data.draw(st.integers(0, array.shape[dim] - 1))
        match data.draw(st.sampled_from(["narrow", "select", "transpose", "box"])):
            case "narrow":
                length = data.draw(st.integers(1, array.shape[dim] - start))
                view = view.narrow(dim, start, length)
                array = np.take(array, range(start, start + length), dim)
            case "select" if array.ndim > 2:
                view, array = view.select(dim, start), np.take(array, start, dim)
            case "transpose":
                view, array = view.transpose(), np.swapaxes(array, -1, -2)
            case "box":
                first = tuple(data.draw(st.integers(0, n - 1)) for n in array.shape)
                size = tuple(n - f for f, n in zip(first, array.shape, strict=True))
                view = view.box(first, size)
                array = array[tuple(slice(f, None) for f in first)]
    assert view.shape == array.shape
    assert np.array_equal(elements(view, stored), array)
    assert view.nbytes == array.size * 4


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_contiguity_is_what_numpy_calls_it(shape, order):
    axes = list(range(len(shape)))
    order.shuffle(axes)
    array = np.zeros(shape, np.int8).transpose(axes)
    strides = contiguous_strides(tuple(shape))
    turned = View("f", 0, DType.I8, array.shape, tuple(strides[a] for a in axes))
    assert turned.is_contiguous == array.flags.c_contiguous


def test_a_contiguous_view_takes_any_shape_of_the_same_size():
    view = View.contiguous("f", 8, DType.F32, (4, 6)).reshape((2, 2, 6))
    assert (view.shape, view.strides, view.offset) == ((2, 2, 6), (12, 6, 1), 8)


@pytest.mark.parametrize("dtype", DType)
def test_names_and_sizes_of_types_are_those_of_torch_and_safetensors(dtype):
    kind = getattr(torch, dtype.torch_name)
    assert torch.empty(0, dtype=kind).element_size() == dtype.itemsize
    assert kind.is_floating_point == dtype.is_float
    assert DType.from_torch_name(dtype.torch_name) is dtype
    assert DType.from_torch_name("complex64") is None


@pytest.mark.parametrize("dtype", DType)
def test_safetensors_reads_what_we_call_a_type(tmp_path, dtype):
    """Its library, not ours, says which name stands for which type."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    value = torch.zeros(3).to(getattr(torch, dtype.torch_name))
    save_file({"x": value}, tmp_path / "f")
    with safe_open(tmp_path / "f", "pt") as file:
        assert file.get_slice("x").get_dtype() == dtype.name
