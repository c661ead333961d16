"""Whether a served model computes what the original computed, by its answers to token ids."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ckpt.errors import ServeError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

TOP = 20
_SEQUENCES, _POSITIONS = 4, 64
# A value costs about 70 bytes of JSON.
_MOST_VALUES = 100_000


@dataclass(frozen=True)
class Limits:
    """What still counts as the same model; differences count in units of the logits' spread.

    In float32 every position must agree. Half precision is judged by the mean, since a
    router that flips one expert changes one position much; a wrongly wired model is off by
    about the spread itself, everywhere.
    """

    min_cosine: float
    mean_cosine: float
    mean_diff: float
    max_diff: float


_SINGLE = Limits(0.9999, 0.9999, 1e-3, 1e-2)
_HALF = Limits(0.8, 0.99, 0.1, float("inf"))


@dataclass(frozen=True)
class Agreement:
    """The served model against the original, at positions of recorded prompts.

    ``values`` says what was compared; ``spread`` is the standard deviation of the original's
    logits, which differences are held against.
    """

    values: str
    positions: int
    spread: float
    min_cosine: float
    mean_cosine: float
    mean_abs_diff: float
    max_abs_diff: float
    top1: float
    precision: str
    passed: bool

    def as_text(self) -> str:
        """One line for people."""
        word = "agrees" if self.passed else "DOES NOT AGREE"
        return (
            f"{word} with the original: {self.values} at {self.positions} positions, "
            f"cosine min {self.min_cosine:.7f}, mean {self.mean_cosine:.7f}; abs diff mean "
            f"{self.mean_abs_diff:.2e}, max {self.max_abs_diff:.2e} (logits spread over "
            f"{self.spread:.2f}); top-1 agreement {self.top1:.1%}; limits of {self.precision} "
            "precision"
        )

    def as_dict(self) -> dict[str, Any]:
        """The figures for machines."""
        return asdict(self)


@dataclass(frozen=True)
class Question:
    """What is asked: the recorded prompts, and how the server was set up to answer.

    ``max_length`` is the longest context of the server, 0 if that is not known; ``dtypes``
    are those of the stored and of the served model.
    """

    reference: Path
    vocab_size: int
    max_length: int
    dtypes: tuple[str, ...]
    raw_logits: bool


class Scores(Protocol):
    """Who answers: a :class:`~ckpt.serve.client.Client`."""

    def prompt_scores(self, ids: list[int], count: int) -> list[dict[int, float]]:
        """For each position but the last, the values of ``count`` tokens (-1: all) by id."""


def compare_with_original(client: Scores, question: Question) -> Agreement:
    """Send the recorded token ids, and hold what comes back to the recorded logits.

    With ``raw_logits`` the server gives every token's logit; else the log-probabilities of
    its most likely tokens are compared with the original's of the same tokens. Raises
    ServeError when either side has nothing that can be compared.
    """
    ids, logits, recorded_dtype = _read(question)
    if not np.isfinite(logits).all():
        raise ServeError("the recorded logits are NaN or infinite", file=question.reference)
    served: list[NDArray[np.float64]] = []
    original: list[NDArray[np.float64]] = []
    hits = []
    for row, recorded in zip(ids.tolist(), logits.astype(np.float64), strict=True):
        scores = client.prompt_scores(row, -1 if question.raw_logits else TOP)
        for by_token, truth in zip(scores, recorded[:-1], strict=True):
            tokens = sorted(token for token in by_token if token < len(truth))
            answered = np.array([by_token[token] for token in tokens])
            likely = truth if question.raw_logits else _log_softmax(truth)
            served.append(answered)
            original.append(likely[tokens])
            hits.append(tokens[int(answered.argmax())] == int(truth.argmax()))
    values = "logits" if question.raw_logits else f"log-probabilities of the top {TOP} tokens"
    return _measure(
        served, original, values=values, single=is_single((*question.dtypes, recorded_dtype)),
        spread=float(logits.std(axis=-1).mean()), top1=float(np.mean(hits)),
    )  # fmt: skip


def _log_softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = values - values.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def is_single(dtypes: tuple[str, ...]) -> bool:
    """Whether nothing on the way was rounded to less than float32."""
    return set(dtypes) == {"float32"}


def _read(question: Question) -> tuple[NDArray[np.int64], NDArray[np.float32], str]:
    """The part of the recording that is asked about, and the precision it was made with."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - only where a recording is

    file = question.reference
    each = question.vocab_size if question.raw_logits else TOP
    try:
        with safe_open(str(file), framework="np") as tensors:
            ids, logits = tensors.get_slice("input_ids"), tensors.get_slice("logits")
            rows = min(_SEQUENCES, ids.get_shape()[0])
            longest = max(2, _MOST_VALUES // (rows * each))
            length = min(_POSITIONS, longest, ids.get_shape()[1])
            if question.max_length:
                length = min(length, question.max_length - 1)
            dtype = (tensors.metadata() or {}).get("dtype", "float32")
            return ids[:rows, :length], logits[:rows, :length, : question.vocab_size], dtype
    except (OSError, SafetensorError, IndexError, ValueError) as error:
        raise ServeError(
            f"cannot read the original's recorded logits: {error}", file=file
        ) from error


def _measure(
    served: list[NDArray[np.float64]],
    original: list[NDArray[np.float64]],
    *,
    values: str,
    single: bool,
    spread: float,
    top1: float,
) -> Agreement:
    pairs = list(zip(served, original, strict=True))
    if not pairs or not all(np.isfinite(answered).all() for answered in served):
        raise ServeError("the server's values are missing, NaN or infinite")
    if spread <= 0:
        raise ServeError("the original's recorded logits are all the same: a broken recording")
    cosines = [a @ b / (np.linalg.norm(a) * np.linalg.norm(b) + 1e-30) for a, b in pairs]
    apart = np.concatenate([np.abs(a - b) for a, b in pairs])
    limits = _SINGLE if single else _HALF
    unit = max(1.0, spread) if single else spread
    return Agreement(
        values=values,
        positions=len(pairs),
        spread=spread,
        min_cosine=float(min(cosines)),
        mean_cosine=float(np.mean(cosines)),
        mean_abs_diff=float(apart.mean()),
        max_abs_diff=float(apart.max()),
        top1=top1,
        precision="single" if single else "half",
        passed=bool(
            min(cosines) >= limits.min_cosine
            and np.mean(cosines) >= limits.mean_cosine
            and apart.mean() <= limits.mean_diff * unit
            and apart.max() <= limits.max_diff * unit
        ),
    )
