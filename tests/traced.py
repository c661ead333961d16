"""Values that say where they came from: each element of a tiny model is a number of its own.

Numbers are whole and below 2**24, so float32 holds each exactly. A test that fails says which
training element lies where another one belongs.
"""

from __future__ import annotations

import torch
from converted import read_tensors
from tiny_megatron import expected_hf

LIMIT = 2**24


class Traced:
    """Stands in for ``random(name, *shape)``: the numbers of each name follow the last one's."""

    def __init__(self):
        self._starts: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._next = 1

    def __call__(self, name, *shape, dtype=torch.float32):
        assert dtype is torch.float32
        if name == "padding":  # its size depends on the ranks
            return torch.full(shape, -1.0)
        if name not in self._starts:
            self._starts[name] = (self._next, shape)
            self._next += torch.Size(shape).numel()
            assert self._next < LIMIT
        start, known = self._starts[name]
        assert known == shape
        return torch.arange(start, start + torch.Size(shape).numel()).float().view(shape)

    def origin(self, value):
        """The tensor and the position that a number belongs to."""
        for name, (start, shape) in self._starts.items():
            inside = int(value) - start
            if 0 <= inside < torch.Size(shape).numel():
                place = [int(part) for part in torch.unravel_index(torch.tensor(inside), shape)]
                return f"{name}{place}"
        return f"nowhere ({value})"


def assert_traced(directory, model, traced, *, but=()):
    """Every tensor but ``but`` holds the elements that belong there."""
    found = read_tensors(directory)
    expected = {name: value for name, value in expected_hf(model).items() if name not in but}
    assert found.keys() - set(but) == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        wrong = (found[name] != value).nonzero()
        if len(wrong):
            at = tuple(int(part) for part in wrong[0])
            came = traced.origin(found[name][at])
            raise AssertionError(f"{name}{list(at)} holds {came}, {len(wrong)} elements are wrong")
