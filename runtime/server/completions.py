"""`/v1/completions`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from runtime.server.logprobs import CompletionLogprobs
from runtime.server.protocol import CompletionRequest, is_token_list
from runtime.server.service import Service, Tokenizer
from runtime.server.streaming import MAY_STREAM, Output
from runtime.types import Delta, FinishReason, TokenLogprobs

DEFAULT_MAX_TOKENS = 16


@dataclass
class CompletionShape:
    """Choices of `text_completion` objects.

    Attributes:
        prompts: texts to put in front of the answers (echo), one per choice; empty for none.
        with_logprobs: report them in every choice.
    """

    tokenizer: Tokenizer
    prompts: list[str]
    with_logprobs: bool
    logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)
    id_prefix: str = "cmpl"
    whole_object: str = "text_completion"
    chunk_object: str = "text_completion"

    def opening(self) -> list[dict[str, Any]]:
        return [self.choice(index, prompt) for index, prompt in enumerate(self.prompts)]

    def part(self, index: int, delta: Delta) -> dict[str, Any]:
        return self.choice(index, delta.text, self.write_logprobs(index, delta.token_ids, delta.logprobs))

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self.choice(index, "", None, reason)

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        text = self.prompts[index] + output.text if self.prompts else output.text
        logprobs = self.write_logprobs(index, output.token_ids, output.logprobs)
        return self.choice(index, text, logprobs, output.finish_reason)

    def write_logprobs(self, index: int, token_ids: list[int], found: list[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        writer = self.logprobs.setdefault(index, CompletionLogprobs(self.tokenizer))
        return writer.write(zip(token_ids, found, strict=True))

    def choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, reason: FinishReason | None = None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def separate_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The single prompts of the `prompt` field."""
    return [prompt] if isinstance(prompt, str) or is_token_list(prompt) else prompt


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()
    tokenizer = service.tokenizer

    def tokenize(prompts: list[str | list[int]]) -> list[list[int]]:
        return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    @router.post("/v1/completions", responses=MAY_STREAM)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continues one or several prompts."""
        service.check_model(body.model)
        prompts = separate_prompts(body.prompt)
        token_ids = await asyncio.to_thread(tokenize, prompts)
        samplings = [service.sampling(body, len(ids), DEFAULT_MAX_TOKENS) for ids in token_ids]
        texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts] if body.echo else []
        echoed = [text for text in texts for _ in range(body.num_answers)]
        shape = CompletionShape(tokenizer, echoed, body.logprobs is not None)
        return await service.respond(request, body, shape, token_ids, samplings)

    return router
