"""The metrics: exact on known cases, and no comparison that cannot fail."""

from __future__ import annotations

import math

import pytest
import torch

from ckpt.errors import ValidationError
from ckpt.validate import logits as metrics
from ckpt.validate.logits import check_input_ids, compare, compare_layers


@pytest.fixture
def original():
    return torch.randn(3, 5, 17, generator=torch.Generator().manual_seed(1))


def test_equal_logits_agree_fully(original):
    found = compare(original, original.clone())
    assert found.min_cosine == pytest.approx(1, abs=1e-12)
    assert (found.max_abs_diff, found.max_kl, found.top1) == (0, 0, 1)
    assert (found.positions, found.longest) == (15, 5)
    assert found.passes(min_cosine=0.9999, max_abs_diff=1e-3)


def test_figures_equal_slow_plain_code(original):
    """Each position by Python's own numbers."""
    converted = original + 0.1 * torch.randn(3, 5, 17, generator=torch.Generator().manual_seed(2))
    cosines, kls, tops = [], [], []
    for row, column in ((s, p) for s in range(3) for p in range(5)):
        a, b = original[row, column].tolist(), converted[row, column].tolist()
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        cosines.append(dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b)))
        p = [math.exp(x) / sum(map(math.exp, a)) for x in a]
        q = [math.exp(y) / sum(map(math.exp, b)) for y in b]
        kls.append(sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)))
        tops.append(a.index(max(a)) == b.index(max(b)))
    found = compare(original, converted)
    assert found.min_cosine == pytest.approx(min(cosines))
    assert found.mean_cosine == pytest.approx(sum(cosines) / 15)
    assert found.max_kl == pytest.approx(max(kls))
    assert found.mean_kl == pytest.approx(sum(kls) / 15)
    assert found.top1 == pytest.approx(sum(tops) / 15)
    assert found.mean_abs_diff == pytest.approx(float((original - converted).abs().mean()))


@pytest.mark.parametrize("values", [17, 50, 10**6])
def test_measuring_in_pieces_changes_nothing(original, monkeypatch, values):
    converted = original * 1.01
    whole = compare(original, converted)
    monkeypatch.setattr(metrics, "_CHUNK_VALUES", values)
    assert compare(original, converted) == whole


def test_one_wrong_position_is_named_and_fails_though_the_mean_is_high(original):
    converted = original.clone()
    converted[2, 3] = converted[2, 3].flip(0)
    found = compare(original, converted)
    assert (found.worst_sequence, found.worst_position) == (2, 3)
    assert found.first_position_diff == 0
    assert found.mean_cosine > 0.9
    assert not found.passes(min_cosine=0.9999, max_abs_diff=1e9)


def test_a_scale_fails_though_the_cosine_is_one(original):
    found = compare(original, original * 1.02)
    assert found.min_cosine > 0.999999
    assert not found.passes(min_cosine=0.9999, max_abs_diff=1e-3)


def test_logits_near_zero_must_be_as_exact(original):
    """Else a difference of 1e-3 would be more than such logits can show."""
    found = compare(original * 1e-3, original * 1.02e-3)
    assert found.max_abs_diff < 1e-3
    assert not found.passes(min_cosine=0.9999, max_abs_diff=1e-3)


def test_padding_columns_are_not_compared(original):
    padded = torch.cat([original, torch.full((3, 5, 7), 1e9)], dim=-1)
    assert compare(padded, original).max_abs_diff == 0


def test_nan_in_a_padding_column_does_not_matter(original):
    padded = torch.cat([original, torch.full((3, 5, 1), torch.nan)], dim=-1)
    assert compare(padded, original).max_abs_diff == 0


def broken(original):
    nan, infinite = original.clone(), original.clone()
    nan[1, 2, 3] = torch.nan
    infinite[0, 0, 0] = torch.inf
    return {
        "NaN": nan,
        "infinity": infinite,
        "constant": torch.zeros_like(original),
        "same at every position": original[:1, :1].expand_as(original),
    }


@pytest.mark.parametrize("fault", ["NaN", "infinity", "constant", "same at every position"])
@pytest.mark.parametrize("side", ["original", "converted"])
def test_logits_that_prove_nothing_are_refused_on_either_side(original, fault, side):
    bad = broken(original)[fault]
    pair = (bad, original) if side == "original" else (original, bad)
    with pytest.raises(ValidationError, match=fault):
        compare(*pair)
    with pytest.raises(ValidationError, match=fault):
        compare(bad, bad)


@pytest.mark.parametrize("fault", ["constant", "same at every position"])
def test_all_zero_rows_and_repeated_rows_differ_in_what_is_said(original, fault):
    with pytest.raises(ValidationError, match=fault):
        compare(broken(original)[fault], original)


def test_a_truncated_vocabulary_is_refused(original):
    with pytest.raises(ValidationError, match="fewer columns") as caught:
        compare(original[..., :16], original)
    assert caught.value.found == 16


@pytest.mark.parametrize("shape", [(0, 5, 17), (3, 1, 17), (3, 0, 17), (3, 5, 1)])
def test_too_few_logits_are_refused(shape):
    logits = torch.randn(shape)
    with pytest.raises(ValidationError, match="too few"):
        compare(logits, logits)


@pytest.mark.parametrize("shape", [(2, 5, 17), (3, 4, 17), (17,)])
def test_answers_for_other_positions_are_refused(original, shape):
    with pytest.raises(ValidationError, match="different positions"):
        compare(torch.randn(shape), original)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(0, 4, dtype=torch.long), "no token ids"),
        (torch.arange(4), "no token ids"),
        (torch.tensor([[1], [2]]), "too few positions"),
        (torch.tensor([[1, 17]]), "outside the model's vocabulary"),
        (torch.tensor([[-1, 3]]), "outside the model's vocabulary"),
        (torch.full((2, 8), 5), "one token throughout"),
    ],
)
def test_token_ids_that_prove_nothing_are_refused(ids, message):
    with pytest.raises(ValidationError, match=message):
        check_input_ids(ids, 17)


def test_a_layer_with_another_scale_differs():
    """Its cosine alone is one."""
    state = torch.randn(2, 3, 8)
    found = compare_layers({0: state, 1: state, 5: state}, {0: state, 1: state * 1.02})
    assert set(found) == {0, 1}
    assert found[0].max_relative_diff == 0
    assert found[1].min_cosine == pytest.approx(1)
    assert found[1].max_relative_diff == pytest.approx(0.02, rel=1e-4)


def test_a_layer_with_nan_differs():
    state = torch.randn(2, 3, 8)
    bad = state.clone()
    bad[0, 0, 0] = torch.nan
    assert compare_layers({1: state}, {1: bad})[1].max_relative_diff > 1


def test_layers_of_other_shapes_are_refused():
    with pytest.raises(ValidationError, match="layer 1"):
        compare_layers({1: torch.randn(2, 3, 8)}, {1: torch.randn(2, 3, 9)})
