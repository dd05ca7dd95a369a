"""Distributions of a running server with OpenAI's API: the most likely tokens of each position, over HTTP."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import contains
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from compress.common.errors import DataError
from compress.evaluate.positions import TopTokens
from compress.evaluate.scorers import Scorer

TOP_TOKENS = 20
"""Alternatives that vLLM and `runtime serve` report at most by default."""
_SECONDS = 600
_REFUSED = (400, 422)

_BY_ID = {"prompt_logprobs": TOP_TOKENS}
_BY_TEXT = tuple({"echo": True, "logprobs": count} for count in (TOP_TOKENS, 5))
"""OpenAI's own API reports 5 alternatives at most."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, named by its address with or without `/v1`."""

    url: str

    @classmethod
    def parse(cls, named: str) -> Server | None:
        """Returns the server of an address; None for any other name."""
        is_address = named.startswith(("http://", "https://"))
        return cls(named.rstrip("/").removesuffix("/v1")) if is_address else None

    def __str__(self) -> str:
        return self.url

    def ask(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Returns the JSON of an answer: to a GET, or to a POST with a body. Raises DataError: there is no answer, or
        another status than 200; HTTPError: the body was refused."""
        content = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}/v1/{route}", content, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=_SECONDS) as answer:
                return json.load(answer)
        except HTTPError as error:
            if error.code in _REFUSED:
                raise
            raise DataError(
                f"{self} gave status {error.code} to /v1/{route}", "Name a server of completions"
            ) from error
        except (URLError, OSError, ValueError) as error:
            raise DataError(f"{self} does not answer: {error}", "Name the address of a running server") from error


class ServerScorer(Scorer):
    """A server asked for log-probabilities of prompts: by token id (`prompt_logprobs`), or else by text (`echo` with
    `logprobs`), of which tokens with the same text are left out."""

    vocab_size = TOP_TOKENS + 1

    def __init__(self, server: Server, tokenizer: Any) -> None:
        """`tokenizer`: of the model that is served. Raises DataError: the server does not answer."""
        self._server, self._tokenizer = server, tokenizer
        self._model = server.ask("models")["data"][0]["id"]
        self._ways: list[dict[str, Any]] = [_BY_ID, *_BY_TEXT]

    def states(self, tokens: Tensor) -> TopTokens:
        """Returns what is known of the tokens after each one of int64 `[B, T]` but the last: `[B, T - 1, K]`."""
        rows = [self._score(row) for row in tokens.tolist()]
        width = max(len(known) for row in rows for known in row)
        padded = [[[*known.items()] + [(-1, -math.inf)] * (width - len(known)) for known in row] for row in rows]
        both = torch.tensor(padded, dtype=torch.float64)
        return TopTokens(both[..., 0].long(), both[..., 1])

    def predict(self, states: TopTokens, who: str) -> TopTokens:
        return states

    def _score(self, tokens: list[int]) -> list[dict[int, float]]:
        """Returns log-probabilities by token of each position of a window but the first. Raises DataError: the server
        does not score prompts, or has another tokenizer."""
        while self._ways:
            try:
                asked = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0} | self._ways[0]
                choice = self._server.ask("completions", asked)["choices"][0]
            except HTTPError:
                choice = {}
            if found := self._read(choice, tokens):
                return found
            del self._ways[0]
        raise DataError(
            f"{self._server} reports no log-probabilities of prompts of {len(tokens)} tokens",
            "Name a server with prompt_logprobs (vLLM, runtime serve), or use a smaller --max-seq-length",
        )

    def _read(self, choice: Mapping[str, Any], tokens: list[int]) -> list[dict[int, float]]:
        """Reads an answer; empty where it has no log-probabilities of the prompt."""
        if self._ways[0] is _BY_ID:
            found = list(_by_id(choice.get("prompt_logprobs") or ()))
        else:
            found = list(self._by_text(choice.get("logprobs") or {}, tokens))
        are_same = len(found) == len(tokens) - 1 and all(map(contains, found, tokens[1:]))
        if found and not are_same:
            problem = f"{self._server} reports other tokens than those of the prompt"
            raise DataError(problem, "Name a server of a model with the same tokenizer")
        return found

    def _by_text(self, columns: Mapping[str, Sequence[Any]], tokens: list[int]) -> Iterator[dict[int, float]]:
        given = zip(columns.get("token_logprobs", ()), columns.get("top_logprobs") or (), tokens, strict=False)
        for actual, top, token in list(given)[1:]:
            known = {self._ids[text]: logprob for text, logprob in (top or {}).items() if text in self._ids}
            yield known | {token: actual}

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Token ids by text, of the texts of one token only."""
        texts = [self._tokenizer.decode([token]) for token in range(len(self._tokenizer))]
        counts = Counter(texts)
        return {text: token for token, text in enumerate(texts) if counts[text] == 1}


def _by_id(entries: Sequence[Mapping[str, Any] | None]) -> Iterator[dict[int, float]]:
    for entry in entries[1:]:
        yield {int(token): each["logprob"] for token, each in (entry or {}).items()}
