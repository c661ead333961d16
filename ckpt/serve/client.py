"""Requests to one OpenAI-compatible server."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from ckpt.errors import ServeError

_EXCERPT = 300


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

    def as_dict(self) -> dict[str, Any]:
        """The answer for machines."""
        return asdict(self)


class Client:
    """Speaks to one server."""

    def __init__(self, url: str, model: str, *, api_key: str | None = None) -> None:
        """``url`` without a path; ``model`` as requests name it."""
        self.url, self.model = url, model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # trust_env: a proxy of the environment must not stand before a local server.
        self._http = httpx.Client(base_url=url, timeout=120.0, trust_env=False, headers=headers)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def is_healthy(self) -> bool:
        """Whether ``/health`` answers 200."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def model_names(self) -> list[str]:
        """The names under which the server offers models."""
        content = self._json("GET", "/v1/models")
        return [str(item.get("id")) for item in content.get("data") or []]

    def complete(
        self,
        prompt: list[int] | str,
        *,
        timeout_seconds: float = 120.0,
        **fields: Any,  # noqa: ANN401 - JSON
    ) -> dict[str, Any]:
        """One completion; raises ServeError unless it is a real one."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields
        }  # fmt: skip
        content = self._json("POST", "/v1/completions", body, timeout_seconds)
        try:
            choice: dict[str, Any] = content["choices"][0]
            reason = choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServeError(f"an answer without a choice: {str(content)[:_EXCERPT]}") from error
        if reason not in {"stop", "length"}:
            raise ServeError(
                "the server gave up a completion",
                expected="finish_reason stop or length",
                found=reason,
            )
        return choice

    def _json(
        self, method: str, path: str, body: object = None, timeout_seconds: float = 30.0
    ) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, json=body, timeout=timeout_seconds)
        except httpx.HTTPError as error:
            raise ServeError(f"no answer from {path}: {type(error).__name__} {error}") from error
        if response.status_code != httpx.codes.OK:
            raise ServeError(
                f"{path} failed with HTTP {response.status_code}: {response.text[:_EXCERPT]}"
            )
        try:
            content = response.json()
        except ValueError as error:
            raise ServeError(f"{path} answered no JSON: {response.text[:_EXCERPT]}") from error
        if not isinstance(content, dict):
            raise ServeError(f"{path} answered no object: {response.text[:_EXCERPT]}")
        return content

    def chat(self, prompt: str, *, max_tokens: int = 64) -> Answer:
        """A streamed answer to one user message; raises ServeError when none comes."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        started, first, pieces, ended = time.monotonic(), 0.0, [], False
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    text = response.read().decode("utf-8", "replace")[:_EXCERPT]
                    raise ServeError(f"chat failed with HTTP {response.status_code}: {text}")
                for line in response.iter_lines():
                    piece, last = _chunk(line)
                    ended = ended or last
                    if piece:
                        first = first or time.monotonic() - started
                        pieces.append(piece)
        except httpx.HTTPError as error:
            raise ServeError(f"the chat answer broke off: {error}") from error
        if not ended:
            raise ServeError("the chat answer broke off", found=f"{len(pieces)} pieces, no end")
        seconds = time.monotonic() - started
        return Answer(prompt, "".join(pieces), len(pieces), first, seconds)

    def prompt_scores(self, ids: list[int], count: int) -> list[dict[int, float]]:
        """For each position but the last, the values of ``count`` tokens (-1: all) by id."""
        choice = self.complete(ids, prompt_logprobs=count, timeout_seconds=600.0)
        rows = choice.get("prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(ids):
            raise ServeError("the server gave no log-probabilities of the prompt")
        return [
            {int(token): float(entry["logprob"]) for token, entry in row.items()}
            for row in rows[1:]
        ]


def _chunk(line: str) -> tuple[str, bool]:
    """The text of one line of a stream, and whether it names the end of the answer."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return "", False
    try:
        choice = (json.loads(line.removeprefix("data: ")).get("choices") or [{}])[0]
    except (ValueError, AttributeError):
        return "", False
    text = (choice.get("delta") or {}).get("content") or ""
    return text, choice.get("finish_reason") in {"stop", "length"}
