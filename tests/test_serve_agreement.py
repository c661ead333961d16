"""The comparison passes what is the same model and nothing else."""

from __future__ import annotations

import fake_engine
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt.errors import ServeError
from ckpt.serve.agreement import Question, compare_with_original

VOCAB = 50


class Model:
    """Answers as a server does, from logits [B, S, V] for known prompts."""

    def __init__(self, file, change=lambda logits: logits, *, raw=True):
        tensors = load_file(file)
        self.ids, self.raw = tensors["input_ids"].tolist(), raw
        self.logits = change(tensors["logits"][..., :VOCAB].astype(np.float64))
        self.asked = []

    def prompt_scores(self, ids, count):
        self.asked.append(len(ids))
        (number,) = [n for n, row in enumerate(self.ids) if row[: len(ids)] == ids]
        answers = []
        for row in self.logits[number, : len(ids) - 1]:
            values = row if self.raw else row - np.log(np.exp(row).sum())
            best = np.argsort(-row)[: len(row) if count == -1 else count]
            answers.append({int(token): float(values[token]) for token in best})
        return answers


@pytest.fixture
def file(tmp_path):
    place = tmp_path / "original.safetensors"
    fake_engine.write_reference(place, vocab=VOCAB, padded=6)
    return place


def ask(file, change=lambda logits: logits, *, dtype="float32", raw=True, max_length=64):
    model = Model(file, change, raw=raw)
    return compare_with_original(model, Question(file, VOCAB, max_length, (dtype,), raw))


def noise(size):
    return lambda logits: logits + np.random.default_rng(1).normal(size=logits.shape) * size


def roll(logits):
    return np.roll(logits, 1, axis=1)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_same_model_agrees(file, dtype, raw):
    found = ask(file, dtype=dtype, raw=raw)
    assert found.passed
    assert found.top1 == 1.0
    assert found.max_abs_diff < 1e-6
    assert found.positions == 16


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "change", [roll, noise(1.0), np.negative, lambda x: x[..., ::-1], np.zeros_like]
)
def test_another_model_does_not(file, change, dtype, raw):
    assert not ask(file, change, dtype=dtype, raw=raw).passed


def test_rounding_passes_in_half_precision_only(file):
    assert ask(file, noise(0.02), dtype="bfloat16").passed
    assert not ask(file, noise(0.02), dtype="float32").passed


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_rounding_on_the_way_counts_even_if_it_was_not_the_server(file, dtypes):
    model = Model(file, noise(0.02))
    found = compare_with_original(model, Question(file, VOCAB, 64, dtypes, raw_logits=True))
    assert (found.passed, found.precision) == (True, "half")


def test_a_recording_in_half_precision_is_no_better_than_that(file):
    save_file(load_file(file), file, metadata={"dtype": "bfloat16"})
    assert ask(file, noise(0.02)).passed


def test_one_position_off_fails_in_float32(file):
    def change(logits):
        logits[1, 4] = logits[1, 4, ::-1]
        return logits

    assert not ask(file, change).passed


def test_the_limit_goes_with_the_spread_of_the_logits(file, tmp_path):
    quiet = tmp_path / "quiet.safetensors"
    fake_engine.write_reference(quiet, vocab=VOCAB, scale=0.1)
    assert ask(file, noise(0.08), dtype="bfloat16").passed
    assert not ask(quiet, noise(0.08), dtype="bfloat16").passed


def test_nothing_is_asked_beyond_the_context(file):
    assert ask(file, max_length=6).positions == 2 * 4
    assert ask(file, max_length=0).positions == 2 * 8


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_an_error_on_either_side(file, tmp_path, value):
    with pytest.raises(ServeError, match="NaN or infinite"):
        ask(file, lambda logits: logits * value)
    broken = tmp_path / "broken.safetensors"
    tensors = load_file(file)
    tensors["logits"][0, 0, 0] = value
    save_file(tensors, broken)
    with pytest.raises(ServeError, match="NaN or infinite"):
        compare_with_original(
            Model(file), Question(broken, VOCAB, 64, ("float32",), raw_logits=True)
        )


def test_a_recording_that_is_all_the_same_is_an_error(tmp_path):
    flat = tmp_path / "flat.safetensors"
    fake_engine.write_reference(flat, vocab=VOCAB, scale=0.0)
    with pytest.raises(ServeError, match="a broken recording"):
        ask(flat)


@pytest.mark.parametrize("content", [b"", b"12345678nonsense"])
def test_an_unreadable_recording_is_an_error(file, tmp_path, content):
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(content)
    with pytest.raises(ServeError, match="cannot read the original's recorded logits"):
        compare_with_original(
            Model(file), Question(broken, VOCAB, 64, ("float32",), raw_logits=True)
        )


def test_a_recording_without_logits_is_an_error(file, tmp_path):
    broken = tmp_path / "broken.safetensors"
    save_file({"input_ids": np.zeros((1, 4), np.int64)}, broken)
    with pytest.raises(ServeError, match="cannot read the original's recorded logits"):
        compare_with_original(
            Model(file), Question(broken, VOCAB, 64, ("float32",), raw_logits=True)
        )


def test_the_answer_stays_small_for_a_large_vocabulary(tmp_path):
    wide = tmp_path / "wide.safetensors"
    random = np.random.default_rng(3)
    ids = random.integers(0, 4000, (2, 60))
    logits = random.normal(size=(2, 60, 4000)).astype(np.float32)
    save_file({"input_ids": ids, "logits": logits}, wide)
    model = Model(wide)
    model.logits = logits.astype(np.float64)
    found = compare_with_original(model, Question(wide, 4000, 0, ("float32",), raw_logits=True))
    assert model.asked == [12, 12]
    assert found.passed
