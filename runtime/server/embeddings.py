"""`/v1/embeddings`: means of the served model's final hidden states."""

from __future__ import annotations

import asyncio
import logging
import struct
from base64 import b64encode
from contextlib import aclosing
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from runtime.core.request import Delta, RequestOptions, SamplingParams
from runtime.server.openapi import BODY_ERRORS
from runtime.server.protocol import Prompt, check_prompt, separate_prompts
from runtime.server.protocol_base import Strict
from runtime.server.response_models import EmbeddingResponse
from runtime.server.responses import respond_at_once
from runtime.server.serving import Job, Service

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
        logger.info("request %s: user %r, inputs of %s tokens", request_id, body.user, [len(p) for p in prompts])
        jobs = [Job(f"{request_id}-{i}", prompt, NOTHING_SAMPLED, EMBED) for i, prompt in enumerate(prompts)]
        return await respond_at_once(request, embed(service, jobs, body.encoding_format))

    return router


async def embed(service: Service, jobs: list[Job], encoding: str | None) -> EmbeddingResponse:
    """Computes embeddings, a few at once, and returns the answer in the order of the inputs. Raises ApiError."""
    found: list[Delta] = []
    at_once = min(INPUTS_AT_ONCE, service.limits.max_requests)
    for first in range(0, len(jobs), at_once):
        found += await run_all(service, jobs[first : first + at_once])
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


async def run_all(service: Service, jobs: list[Job]) -> list[Delta]:
    """Returns the only delta of each job, in order."""
    async with aclosing(service.generations.run(jobs)) as deltas:
        return [delta for _, delta in sorted([pair async for pair in deltas], key=lambda pair: pair[0])]


def write_numbers(numbers: list[float], encoding: str | None) -> list[float] | str:
    """Returns an embedding as numbers, or as base64 of little-endian float32."""
    if encoding != "base64":
        return numbers
    return b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode("ascii")
