"""`/v1/completions`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from runtime.core.request import Delta, FinishReason, TokenLogprobs
from runtime.server.protocol import CompletionRequest, separate_prompts
from runtime.server.response_models import CompletionLogprobs, CompletionResponse
from runtime.server.responses import MAY_STREAM, CompletionLogprobsWriter, Output, join_logprobs
from runtime.server.serving import Service, Tokenizer

DEFAULT_MAX_TOKENS = 16


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

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        text = self.echoed[index].text if self.echoed else ""
        prompt, answer = self.prompt_logprobs(index, output), self.logprobs(index, output)
        joined = join_logprobs(prompt, answer) if prompt and answer else answer
        return self.choice(index, text + output.text, joined, output.finish_reason)

    def prompt_logprobs(self, index: int, found: Delta | Output) -> CompletionLogprobs | None:
        """Returns those of an echoed prompt, which the engine delivers with the first answer only."""
        if not self.with_logprobs or not self.echoed:
            return None
        prompt = self.echoed[index]
        prompt.logprobs = prompt.logprobs or found.prompt_logprobs
        return self.writer(index).write_prompt(prompt.text, prompt.token_ids, prompt.logprobs)

    def logprobs(self, index: int, found: Delta | Output) -> CompletionLogprobs | None:
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
        samplings = [service.sampling(body, len(ids), DEFAULT_MAX_TOKENS) for ids in token_ids]
        texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
        echoed = [EchoedPrompt(*prompt) for prompt in zip(texts, token_ids, strict=True)] if body.echo else []
        each = [prompt for prompt in echoed for _ in range(body.num_answers)]
        shape = CompletionShape(tokenizer, each, body.logprobs is not None)
        return await service.respond(request, body, shape, token_ids, samplings)

    return router
