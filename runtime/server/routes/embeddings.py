"""`/v1/embeddings`."""

from __future__ import annotations

import logging
import math
import struct
from array import array
from base64 import b64encode
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field, ValidationInfo
from starlette.responses import Response

from runtime.core.request import Pooling
from runtime.server.intake import ServedText, described
from runtime.server.prompt_jobs import NOTHING_SAMPLED, run_in_groups
from runtime.server.protocol.generation import (
    MAX_INPUTS,
    Prompt,
    check_lengths,
    check_texts,
    is_several,
    separate_prompts,
)
from runtime.server.protocol.strict import Strict
from runtime.server.response_models import BODY_ERRORS, EmbeddingResponse
from runtime.server.routes.registry import PlainRoute, register
from runtime.server.serving import Job, Service

logger = logging.getLogger("runtime.server")


def check_input(value: Any, info: ValidationInfo) -> Any:
    """Validates the inputs of embeddings. Raises ApiError: 400 for more token ids than the context."""
    if is_several(value) and len(value) > MAX_INPUTS:
        raise ValueError(f"has {len(value)} inputs, and at most {MAX_INPUTS} are allowed")
    if info.context:
        check_lengths(value, info.context.limits.max_model_len, "input")
    return check_texts(value)


class EmbeddingRequest(Strict):
    """Body of `/v1/embeddings`."""

    model: str
    input: Annotated[Prompt, BeforeValidator(check_input)] = Field(
        description=f"one or several; at most {MAX_INPUTS}, each of at most as many tokens as the context"
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of float32 numbers, little-endian"
    )
    pooling: Literal["mean", "last"] | None = Field(
        None, description="the mean over all tokens, by default, or the state of the last one"
    )
    normalize: bool | None = Field(None, description="divide each vector by its length")
    user: str | None = Field(None, description="written to the server's log with the request's id")


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """A checked body of `/v1/embeddings`."""

    model: str
    inputs: list[array[int]]
    pooling: Pooling
    normalize: bool
    encoding_format: str | None
    user: str | None


def prepare_inputs(served: ServedText, raw: bytes) -> PreparedInputs:
    """Checks a body and tokenizes its inputs. Raises ApiError or RequestError."""
    body = served.parse(raw, EmbeddingRequest)
    served.check_model(body.model)
    inputs, pooling = served.encode_prompts(separate_prompts(body.input)), Pooling(body.pooling or "mean")
    return PreparedInputs(body.model, inputs, pooling, bool(body.normalize), body.encoding_format, body.user)


@register(order=50, bodies=[EmbeddingRequest])
def embeddings_router(service: Service) -> APIRouter:
    """The route of embeddings."""
    router = APIRouter(route_class=PlainRoute)

    options: dict[str, Any] = {"responses": BODY_ERRORS, "openapi_extra": described(EmbeddingRequest)}

    @router.post("/v1/embeddings", response_model=EmbeddingResponse, **options)
    async def create_embedding(request: Request) -> Response:
        """Pooled hidden states: of each input the mean over all its tokens of the model's hidden states after the final
        norm, or those of its last token, not normalized to length 1 unless asked for. A model that was trained to
        continue text was not trained for this: one made for embeddings finds similar texts better."""
        body = await service.intake.read(request, prepare_inputs)
        request_id = f"embd-{request.state.request_id}"
        logger.debug("request %s: inputs of %s tokens", request_id, [len(p) for p in body.inputs])
        request.state.user = body.user
        options = service.options_for(body.model, pooling=body.pooling)
        jobs = [Job(f"{request_id}-{i}", prompt, NOTHING_SAMPLED, options) for i, prompt in enumerate(body.inputs)]
        return await service.respond_at_once(request, embed(service, request, jobs, body))

    return router


async def embed(service: Service, request: Request, jobs: list[Job], body: PreparedInputs) -> dict[str, Any]:
    """Computes embeddings and returns the answer in the order of the inputs. Raises ApiError."""
    found = await run_in_groups(service, request, jobs)
    num_tokens = sum(delta.num_prompt_tokens for delta in found)
    vectors = (delta.embedding or [] for delta in found)
    written = (write_numbers(unit(each) if body.normalize else each, body.encoding_format) for each in vectors)
    return {
        "object": "list",
        "data": (
            {"object": "embedding", "index": index, "embedding": numbers} for index, numbers in enumerate(written)
        ),
        "model": body.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def unit(numbers: list[float]) -> list[float]:
    """Returns a vector divided by its length; zeros stay."""
    length = math.hypot(*numbers) or 1.0
    return [number / length for number in numbers]


def write_numbers(numbers: list[float], encoding: str | None) -> list[float] | str:
    """Returns an embedding as numbers, or as base64 of little-endian float32."""
    if encoding != "base64":
        return numbers
    return b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode("ascii")
