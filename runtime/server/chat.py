"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from runtime.server.chat_shape import ChatShape
from runtime.server.protocol import ChatRequest
from runtime.server.service import Service
from runtime.server.streaming import MAY_STREAM
from runtime.server.tool_calls import ToolShape, call_sampling, find_tool_format, render_conversation


def chat_router(service: Service) -> APIRouter:
    """The route that answers a conversation."""
    router = APIRouter()
    tokenizer = service.tokenizer

    @router.post("/v1/chat/completions", responses=MAY_STREAM)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        service.check_model(body.model)
        tool_format = find_tool_format(tokenizer, body)
        token_ids = await asyncio.to_thread(encode_conversation, service, body)
        sampling = service.sampling(body, len(token_ids), None)
        shape = ChatShape(tokenizer, bool(body.logprobs), body.num_answers)
        if tool_format is not None:
            sampling = call_sampling(sampling, tool_format, tokenizer, body)
            several = body.allows_several_calls
            shape = ToolShape(
                tokenizer, bool(body.logprobs), body.num_answers, tool_format=tool_format, several=several
            )
        return await service.respond(request, body, shape, [token_ids], [sampling])

    return router


def encode_conversation(service: Service, body: ChatRequest) -> list[int]:
    """Token ids of the prompt; templates write special tokens themselves."""
    return service.encode(render_conversation(service.tokenizer, body), add_special_tokens=False)
