"""What megatron-core writes for the other tests is what these expect of it."""

from __future__ import annotations

import pytest
from megatron_checkpoints import Layout
from megatron_families import FAMILIES

pytestmark = pytest.mark.megatron

# Layouts of one family must agree, whatever the ranks, the format and the spec. Sequential
# experts and norms of MoE layers have other global keys, hence other values, in another spec.
SAME = {
    "llama": [
        Layout("llama"),
        Layout("llama", tp=2, pp=2),
        Layout("llama", tp=4, format="torch", te=True),
        Layout("llama", pp=2, vpp=2, format="torch"),
        Layout("llama", tp=2, dtype="bf16"),
        Layout("llama", pp=2, first_layers=3, single=True),
        Layout("llama", pp=2, vpp=2, layout="Et|ttt|ttt|tL", format="torch"),
    ],
    "mixtral": [Layout("mixtral"), Layout("mixtral", tp=2, ep=2, etp=1, format="torch")],
    "deepseek": [
        Layout("deepseek", te=True),
        Layout("deepseek", tp=2, pp=2, te=True, format="torch"),
        Layout("deepseek", tp=2, ep=2, te=True),
    ],
}
OTHERS = [Layout(family, te=True, old_args=True) for family in FAMILIES if "-gg" not in family]
OTHERS += [Layout("mixtral-gg", dtype="bf16"), Layout("deepseek-gg", te=True, ep=2)]
OTHERS += [Layout("llama", train=2, dist_opt=True), Layout("llama", tp=2, train=1, format="torch")]


@pytest.fixture(scope="module")
def made(megatron_checkpoints):
    layouts = [layout for group in SAME.values() for layout in group] + OTHERS
    found = megatron_checkpoints(layouts)
    return {item.layout.name: item for item in found}


@pytest.mark.parametrize("family", SAME)
def test_a_family_answers_the_same_under_every_layout(made, family):
    first, *others = (made[layout.name] for layout in SAME[family])
    for other in others:
        assert (other.logits_fp32 - first.logits_fp32).abs().max() < 5e-5


@pytest.mark.parametrize("layout", OTHERS, ids=lambda layout: layout.name)
def test_logits_are_finite_and_differ_from_token_to_token(made, layout):
    logits = made[layout.name].logits_fp32
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 20
    assert (logits[0, 1:] - logits[0, :-1]).abs().amax(-1).min() > 0.1
