"""What a conversion wrote, held to the truth bit for bit."""

from __future__ import annotations

import numpy as np
import torch
from safetensors.torch import load_file
from tiny_megatron import expected_hf

from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint, read
from ckpt.convert.maps import Stepper
from ckpt.inspection import weight_files


def read_tensors(place):
    """Every tensor of a model's directory, by name."""
    tensors: dict[str, torch.Tensor] = {}
    for name in weight_files(place):
        tensors |= load_file(place / name)
    return tensors


def assert_equal(found, expected):
    """The same names, types, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def assert_converts(source, model, place, options=None):
    """The checkpoint of a tiny model converts to exactly its tensors."""
    convert_checkpoint(source, place, options or ConvertOptions(family=model.hf_family))
    assert_equal(read_tensors(place), expected_hf(model))


def windows(files, copies, nbytes):
    """The bytes that rectangles fill, in new arrays of the window's size, in order."""
    ordered = sorted(copies, key=lambda copy: copy.target)
    for first in range(0, nbytes, read.WINDOW_BYTES):
        window = np.empty(min(read.WINDOW_BYTES, nbytes - first), np.uint8)
        read.fill_window(files, ordered, window, first)
        yield window


def apply_steps(buffer, dtype, steps, *, name, report, out=None):
    """The bytes of one window after the steps."""
    return Stepper(dtype, steps, name, report).apply(buffer, out)
