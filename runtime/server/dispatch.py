"""Requests of a server with several models: each goes to the model that it names, or whose adapter it names, or that a
virtual model chooses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Message

from runtime.routing.routes import Cascade, Query, Route, Routes
from runtime.server.cascade import ConfidenceGate, LowConfidenceError
from runtime.server.intake import ServedText
from runtime.server.response_models import to_json
from runtime.server.routes.registry import RouteFamily
from runtime.server.serving import EventStream, Service

Endpoint = Callable[[Request], Awaitable[Response]]
GENERATING_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"}
)
"""Where virtual models are served. Embeddings and scores of different models cannot be compared."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes.

    Attributes:
        choice: model, or cascade; "" for what no model serves, which the first one refuses.
        route: the virtual model that chose; "" for none.
        bodies: bodies in place of the one that names the virtual model, by the name of a model.
    """

    choice: str | Cascade = ""
    route: str = ""
    bodies: Mapping[str, bytes] = field(default_factory=dict)


def find_target(served: ServedText, raw: bytes, owners: Mapping[str, str], routes: Routes) -> Target:
    """Returns where a body goes by its field `model`.

    Args:
        owners: names of models by the names that requests may use.
        routes: virtual models.
    """
    try:
        body = json.loads(raw)
    except ValueError:
        return Target()
    name = body.get("model") if isinstance(body, dict) else None
    if not isinstance(name, str):
        return Target()
    if name not in routes:
        return Target(owners.get(name, ""))
    choice = routes[name].choose(read_query(served, body, routes[name]))
    chosen = (choice,) if isinstance(choice, str) else (choice.small, choice.large)
    return Target(choice, name, {model: to_json({**body, "model": model}).encode("ascii") for model in chosen})


PROMPTS = ("system", "instructions", "messages", "prompt", "input")
"""Fields of bodies with texts of the prompt."""
ANSWER_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
GUIDED_JSON = ("guided_json", "json", "response_format", "format", "output_format")


def read_query(served: ServedText, body: Mapping[str, Any], route: Route) -> Query:
    """Returns what rules look at, of a body of any route that is not checked yet. Texts count with the tokenizer of the
    first model, without the chat template."""
    prompts = [body.get(name) for name in PROMPTS]
    text = "\n".join(texts_of(prompts))
    num_tokens = (
        len(served.encode(text, add_special_tokens=False, keep=len(text))) if route.reads_length and text else 0
    )
    limits = (body.get(name) for name in ANSWER_LIMITS)
    return Query(
        text,
        num_tokens + sum(len(each) for each in token_lists(body.get("prompt"))),
        next((limit for limit in limits if isinstance(limit, int)), None),
        bool(body.get("tools")),
        asks_for_json(body),
    )


def texts_of(value: Any) -> Iterator[str]:
    """Yields the texts of prompts, messages and items."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)
    elif isinstance(value, dict):
        for name in ("content", "text", "output"):
            yield from texts_of(value.get(name))


def token_lists(prompt: Any) -> list[list[int]]:
    """Returns the prompts that are lists of token ids."""
    several = prompt if isinstance(prompt, list) else []
    if several and isinstance(several[0], int):
        return [several]
    return [each for each in several if isinstance(each, list)]


def asks_for_json(body: Mapping[str, Any]) -> bool:
    """Returns whether a body asks for JSON, with a schema or without."""
    nested = [body.get(name) for name in ("structured_outputs", "text", "output_config")]
    given = [part.get(name) for part in (body, *nested) if isinstance(part, dict) for name in GUIDED_JSON]
    return any(each and not (isinstance(each, dict) and each.get("type") == "text") for each in given)


def with_body(request: Request, raw: bytes) -> Request:
    """Returns a request with another body."""
    messages: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await request.receive()

    return Request(request.scope, receive)


class Dispatch:
    """Sends requests to models.

    Args:
        services: the models, of which the first one refuses what no model serves.
        routes: virtual models.
        count: counts choices of virtual models: name, model, and why.
    """

    def __init__(self, services: Sequence[Service], routes: Routes, count: Counter[tuple[str, ...]]) -> None:
        self.services, self.routes, self.count = services, routes, count
        self.names = [service.model_name for service in services]

    def find_owners(self) -> dict[str, str]:
        """Returns the names of models by their own names, and those of their adapters now."""
        return {
            name: service.model_name
            for service in self.services
            for name in (service.model_name, *service.intake.served.adapters)
        }

    def create_router(self, family: RouteFamily) -> APIRouter:
        """Creates the router of a family, whose routes that read a body ask the model that it names."""
        routers = [family.create_router(service) for service in self.services]
        for routes in zip(*(router.routes for router in routers), strict=True):
            first = cast(APIRoute, routes[0])
            if "POST" in (first.methods or ()):
                endpoints = [cast(APIRoute, route).endpoint for route in routes]
                first.endpoint = self._endpoint(first.path, dict(zip(self.names, endpoints, strict=True)))
        return routers[0]

    def _endpoint(self, path: str, endpoints: Mapping[str, Endpoint]) -> Endpoint:
        first, routes = self.services[0], self.routes if path in GENERATING_PATHS else {}

        @wraps(endpoints[first.model_name])
        async def dispatched(request: Request) -> Response:
            find = partial(find_target, owners=self.find_owners(), routes=routes)
            target = await first.intake.read(request, find)
            if isinstance(target.choice, Cascade):
                return await self._cascade(request, target, target.choice, endpoints)
            if target.route:
                self.count[target.route, target.choice, "rule"] += 1
                request = with_body(request, target.bodies[target.choice])
            return await endpoints[target.choice or first.model_name](request)

        return dispatched

    async def _cascade(
        self, request: Request, target: Target, cascade: Cascade, endpoints: Mapping[str, Endpoint]
    ) -> Response:
        """Answers by the small model, or by the large one if the small one is not confident."""
        request.state.gate = ConfidenceGate(cascade)
        try:
            response = await endpoints[cascade.small](with_body(request, target.bodies[cascade.small]))
            if isinstance(response, EventStream):
                await response.read_first(request.receive)
        except LowConfidenceError:
            request.state.gate = None
            self.count[target.route, cascade.large, "unsure"] += 1
            return await endpoints[cascade.large](with_body(request, target.bodies[cascade.large]))
        self.count[target.route, cascade.small, "confident"] += 1
        return response
