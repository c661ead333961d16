"""Questions to a running server: is it up, does it answer, does it agree with the original."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from ckpt.errors import ServeError

if TYPE_CHECKING:
    from pathlib import Path

_TOP = 20
_SEQUENCES, _POSITIONS = 4, 64
_LIMITS = {"float32": (0.9999, 1e-2), "float16": (0.999, 0.1), "bfloat16": (0.98, 0.15)}


@dataclass(frozen=True)
class Agreement:
    """The served model against the original: logits (or log-probabilities) of prompt tokens.

    ``values`` says what was compared. The cosine is the least over positions; the mean
    absolute difference is over all values, the maximum over positions.
    """

    values: str
    positions: int
    min_cosine: float
    mean_abs_diff: float
    max_abs_diff: float
    passed: bool

    def as_text(self) -> str:
        """One line for people."""
        word = "agrees" if self.passed else "DOES NOT AGREE"
        return (
            f"{word} with the original: {self.values} at {self.positions} positions, cosine min "
            f"{self.min_cosine:.6f}, abs diff mean {self.mean_abs_diff:.2e}, "
            f"max {self.max_abs_diff:.2e}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The figures for machines."""
        return asdict(self)


@dataclass(frozen=True)
class Answer:
    """A streamed chat answer with its times in seconds."""

    prompt: str
    text: str
    pieces: int
    first_piece_seconds: float
    seconds: float

    def as_text(self) -> str:
        """The dialogue and the timings."""
        return (
            f"user: {self.prompt}\nassistant: {self.text}\n"
            f"({self.pieces} pieces, first after {self.first_piece_seconds:.2f} s, "
            f"all in {self.seconds:.2f} s)"
        )


class Client:
    """Speaks to one server."""

    def __init__(self, url: str, model: str, timeout_seconds: float = 120.0) -> None:
        """``url`` without a path; ``model`` as requests name it."""
        self.url, self.model = url, model
        # trust_env: a proxy of the environment must not stand before a local server.
        self._http = httpx.Client(base_url=url, timeout=timeout_seconds, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def is_healthy(self) -> bool:
        """Whether ``/health`` answers 200."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def complete(self, prompt: list[int] | str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        """One completion; raises ServeError unless it is a real one."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields
        }  # fmt: skip
        choice = self._post("/v1/completions", body)
        if choice.get("finish_reason") not in {"stop", "length"}:
            raise ServeError(
                "the server gave up a completion",
                expected="finish_reason stop or length",
                found=choice.get("finish_reason"),
            )
        return choice

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise ServeError(f"no answer to {path}: {type(error).__name__} {error}") from error
        if response.status_code != httpx.codes.OK:
            raise ServeError(
                f"{path} failed with HTTP {response.status_code}: {response.text[:300]}"
            )
        try:
            choice: dict[str, Any] = response.json()["choices"][0]
        except (ValueError, KeyError, IndexError) as error:
            raise ServeError(f"{path} answered without a choice: {response.text[:300]}") from error
        return choice

    def chat(self, prompt: str, *, max_tokens: int = 64) -> Answer:
        """A streamed answer to one user message; raises ServeError when none comes."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        started, first, pieces = time.monotonic(), 0.0, []
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    text = response.read().decode("utf-8", "replace")[:300]
                    raise ServeError(f"chat failed with HTTP {response.status_code}: {text}")
                for line in response.iter_lines():
                    piece = _delta(line)
                    if piece:
                        first = first or time.monotonic() - started
                        pieces.append(piece)
        except httpx.HTTPError as error:
            raise ServeError(f"the chat answer broke off: {error}") from error
        if not pieces:
            raise ServeError("the chat answer is empty")
        seconds = time.monotonic() - started
        return Answer(prompt, "".join(pieces), len(pieces), first, seconds)

    def prompt_scores(self, ids: list[int], count: int) -> list[dict[int, float]]:
        """For each position but the last, the values of ``count`` tokens (-1: all) by id."""
        choice = self.complete(ids, prompt_logprobs=count)
        rows = choice.get("prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(ids):
            raise ServeError("the server gave no log-probabilities of the prompt")
        return [
            {int(token): float(entry["logprob"]) for token, entry in row.items()}
            for row in rows[1:]
        ]


def _delta(line: str) -> str:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return ""
    try:
        choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
    except ValueError:
        return ""
    return (choices[0].get("delta") or {}).get("content") or ""


def compare_with_original(
    client: Client, reference: Path, *, vocab_size: int, dtype: str, raw_logits: bool
) -> Agreement:
    """Send the recorded token ids, and hold what comes back to the recorded logits.

    With ``raw_logits`` the server gives every token's logit; else the log-probabilities of
    its most likely tokens are compared with the original's of the same tokens. Raises
    ServeError when the server gives nothing that can be compared.
    """
    ids, logits = _read(reference, vocab_size)
    served, original = [], []
    for row, recorded in zip(ids.tolist(), logits, strict=True):
        scores = client.prompt_scores(row, -1 if raw_logits else _TOP)
        for position, values in enumerate(scores):
            tokens = sorted(token for token in values if token < vocab_size)
            truth = recorded[position].astype(np.float64)
            if not raw_logits:
                truth = truth - truth.max() - np.log(np.exp(truth - truth.max()).sum())
            served.append(np.array([values[token] for token in tokens]))
            original.append(truth[tokens])
    return _measure(served, original, dtype=dtype, raw_logits=raw_logits)


def _read(reference: Path, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    from safetensors.numpy import load_file  # noqa: PLC0415 - only where a reference is

    tensors = load_file(reference)
    ids = tensors["input_ids"][:_SEQUENCES, :_POSITIONS]
    return ids, tensors["logits"][:_SEQUENCES, :_POSITIONS, :vocab_size]


def _measure(
    served: list[np.ndarray], original: list[np.ndarray], *, dtype: str, raw_logits: bool
) -> Agreement:
    pairs = list(zip(served, original, strict=True))
    if not pairs or any(not np.isfinite(a).all() for a, _ in pairs):
        raise ServeError("the server's values are missing, NaN or infinite")
    cosines = [a @ b / (np.linalg.norm(a) * np.linalg.norm(b) + 1e-30) for a, b in pairs]
    largest = [float(np.abs(a - b).max()) for a, b in pairs]
    mean = float(np.mean(np.concatenate([np.abs(a - b) for a, b in pairs])))
    cosine_limit, mean_limit = _LIMITS.get(dtype, _LIMITS["bfloat16"])
    return Agreement(
        values="logits" if raw_logits else f"log-probabilities of the top {_TOP} tokens",
        positions=len(pairs),
        min_cosine=float(min(cosines)),
        mean_abs_diff=mean,
        max_abs_diff=max(largest),
        passed=min(cosines) >= cosine_limit and mean <= mean_limit,
    )
