"""Casts, +1 on gains and ranks' copies taken together: torch is the judge of every bit."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from converted import apply_steps
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.convert import maps
from ckpt.convert.maps import CastReport, Stepper
from ckpt.convert.nonfinite import NonfiniteCount
from ckpt.convert.rounding import INFINITY
from ckpt.convert.steps import AddOne, Cast, Combined
from ckpt.tensors import Combine, DType

TARGETS = [DType.F32, DType.BF16, DType.F16]
NARROW = [DType.BF16, DType.F16, DType.F8_E4M3, DType.F8_E5M2]
WIDE = [DType.F32, DType.F64]
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def kind(dtype):
    return f"u{dtype.itemsize}"


def in_torch(bits, dtype):
    """The same bits as a tensor."""
    signed = torch.from_numpy(bits.view(f"i{dtype.itemsize}").copy())
    return signed.view(getattr(torch, dtype.torch_name))


def bits_of(values, dtype):
    return values.contiguous().view(SIGNED[dtype.itemsize]).numpy().view(kind(dtype))


def ordered(*values, dtype):
    """Patterns around each of these magnitudes, with both signs."""
    near = {max(0, value + step) for value in values for step in (-2, -1, 0, 1, 2)}
    top = 1 << (8 * dtype.itemsize - 1)
    return np.array([sign | v for v in near if v < top for sign in (0, top)], kind(dtype))


def edges(dtype):
    """All classes of a wide type: what each target's rounding, limits and subnormals hang on."""
    fraction, bias = (23, 127) if dtype is DType.F32 else (52, 1023)
    magnitudes = [0, 1 << fraction, INFINITY[dtype], (1 << (8 * dtype.itemsize - 1)) - 1]
    for exponent in (*range(-152, -124), *range(-27, -12), -1, 0, 1, 14, 15, 16, 126, 127, 128):
        for kept in (7, 10, 23):
            for tail in ("0", "01", "1", "11", "0111", "1001", "1111111111111111111111111"):
                for last in (0, 1, (1 << kept) - 1):
                    field = last << fraction - kept
                    cut = int((tail + 64 * "0")[: fraction - kept] or "0", 2)
                    if exponent + bias > 0:
                        magnitudes.append((exponent + bias << fraction) | field | cut)
                    elif kept == 7:  # subnormal float32: single bits
                        magnitudes += [1 << n for n in range(fraction)]
                        magnitudes += [3 << n for n in range(fraction - 1)]
    quiet = 1 << fraction - 1
    payloads = [INFINITY[dtype] | p for p in (1, quiet, quiet | 1, quiet - 1, 2 * quiet - 1)]
    return ordered(*magnitudes, *payloads, dtype=dtype)


def check_cast(bits, source, to):
    """Every bit of a number, and the counts; a NaN is a NaN of the same sign."""
    report = CastReport()
    done = apply_steps(bits.view(np.uint8), source, (Cast(to),), name="w", report=report)
    found, values = done.view(kind(to)), in_torch(bits, source)
    truth = values.to(getattr(torch, to.torch_name))
    nan = torch.isnan(truth).numpy()
    assert np.array_equal(found[~nan], bits_of(truth, to)[~nan])
    assert torch.isnan(in_torch(found, to)).numpy().tolist() == nan.tolist()
    assert np.array_equal(
        found[nan] >> (8 * to.itemsize - 1), bits[nan] >> (8 * source.itemsize - 1)
    )
    # float64 of all values: torch cannot compare all types of 8 bits.
    stored = values.double()
    over = int((torch.isinf(truth) & ~torch.isinf(stored)).sum())
    under = int(((truth == 0) & (stored != 0)).sum())
    assert report.overflowed == ({"w": over} if over else {})
    assert report.underflowed == ({"w": under} if under else {})
    return report


@pytest.mark.parametrize("to", TARGETS, ids=lambda d: d.name)
@pytest.mark.parametrize("source", NARROW, ids=lambda d: d.name)
def test_every_value_of_8_and_16_bits_is_cast_as_torch_casts_it(source, to):
    check_cast(np.arange(2 ** (8 * source.itemsize)).astype(kind(source)), source, to)


@pytest.mark.parametrize("to", TARGETS, ids=lambda d: d.name)
@pytest.mark.parametrize("source", WIDE, ids=lambda d: d.name)
def test_subnormals_ties_limits_infinities_and_nan_are_cast_as_torch_casts_them(source, to):
    """Together, and each by itself: a piece in which nothing is lost is not looked at twice."""
    bits = edges(source)
    report = check_cast(bits, source, to)
    if source.itemsize > to.itemsize:
        assert report.overflowed
        assert report.underflowed
    for number in range(0, len(bits), 37):
        check_cast(bits[number : number + 1], source, to)


@pytest.mark.parametrize("to", [DType.BF16, DType.F16], ids=lambda d: d.name)
def test_every_float32_of_some_exponents_is_cast_as_torch_casts_it(to):
    """All 2^16 ends of a float32 under the edges of either target, and in between."""
    for start in (0x0000, 0x0001, 0x007F, 0x3300, 0x3380, 0x387F, 0x3F80, 0x3F81, 0x477F, 0x7F7F,
                  0x7F80, 0x7FFF, 0x8000, 0xC77F, 0xFF7F, 0xFFFF):  # fmt: skip
        check_cast((start << 16) + np.arange(2**16, dtype=np.uint32), DType.F32, to)


@settings(deadline=None, max_examples=100)
@given(
    source=st.sampled_from(WIDE), to=st.sampled_from(TARGETS), seed=st.integers(0, 2**32),
    exponents=st.sampled_from([None, (-150, -125), (-30, -10), (-10, 18), (125, 128)]),
)  # fmt: skip
def test_random_bits_are_cast_as_torch_casts_them(source, to, seed, exponents):
    """Of any exponent, or of those where a target has its subnormals, its limit, its infinity."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2 ** (8 * source.itemsize), 999, kind(source))
    if exponents is not None:
        fraction, bias = (23, 127) if source is DType.F32 else (52, 1023)
        chosen = np.maximum(rng.integers(*exponents, 999) + bias, 0).astype(bits.dtype)
        bits &= bits.dtype.type(1 << 8 * source.itemsize - 1 | (1 << fraction) - 1)
        bits |= chosen << bits.dtype.type(fraction)
    check_cast(bits, source, to)


def test_a_nan_keeps_its_sign_and_the_leading_bits_of_its_payload():
    """In bfloat16 it does not depend on where in a tensor it stands."""
    bits = np.array([0x7F800001, 0xFFFFFFFF, 0x7FA12345, 0xFF810000] * 5, np.uint32)
    for count in (1, 2, 4, 20):
        done = apply_steps(
            bits[:count].view(np.uint8), DType.F32, (Cast(DType.BF16),), name="w",
            report=CastReport(),
        )  # fmt: skip
        assert done.view(np.uint16).tolist() == ([0x7FC0, 0xFFFF, 0x7FE1, 0xFFC1] * 5)[:count]


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW], ids=lambda d: d.name)
@pytest.mark.parametrize("amount", [1, -1])
def test_one_is_added_in_float32_as_torch_adds_it(dtype, amount):
    """Also where another cast follows, whose losses are counted against the sum."""
    if dtype in NARROW:
        bits = np.arange(2 ** (8 * dtype.itemsize)).astype(kind(dtype))
    else:
        bits = edges(dtype)
    values = in_torch(bits, dtype)
    total = values.float() + amount
    for to in (None, DType.BF16, DType.F16):
        report = CastReport()
        steps = (AddOne(amount), *([Cast(to)] if to else []))
        done = apply_steps(bits.view(np.uint8), dtype, steps, name="w", report=report)
        truth = total.to(getattr(torch, (to or DType.F32).torch_name))
        found = done.view(kind(to or DType.F32))
        nan = torch.isnan(truth).numpy()
        assert np.array_equal(found[~nan], bits_of(truth, to or DType.F32)[~nan])
        assert torch.isnan(in_torch(found, to or DType.F32)).numpy().tolist() == nan.tolist()
        over = int((truth.isinf() & ~total.isinf()).sum())
        under = int(((truth == 0) & (total != 0)).sum())
        assert report.overflowed == ({"w": over} if over else {})
        assert report.underflowed == ({"w": under} if under else {})


@pytest.mark.parametrize("dtype", [DType.F64, *TARGETS], ids=lambda d: d.name)
@pytest.mark.parametrize("how", [Combine.MEAN, Combine.SUM])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_copies_are_taken_together_as_torch_does_it(dtype, how, ranks):
    """Few enough bits that float64 holds the sum exactly in any order; one sum overflows."""
    rng = np.random.default_rng(ranks)
    values = torch.from_numpy(rng.standard_normal((ranks, 5003))).to(
        getattr(torch, dtype.torch_name)
    )
    if dtype is DType.F64:
        values = values.float().double()
    values[:, 7] = torch.finfo(values.dtype).max
    values[0, 11], values[1, 13], values[:, 17] = math.inf, math.nan, -0.0
    values[:, 19] = values[0, 19]
    report = CastReport()
    bits = bits_of(values, dtype)
    steps = (Combined(how, ranks),)
    done = apply_steps(bits.view(np.uint8), dtype, steps, name="w", report=report)
    total = values.double().sum(0)
    truth = (total / (ranks if how is Combine.MEAN else 1)).to(values.dtype)
    found = in_torch(done.view(kind(dtype)), dtype)
    numbers = ~torch.isnan(truth)
    assert torch.equal(found[numbers], truth[numbers])
    assert torch.equal(torch.signbit(found[numbers]), torch.signbit(truth[numbers]))
    assert torch.isnan(found).tolist() == torch.isnan(truth).tolist()
    over = int((truth.isinf() & ~total.isinf()).sum())
    assert report.overflowed == ({"w": over} if over else {})
    assert over == (1 if how is Combine.SUM and dtype is not DType.F64 else 0)
    if how is Combine.MEAN:
        assert found[19] == values[0, 19]


def test_copies_are_added_in_the_order_of_the_ranks():
    """Beyond 53 bits the order matters; torch's own differs with the length of the tensor."""
    values = np.array([[1e30, 1.0], [1.0, 1e-17], [-1e30, 1e-17], [3.0, -1.0]])
    done = apply_steps(
        values.view(np.uint8), DType.F64, (Combined(Combine.SUM, 4),), name="w", report=CastReport()
    )
    assert done.view(np.float64).tolist() == [1e30 + 1.0 - 1e30 + 3.0, 1.0 + 1e-17 + 1e-17 - 1.0]


@pytest.mark.parametrize("shift", range(9))
@pytest.mark.parametrize("steps", [(Cast(DType.BF16),), (Cast(DType.F16),), (AddOne(),),
                                   (AddOne(), Cast(DType.BF16)), ()], ids=str)  # fmt: skip
def test_the_result_lands_at_any_address_and_nowhere_else(monkeypatch, shift, steps):
    """In pieces of any size; the source lies at any address as well."""
    monkeypatch.setattr(maps, "PIECE", 37)
    values = np.linspace(-2, 2, 401, dtype=np.float32)
    stored = np.zeros(values.nbytes + 8, np.uint8)
    stored[8 - shift % 8 :][: values.nbytes] = values.view(np.uint8)
    stored = stored[8 - shift % 8 :][: values.nbytes]
    whole = apply_steps(values.view(np.uint8), DType.F32, steps, name="w", report=CastReport())
    room = np.full(whole.size + 16, 0xA5, np.uint8)
    out = room[shift : shift + whole.size]
    done = apply_steps(stored, DType.F32, steps, name="w", report=CastReport(), out=out)
    assert done is out
    assert np.array_equal(room[shift : shift + whole.size], whole)
    assert set(room[:shift]) | set(room[shift + whole.size :]) == {0xA5}


def test_pieces_give_the_bytes_and_counts_of_the_whole(monkeypatch):
    """Losses in some pieces and in others none."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal(5000).astype(np.float32)
    values[[3, 700, 4999]], values[[17, 2500]], values[100:400] = 1e30, 1e-30, 0
    found = {}
    for size in (1, 64, 999, 5000):
        monkeypatch.setattr(maps, "PIECE", size)
        report = CastReport()
        done = apply_steps(
            values.view(np.uint8), DType.F32, (Cast(DType.F16),), name="w", report=report
        )
        found[size] = done.tobytes()
        assert (report.overflowed, report.underflowed) == ({"w": 3}, {"w": 2})
    assert len(set(found.values())) == 1


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16], ids=lambda d: d.name)
@pytest.mark.parametrize(
    "steps", [(), (Cast(DType.BF16),), (Cast(DType.F16),), (AddOne(),)], ids=str
)
def test_values_that_are_no_numbers_are_counted_on_the_way(monkeypatch, dtype, steps):
    """As the stored bytes alone would say; what overflows in the cast was a number."""
    monkeypatch.setattr(maps, "PIECE", 16)
    values = torch.linspace(-3, 3, 300)
    values[[40, 41, 77, 299]] = torch.tensor([math.nan, math.inf, -math.inf, -math.nan])
    values[5] = 60000.0 if dtype is DType.F16 else 1e30
    bits = bits_of(values.to(getattr(torch, dtype.torch_name)), dtype)
    found, alone = NonfiniteCount(dtype), NonfiniteCount(dtype)
    stepper = Stepper(dtype, steps, "w", CastReport(), found)
    for part in np.split(bits, 3):
        stepper.apply(part.view(np.uint8))
        alone.add(part.view(np.uint8))
    assert (found.count, found.first) == (alone.count, alone.first)
    assert found.count == 4


def test_of_ranks_copies_the_one_that_is_no_number_is_known():
    """By rank and byte, as when the stored bytes are looked at by themselves."""
    values = np.ones((3, 50), np.float32)
    values[1, 33] = np.inf
    found = NonfiniteCount(DType.F32)
    stepper = Stepper(DType.F32, (Combined(Combine.MEAN, 3),), "w", CastReport(), found)
    stepper.apply(values.view(np.uint8))
    assert (found.count, found.first) == (1, (1, 132))


@pytest.mark.parametrize("to", [DType.F8_E4M3, DType.F8_E5M2, DType.F64, DType.I8], ids=str)
@pytest.mark.parametrize("source", [DType.F32, DType.F16], ids=str)
def test_a_type_that_nothing_is_converted_to_is_no_target(source, to):
    with pytest.raises(ValueError, match=f"no cast to {to.name}"):
        apply_steps(np.zeros(8, np.uint8), source, (Cast(to),), name="w", report=CastReport())


def test_halfway_between_two_values_the_even_one_is_taken():
    """Written down by hand, without torch."""
    pairs = {0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81, 0x7F7F8000: 0x7F80,
             0x7F7F7FFF: 0x7F7F, 0x00008000: 0, 0x00008001: 1, 0x80018000: 0x8002}  # fmt: skip
    stored = np.frombuffer(struct.pack(f"{len(pairs)}I", *pairs), np.uint8)
    report = CastReport()
    done = apply_steps(stored, DType.F32, (Cast(DType.BF16),), name="w", report=report)
    assert done.view(np.uint16).tolist() == list(pairs.values())
    assert (report.overflowed, report.underflowed) == ({"w": 1}, {"w": 1})
