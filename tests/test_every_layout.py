"""Every family from every format and whatever ranks, bit for bit against slow independent code.

``tiny_megatron`` joins, cuts and renames tensors with plain torch calls and shares nothing with
the layout rules. Sizes differ from one another and each value depends on its tensor's name.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import assert_equal, read_tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_docs_support import is_trained
from tiny_deepspeed import DEEPSPEED_WRITERS
from tiny_megatron import TINY_FAMILIES, WRITERS, Ranks, TinyModel, expected_hf, tensors, whole

from ckpt.arch import ARCHITECTURES
from ckpt.config import ConvertOptions
from ckpt.convert import convert_checkpoint, plan_conversion
from ckpt.sources import FORMATS

EVERY_WRITER = {**WRITERS, **DEEPSPEED_WRITERS}
AXES = {"vocab": 0, "column": 0, "gate_up": 0, "qkv": 0, "gated": 0, "row": 1, "down": 0}


def fits(model: TinyModel, ranks: Ranks) -> bool:
    """Whether Megatron could cut every tensor over these ranks."""
    experts = model.values.num_experts or 1
    if experts % ranks.ep or max(ranks.tp, ranks.expert_tp * ranks.ep) % ranks.tp:
        return False
    for item in tensors(model):
        size = ranks.expert_tp if ".local_experts." in item.name else ranks.tp
        if any(block % size for block in item.blocks):
            return False
        axis = AXES.get(item.kind)
        if axis is None:
            continue
        length = whole(model, item, ranks.tp).shape[axis]
        if length % (size * (2 if item.kind == "gate_up" else 1)):
            return False
    return True


@st.composite
def layouts(draw, family: str, format_: str):
    """A model of the family and ranks that can hold it: depth, stages of any sizes, experts.

    What is drawn first, and alone where one example is asked for, is no simple case: ranks of
    every kind, stages of two sizes.
    """
    layers = draw(st.sampled_from([3, 2, 4, 5, 6]))
    values = TinyModel(family).values
    args: dict[str, object] = {"num_layers": layers}
    if isinstance(values.moe_layer_freq, list):
        dense = draw(st.integers(0, layers - 1))
        args["moe_layer_freq"] = [0] * dense + [1] * (layers - dense)
    model = TinyModel(family, draw(st.sampled_from([torch.bfloat16, torch.float32])), args)
    stages = draw(st.sampled_from([n for n in (2, 1, 3, 4) if n <= layers]))
    vpp = draw(st.sampled_from([n for n in (1, 2, 3) if stages % n == 0]))
    cuts = sorted(
        draw(st.lists(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1,
                      unique=True))
    )  # fmt: skip
    split = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    ep = draw(st.sampled_from([2, 1, 3])) if values.num_experts else 1
    tp = draw(st.sampled_from([2, 1, 4]))
    etp = draw(st.sampled_from([1, None, 2])) if values.num_experts else None
    if etp and format_ == "torch":  # more of them than TP ranks would share files
        etp = min(etp, tp)
    ranks = Ranks(tp, stages // vpp, vpp, ep, etp, split)
    if not fits(model, ranks):
        ranks = Ranks(1, stages // vpp, vpp, ep, None, split)
    options = {"te": draw(st.sampled_from([True, False]))}
    if values.num_experts:
        options["grouped"] = draw(st.sampled_from([True, False]))
    return model, ranks, options


EVERY = [
    (family, format_)
    for family in TINY_FAMILIES
    for format_, writer in EVERY_WRITER.items()
    if writer.holds(TinyModel(family))
]
EVERY_PAIR = pytest.mark.parametrize(("family", "format_"), EVERY, ids=map("-".join, EVERY))
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}


@EVERY_PAIR
@given(data=st.data())
@settings(max_examples=1, **SETTINGS)
def test_ranks_of_every_format_give_the_exact_tensors(family, format_, data):
    """One layout of ranks of every kind; more of them in the slow tests."""
    assert_exact(family, format_, data)


@pytest.mark.slow
@EVERY_PAIR
@given(data=st.data())
@settings(max_examples=3, **SETTINGS)
def test_any_ranks_of_any_format_give_the_exact_tensors(family, format_, data):
    """Stages and ranks of whatever sizes."""
    assert_exact(family, format_, data)


def assert_exact(family, format_, data):
    """Names, types, shapes and every bit."""
    model, ranks, options = data.draw(layouts(family, format_))
    with tempfile.TemporaryDirectory() as place:
        root, out = Path(place) / "run", Path(place) / "out"
        root.mkdir()
        EVERY_WRITER[format_].write(root, model, ranks, **options)
        convert_checkpoint(root, out, ConvertOptions(family=model.hf_family))
        found = read_tensors(out)
    expected = expected_hf(model)
    if EVERY_WRITER[format_].fp32:
        expected = {name: value.float() for name, value in expected.items()}
    assert_equal(found, expected)


@pytest.fixture(scope="module")
def reached(tmp_path_factory):
    """The family of the registry that each tiny one converts to."""
    found = {}
    for family in TINY_FAMILIES:
        model = TinyModel(family)
        source = tmp_path_factory.mktemp(family)
        WRITERS["torch"].write(source, model, Ranks())
        plan = plan_conversion(source, ConvertOptions(family=model.hf_family))
        found[family] = plan.architecture.name
    return found


def test_every_family_and_format_of_the_registries_is_among_them(reached):
    """A new table, and a new source, need tiny checkpoints of their own."""
    assert set(reached.values()) == set(ARCHITECTURES)
    assert set(EVERY_WRITER) == set(FORMATS)


@pytest.mark.parametrize("format_", FORMATS)
def test_the_table_of_support_claims_what_is_run(reached, format_):
    """Each yes in the documents is a pair of family and format above."""
    run = {reached[name] for name, format_of_pair in EVERY if format_of_pair == format_}
    assert {name for name in ARCHITECTURES if is_trained(name, format_)} <= run
