"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from runtime.server.logprobs import chat_logprobs
from runtime.server.protocol import ChatRequest
from runtime.server.service import Service, Tokenizer
from runtime.server.streaming import MAY_STREAM, Output
from runtime.types import Delta, FinishReason, TokenLogprobs


@dataclass
class ChatShape:
    """Choices of `chat.completion` objects and their chunks."""

    tokenizer: Tokenizer
    with_logprobs: bool
    num_choices: int
    id_prefix: str = "chatcmpl"
    whole_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        return [self.chunk(index, {"role": "assistant", "content": ""}) for index in range(self.num_choices)]

    def part(self, index: int, delta: Delta) -> dict[str, Any]:
        return self.chunk(index, {"content": delta.text}, self.write_logprobs(delta.token_ids, delta.logprobs))

    def finish(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self.chunk(index, {}, None, reason)

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self.write_logprobs(output.token_ids, output.logprobs),
            "finish_reason": output.finish_reason,
        }

    def write_logprobs(self, token_ids: list[int], found: list[TokenLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(self.tokenizer, zip(token_ids, found, strict=True)) if self.with_logprobs else None

    def chunk(
        self,
        index: int,
        delta: dict[str, str],
        logprobs: dict[str, Any] | None = None,
        reason: FinishReason | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=MAY_STREAM)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        service.check_model(body.model)
        messages = [{"role": message.role, "content": message.text} for message in body.messages]
        token_ids = await asyncio.to_thread(service.tokenizer.encode_chat, messages)
        sampling = service.sampling(body, len(token_ids), None)
        shape = ChatShape(service.tokenizer, bool(body.logprobs), body.num_answers)
        return await service.respond(request, body, shape, [token_ids], [sampling])

    return router
