"""`/v1/completions` and `/v1/embeddings`."""

from __future__ import annotations

import asyncio
import logging
import struct
from base64 import b64encode
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from runtime.core.request import Delta, FinishReason, RequestOptions, SamplingParams, TokenLogprobs
from runtime.server.protocol import CompletionRequest, Prompt, Strict, check_prompt, separate_prompts
from runtime.server.response_models import (
    BODY_ERRORS,
    MAY_STREAM,
    CompletionLogprobs,
    CompletionResponse,
    EmbeddingResponse,
    json_number,
    token_text,
)
from runtime.server.serving import Job, Service, Tokenizer, account_of, respond_at_once

DEFAULT_MAX_TOKENS = 16


MAX_SKIPPED_BYTES = 8
"""Distance up to which a prompt token is searched in the text."""


class CompletionLogprobsWriter:
    """Writes `logprobs` of one completion choice incrementally; offsets count characters from the start of its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.offset = 0

    def write(self, pairs: Iterable[tuple[int, TokenLogprobs]]) -> CompletionLogprobs:
        """Returns the log-probabilities of new tokens of the answer."""
        written = empty_logprobs()
        for token_id, found in pairs:
            self.add(written, token_id, found)
            self.offset += count_characters(self.tokenizer.token_bytes(token_id))
        return written

    def write_prompt(self, text: str, token_ids: Sequence[int], found: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Returns the log-probabilities of a prompt that precedes the answer as `text`; the first token has none.

        Args:
            found: log-probabilities of every token but the first.
        """
        written = empty_logprobs()
        raw_text, place = text.encode(), 0
        for token_id, scored in zip(token_ids, (None, *found), strict=True):
            self.add(written, token_id, scored)
            stop = end_of(self.tokenizer.token_bytes(token_id), raw_text, place)
            self.offset += count_characters(raw_text[place:stop])
            place = stop
        self.offset = len(text)
        return written

    def add(self, written: CompletionLogprobs, token_id: int, found: TokenLogprobs | None) -> None:
        written["tokens"].append(token_text(self.tokenizer.token_bytes(token_id)))
        written["token_logprobs"].append(json_number(found.logprob) if found else None)
        written["top_logprobs"].append(self.top(token_id, found) if found else None)
        written["text_offset"].append(self.offset)

    def top(self, token_id: int, found: TokenLogprobs) -> dict[str, float]:
        """Returns alternatives by text, best first, with the sampled token; the best of tokens with equal text
        counts."""
        entries: dict[str, float] = {}
        for alternative, logprob in (*found.top, (token_id, found.logprob)):
            entries.setdefault(token_text(self.tokenizer.token_bytes(alternative)), json_number(logprob))
        return entries


def empty_logprobs() -> CompletionLogprobs:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def join_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def end_of(token: bytes, text: bytes, place: int) -> int:
    """Returns the end of a prompt token in the text, searched from `place`; `place` if it cannot be found.

    The text omits a beginning-of-sequence token and a first space, and replaces parts of characters.
    """
    for raw in (token, token.lstrip(b" ")):
        found = text.find(raw, place, place + len(raw) + MAX_SKIPPED_BYTES)
        if found >= 0:
            return found + len(raw)
    return place


def count_characters(raw: bytes) -> int:
    return sum(byte & 0xC0 != 0x80 for byte in raw)  # first bytes of characters


@dataclass
class EchoedPrompt:
    """A prompt to return before its answers. They share it: only the first delivers its log-probabilities."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass
class CompletionShape:
    """Choices of `text_completion` objects.

    Attributes:
        echoed: one prompt per choice; empty for no echo.
        with_logprobs: report them in every choice.
    """

    tokenizer: Tokenizer
    echoed: list[EchoedPrompt]
    with_logprobs: bool
    writers: dict[int, CompletionLogprobsWriter] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    id_prefix: str = "cmpl"
    whole_object: str = "text_completion"
    chunk_object: str = "text_completion"

    def opening(self) -> list[dict[str, Any]]:
        return []

    def parts(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        parts = []
        if self.echoed and index not in self.begun:
            self.begun.add(index)
            parts.append(self.choice(index, self.echoed[index].text, self.prompt_logprobs(index, delta)))
        if delta.text or delta.logprobs:
            parts.append(self.choice(index, delta.text, self.logprobs(index, delta)))
        return parts

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self.choice(index, "", None, reason)

    def whole(self, index: int, output: Delta) -> dict[str, Any]:
        text = self.echoed[index].text if self.echoed else ""
        prompt, answer = self.prompt_logprobs(index, output), self.logprobs(index, output)
        joined = join_logprobs(prompt, answer) if prompt and answer else answer
        return self.choice(index, text + output.text, joined, output.finish_reason)

    def prompt_logprobs(self, index: int, found: Delta) -> CompletionLogprobs | None:
        """Returns those of an echoed prompt, which the engine delivers with the first answer only."""
        if not self.with_logprobs or not self.echoed:
            return None
        prompt = self.echoed[index]
        prompt.logprobs = prompt.logprobs or found.prompt_logprobs
        return self.writer(index).write_prompt(prompt.text, prompt.token_ids, prompt.logprobs)

    def logprobs(self, index: int, found: Delta) -> CompletionLogprobs | None:
        if not self.with_logprobs:
            return None
        return self.writer(index).write(zip(found.token_ids, found.logprobs, strict=True))

    def writer(self, index: int) -> CompletionLogprobsWriter:
        return self.writers.setdefault(index, CompletionLogprobsWriter(self.tokenizer))

    def choice(
        self, index: int, text: str, logprobs: CompletionLogprobs | None = None, reason: FinishReason | None = None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def completions_router(service: Service) -> APIRouter:
    """The route of completions."""
    router = APIRouter()
    tokenizer = service.tokenizer

    @router.post("/v1/completions", response_model=CompletionResponse, responses=MAY_STREAM)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continues one or several prompts."""
        service.check_model(body.model)
        prompts = separate_prompts(body.prompt)
        token_ids = await asyncio.to_thread(service.encode_prompts, prompts)
        context = service.limits.max_model_len
        samplings = [body.sampling_params(len(ids), context, DEFAULT_MAX_TOKENS) for ids in token_ids]
        texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
        echoed = [EchoedPrompt(*prompt) for prompt in zip(texts, token_ids, strict=True)] if body.echo else []
        each = [prompt for prompt in echoed for _ in range(body.num_answers)]
        shape = CompletionShape(tokenizer, each, body.logprobs is not None)
        return await service.respond(request, body, shape, token_ids, samplings)

    return router


logger = logging.getLogger("runtime.server")

INPUTS_AT_ONCE = 32
"""Inputs of one request in flight at once; the others wait outside of the queue."""

NOTHING_SAMPLED = SamplingParams(max_tokens=0)
EMBED = RequestOptions(embed=True)


class EmbeddingRequest(Strict):
    """Body of `/v1/embeddings`."""

    model: str
    input: Annotated[Prompt, BeforeValidator(check_prompt)]
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of float32 numbers, little-endian"
    )
    user: str | None = Field(None, description="written to the server's log beside the request's id")


def embeddings_router(service: Service) -> APIRouter:
    """The route of embeddings."""
    router = APIRouter()

    @router.post("/v1/embeddings", response_model=EmbeddingResponse, responses=BODY_ERRORS)
    async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
        """Mean-pooled hidden states: of each input the mean over all its tokens of the model's hidden states after the
        final norm, not normalized to length 1. A model that was trained to continue text was not trained for this:
        one made for embeddings finds similar texts better."""
        service.check_model(body.model)
        prompts = await asyncio.to_thread(service.encode_prompts, separate_prompts(body.input))
        request_id = f"embd-{request.state.request_id}"
        logger.debug("request %s: inputs of %s tokens", request_id, [len(p) for p in prompts])
        request.state.user = body.user
        jobs = [Job(f"{request_id}-{i}", prompt, NOTHING_SAMPLED, EMBED) for i, prompt in enumerate(prompts)]
        return await respond_at_once(request, embed(service, request, jobs, body.encoding_format))

    return router


async def embed(service: Service, request: Request, jobs: list[Job], encoding: str | None) -> EmbeddingResponse:
    """Computes embeddings, a few at once, and returns the answer in the order of the inputs. Raises ApiError."""
    found: list[Delta] = []
    at_once = min(INPUTS_AT_ONCE, service.limits.max_requests, account_of(request).max_requests)
    for first in range(0, len(jobs), at_once):
        found += await run_all(service, request, jobs[first : first + at_once])
    num_tokens = sum(delta.num_prompt_tokens for delta in found)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": write_numbers(delta.embedding or [], encoding)}
            for index, delta in enumerate(found)
        ],
        "model": service.model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


async def run_all(service: Service, request: Request, jobs: list[Job]) -> list[Delta]:
    """Returns the only delta of each job, in order."""
    async with aclosing(service.run(jobs, request)) as deltas:
        return [delta for _, delta in sorted([pair async for pair in deltas], key=lambda pair: pair[0])]


def write_numbers(numbers: list[float], encoding: str | None) -> list[float] | str:
    """Returns an embedding as numbers, or as base64 of little-endian float32."""
    if encoding != "base64":
        return numbers
    return b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode("ascii")
