"""`/v1/rerank` and `/score`: how likely the model finds a query after a document."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, field_validator, model_validator
from starlette.responses import Response

from runtime.core.request import Delta, SamplingParams
from runtime.server.errors import ApiError
from runtime.server.intake import ServedText, described
from runtime.server.prompt_jobs import run_in_groups
from runtime.server.protocol.generation import MAX_INPUTS, contradiction, long_prompt
from runtime.server.protocol.strict import Strict, at_most
from runtime.server.response_models import BODY_ERRORS, RerankResponse, ScoreResponse
from runtime.server.routes.registry import PlainRoute, register
from runtime.server.serving import Job, Service

SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)
DOCUMENT, QUERY = "{document}", "{query}"
TEMPLATE = f"{DOCUMENT}\n\n{QUERY}"


class ScoringFields(Strict):
    """Fields of both routes."""

    model: str
    template: str | None = Field(
        None, max_length=2**16, description="text with {document} and, at its end, {query}; two line feeds by default"
    )
    max_tokens_per_doc: int | None = Field(None, ge=1, description="keep only that many tokens of longer documents")
    user: str | None = Field(None, description="written to the server's log with the request's id")

    @field_validator("template")
    @classmethod
    def check_template(cls, value: str | None) -> str | None:
        if value is not None and not (value.count(DOCUMENT) == 1 and value.find(QUERY) == len(value) - len(QUERY)):
            raise contradiction(f"must have {DOCUMENT} once, and {QUERY} once at its end")
        return value


class DocumentText(Strict):
    text: str


class RerankRequest(ScoringFields):
    """Body of `/v1/rerank`."""

    query: str = Field(min_length=1)
    documents: Annotated[list[str | DocumentText], at_most(MAX_INPUTS), Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: int | None = Field(None, ge=1, description="return only the best ones")
    return_documents: bool | None = Field(None, description="true by default")

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


Texts = Annotated[list[str], at_most(MAX_INPUTS), Field(min_length=1, max_length=MAX_INPUTS)]


class ScoreRequest(ScoringFields):
    """Body of `/score`."""

    text_1: str | Texts = Field(description="one query, or one for each document")
    text_2: str | Texts = Field(description="documents")

    @model_validator(mode="after")
    def check_numbers(self) -> ScoreRequest:
        if len(self.queries) not in (1, len(self.documents)):
            both = f"{len(self.queries)} queries and {len(self.documents)} documents"
            raise ValueError(f"text_1 and text_2 have {both}; give one query, or one for each document")
        return self

    @property
    def queries(self) -> list[str]:
        return [self.text_1] if isinstance(self.text_1, str) else self.text_1

    @property
    def documents(self) -> list[str]:
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Queries with their documents."""
        each = self.queries * len(self.documents) if len(self.queries) == 1 else self.queries
        return list(zip(each, self.documents, strict=True))


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """A prompt whose last `num_query_tokens` tokens are scored."""

    token_ids: array[int]
    num_query_tokens: int

    def score(self, delta: Delta) -> float:
        """Returns the geometric mean of the probabilities of the query's tokens."""
        logprobs = [each.logprob for each in delta.prompt_logprobs[-self.num_query_tokens :]]
        return math.exp(math.fsum(logprobs) / len(logprobs))


@dataclass(frozen=True, slots=True)
class PreparedScores:
    """A checked body of either route."""

    model: str
    pairs: list[ScoredPair]
    user: str | None
    texts: list[str]
    top_n: int | None = None
    return_documents: bool = True


def prepare_rerank(served: ServedText, raw: bytes) -> PreparedScores:
    """Checks a body and tokenizes the query after each document. Raises ApiError or RequestError."""
    body = served.parse(raw, RerankRequest)
    pairs = prepare_pairs(served, body, [(body.query, text) for text in body.texts])
    return PreparedScores(body.model, pairs, body.user, body.texts, body.top_n, body.return_documents is not False)


def prepare_scores(served: ServedText, raw: bytes) -> PreparedScores:
    """As `prepare_rerank`."""
    body = served.parse(raw, ScoreRequest)
    return PreparedScores(body.model, prepare_pairs(served, body, body.pairs), body.user, [])


def prepare_pairs(served: ServedText, body: ScoringFields, pairs: Sequence[tuple[str, str]]) -> list[ScoredPair]:
    served.check_model(body.model)
    before, after = (body.template or TEMPLATE).removesuffix(QUERY).split(DOCUMENT)
    found = []
    for query, document in pairs:
        text = document if body.max_tokens_per_doc is None else shortened(served, document, body.max_tokens_per_doc)
        first, last = served.encode(before + text + after), served.encode(query, add_special_tokens=False)
        if not first or not last:
            raise ApiError(400, f"The {'query' if first else 'document'} has no tokens.", code="empty_prompt")
        if len(first) + len(last) > served.limits.max_model_len:
            raise long_prompt(len(first) + len(last), served.limits.max_model_len, "documents")
        found.append(ScoredPair(first + last, len(last)))
    return found


def shortened(served: ServedText, text: str, num_tokens: int) -> str:
    """Returns the beginning of a text, of at most that many tokens."""
    found = served.tokenizer.encode(text, add_special_tokens=False)
    return text if len(found) <= num_tokens else served.tokenizer.decode(found[:num_tokens])


@register(order=60, bodies=[RerankRequest, ScoreRequest])
def scores_router(service: Service) -> APIRouter:
    """Routes of scores."""
    router = APIRouter(route_class=PlainRoute)
    options: dict[str, Any] = {"responses": BODY_ERRORS, "openapi_extra": described(RerankRequest)}

    @router.post("/rerank", include_in_schema=False)
    @router.post("/v2/rerank", include_in_schema=False)
    @router.post("/v1/rerank", response_model=RerankResponse, **options)
    async def rerank(request: Request) -> Response:
        """Orders documents by how likely the model finds the query after them: a score is the geometric mean of the
        probabilities of the query's tokens (query likelihood, arXiv:2204.07496). No cross-encoder is needed, and one
        that was trained for this ranks better."""
        body = await service.intake.read(request, prepare_rerank)
        return await service.respond_at_once(request, answer_rerank(service, request, body))

    options = {"responses": BODY_ERRORS, "openapi_extra": described(ScoreRequest)}

    @router.post("/v1/score", include_in_schema=False)
    @router.post("/score", response_model=ScoreResponse, **options)
    async def score(request: Request) -> Response:
        """Scores pairs of a query and a document as `/v1/rerank`."""
        body = await service.intake.read(request, prepare_scores)
        return await service.respond_at_once(request, answer_scores(service, request, body))

    return router


async def answer_rerank(service: Service, request: Request, body: PreparedScores) -> dict[str, Any]:
    found, usage = await compute(service, request, body)
    order = sorted(range(len(found)), key=lambda index: -found[index])[: body.top_n]
    results = (
        {"index": index, "relevance_score": found[index]}
        | ({"document": {"text": body.texts[index]}} if body.return_documents else {})
        for index in order
    )
    name = f"rerank-{request.state.request_id}"
    return {"id": name, "model": body.model, "results": results, "usage": usage}


async def answer_scores(service: Service, request: Request, body: PreparedScores) -> dict[str, Any]:
    found, usage = await compute(service, request, body)
    data = ({"index": index, "object": "score", "score": value} for index, value in enumerate(found))
    envelope = {"id": f"score-{request.state.request_id}", "object": "list", "created": int(time.time())}
    return {**envelope, "model": body.model, "data": data, "usage": usage}


async def compute(service: Service, request: Request, body: PreparedScores) -> tuple[list[float], dict[str, int]]:
    """Returns the score of each pair, and token counts. Raises ApiError."""
    request.state.user = body.user
    name, options = f"score-{request.state.request_id}", service.options_for(body.model)
    jobs = [Job(f"{name}-{i}", pair.token_ids, SCORED, options) for i, pair in enumerate(body.pairs)]
    deltas = await run_in_groups(service, request, jobs)
    num_tokens = sum(delta.num_prompt_tokens for delta in deltas)
    scores = [pair.score(delta) for pair, delta in zip(body.pairs, deltas, strict=True)]
    return scores, {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
