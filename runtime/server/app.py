"""The HTTP application: OpenAI's API around one engine, or one of each model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from compress.common.cli import tool_version
from runtime.core.config import Limits
from runtime.engine.engine_client import EngineClient
from runtime.routing.routes import Routes
from runtime.server.dispatch import Dispatch
from runtime.server.drain import SERVED_WHILE_DRAINING, Drain, DrainGuard
from runtime.server.errors import add_error_handlers
from runtime.server.keys import ApiKeys
from runtime.server.middleware import (
    OPEN_PATHS,
    AccessLog,
    ApiKeyGuard,
    BodyLimit,
    ConnectionEnd,
    HeadAsGet,
    RequestId,
    ServerMetrics,
    SiteGuard,
    origins_of,
)
from runtime.server.native_memory import trim_at_times
from runtime.server.protocol.field_warnings import WARNING_HEADER
from runtime.server.protocol.generation import MAX_INPUTS
from runtime.server.response_models import ANY_ERRORS, DRAIN_ERRORS, KEY_ERRORS, SCHEMAS, ErrorResponse
from runtime.server.routes.registry import ROUTES
from runtime.server.serving import Service, check_all
from runtime.text.grammar import MAX_CHARACTERS, MAX_SCHEMA_CHARACTERS, MAX_WORK
from runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A further model of a server: its engine, not started, and what requests are checked against.

    Attributes:
        adapters: paths of its LoRA adapters by name.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    name: str
    limits: Limits
    adapters: Mapping[str, Path] = field(default_factory=dict)


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    model_name: str,
    limits: Limits,
    *,
    keys: ApiKeys | None = None,
    allowed_hosts: Collection[str] = (),
    adapters: Mapping[str, Path] = MappingProxyType({}),
    changes_adapters: bool = False,
    others: Sequence[ServedModel] = (),
    routes: Routes = MappingProxyType({}),
) -> FastAPI:
    """Creates the application, which starts the engines when it starts and stops them when it ends.

    Args:
        engine: the engine, not started.
        tokenizer: tokenizer of the served model.
        model_name: model name that requests must have.
        limits: context, queue, body size and times.
        keys: one is required on every path except `/health` and the files of the page; None requires none.
        allowed_hosts: host names by which clients may address the server, and whose pages may use it; empty allows any
            name, and only pages of the server itself.
        adapters: paths of LoRA adapters by the names that requests may use, too.
        changes_adapters: whether clients may load and unload adapters.
        others: further models, each asked by its name.
        routes: virtual models, which choose among these.
    """
    metrics, other_names = ServerMetrics(model_name), [*(other.name for other in others), *routes]
    options: dict[str, Any] = {"changes_adapters": changes_adapters}
    service = Service(
        engine, tokenizer, model_name, limits, metrics.render, adapters, other_names=other_names, **options
    )
    service.peers = [
        service,
        *(
            Service(each.engine, each.tokenizer, each.name, each.limits, metrics.render, each.adapters, **options)
            for each in others
        ),
    ]
    service.routes = routes
    adapter_names = (name for peer in service.peers for name in peer.intake.served.adapters)
    app = DescribedApi(
        names=[] if changes_adapters else [model_name, *adapter_names, *other_names],
        limits=limits,
        needs_key=keys is not None,
        version=tool_version(),
        description=describe_limits(limits),
        title=f"runtime: {model_name}",
        lifespan=partial(running, service.peers),
        docs_url=None,
        redoc_url=None,
    )
    app.state.drain = Drain(partial(stop_all, service.peers), lambda: check_all(service.peers).has_ended)
    add_error_handlers(app)
    dispatch = Dispatch(service.peers, routes, metrics.num_routed)
    for family in ROUTES.values():
        app.include_router(family.create_router(service) if not others else dispatch.create_router(family))
    _add_guards(app, limits, keys, allowed_hosts)
    app.add_middleware(AccessLog, metrics=metrics)
    app.add_middleware(RequestId)
    return app


def _add_guards(app: FastAPI, limits: Limits, keys: ApiKeys | None, allowed_hosts: Collection[str]) -> None:
    """Adds the middleware; the last one added runs first."""
    app.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes, seconds=limits.client_seconds)
    if keys is not None:
        app.add_middleware(ApiKeyGuard, keys=keys)
    app.add_middleware(DrainGuard, drain=app.state.drain)
    if allowed_hosts:  # before the key is asked for: browsers ask without it
        app.add_middleware(
            CORSMiddleware,
            allow_origin_regex=origins_of(allowed_hosts),
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", WARNING_HEADER),
        )
    app.add_middleware(SiteGuard, hosts=allowed_hosts)
    app.add_middleware(ConnectionEnd, is_draining=lambda: app.state.drain.has_begun)
    app.add_middleware(HeadAsGet)


@asynccontextmanager
async def running(services: Sequence[Service], _: FastAPI) -> AsyncIterator[None]:
    """Runs the engines as long as the application."""
    for service in services:
        service.engine.start()
    trimmer = asyncio.create_task(trim_at_times(lambda: check_all(services).is_idle))
    try:
        yield
    finally:
        trimmer.cancel()
        for service in services:
            service.intake.close()
        await asyncio.to_thread(stop_all, services)


def stop_all(services: Sequence[Service]) -> None:
    """Stops the engines of all models."""
    with ThreadPoolExecutor(len(services)) as pool:
        list(pool.map(lambda service: service.engine.stop(), services))


UNUSED = ("HTTPValidationError", "ValidationError")
"""Schemas of FastAPI's own answer 422, which this server never sends."""


class DescribedApi(FastAPI):
    """A FastAPI application whose description holds for the served model and the limits of this server.

    Args:
        names: all that requests may name as their model; none where these change.
        limits: context, queue, body size and times.
        needs_key: whether requests must carry an API key.
    """

    def __init__(self, *, names: list[str], limits: Limits, needs_key: bool, **options: Any) -> None:
        super().__init__(**options)
        self.names, self.limits, self.needs_key = names, limits, needs_key

    def openapi(self) -> dict[str, Any]:
        """Generates the description once."""
        if not self.openapi_schema:
            self.openapi_schema = self._completed(super().openapi())
        return self.openapi_schema

    def _completed(self, description: dict[str, Any]) -> dict[str, Any]:
        components = description.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for name in UNUSED:
            schemas.pop(name, None)
        bodies: Any = [(body, "validation") for family in ROUTES.values() for body in family.bodies]
        schemas |= models_json_schema(bodies, ref_template=SCHEMAS)[1]["$defs"]
        error = TypeAdapter(ErrorResponse).json_schema(ref_template=SCHEMAS)
        schemas |= error.pop("$defs") | {ErrorResponse.__name__: error}
        for schema in schemas.values():
            name_models(schema, self.names)
            write_limits(schema, self.limits)
            write_whole_bounds(schema)
        if self.needs_key:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, item in description["paths"].items():
            for operation in item.values():
                if self.needs_key and path not in OPEN_PATHS:
                    operation["security"] = [{"key": []}]
                self._complete_responses(operation["responses"], path)
        return description

    def _complete_responses(self, responses: dict[str, Any], path: str) -> None:
        """Adds the errors of the middleware to those of a route, and the values of limits to all."""
        responses.pop("422", None)
        errors = ANY_ERRORS | (KEY_ERRORS if self.needs_key and path not in OPEN_PATHS else {})
        errors |= {} if path in SERVED_WHILE_DRAINING else DRAIN_ERRORS
        for status, response in errors.items():
            responses.setdefault(str(status), {**response})
        for status, response in responses.items():
            response["description"] = response["description"].format_map(vars(self.limits))
            if status in ("429", "503") and path not in SERVED_WHILE_DRAINING:
                response["headers"] = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}


def _choices(schema: dict[str, Any], name: str, kind: str) -> Iterator[dict[str, Any]]:
    """Yields the schemas of a type that a field of a request may follow."""
    field = schema.get("properties", {}).get(name, {})
    return (choice for choice in (field, *field.get("anyOf", ())) if choice.get("type") == kind)


def name_models(schema: dict[str, Any], names: list[str]) -> None:
    """Restricts the field `model` of a request to what is served, unless that changes."""
    for choice in _choices(schema, "model", "string") if names else ():
        choice["enum"] = names


GRAMMARS = ("guided_json", "guided_regex", "guided_grammar", "json", "regex", "grammar")


def write_limits(schema: dict[str, Any], limits: Limits) -> None:
    """Bounds the fields of a request by the context, the queue and the longest grammar."""
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        for choice in _choices(schema, name, "integer"):
            choice["maximum"] = limits.max_model_len - 1
    for choice in _choices(schema, "n", "integer"):
        choice["maximum"] = min(choice["maximum"], limits.max_requests)
    for name in GRAMMARS:
        for choice in _choices(schema, name, "string"):
            choice["maxLength"] = MAX_SCHEMA_CHARACTERS if name.endswith("json") else MAX_CHARACTERS
    for name, most in (("prompt", limits.max_requests), ("input", MAX_INPUTS)):
        for choice in _choices(schema, name, "array"):
            is_one = choice["items"]["type"] == "integer"
            choice["maxItems"] = limits.max_model_len if is_one else most
            if choice["items"]["type"] == "array":
                choice["items"]["maxItems"] = limits.max_model_len


def describe_limits(limits: Limits) -> str:
    """Describes what no schema of a field can say."""
    return (
        f"A sequence has at most {limits.max_model_len} tokens, prompt and answer together. At most "
        f"{limits.max_requests} sequences of a client run or wait, and an API key may have lower limits, also of "
        f"requests and tokens per minute: beyond them the status is 429. A grammar has at most {MAX_CHARACTERS} "
        f"characters, a JSON schema {MAX_SCHEMA_CHARACTERS}, and they compute for at most {MAX_WORK.seconds:g} s and "
        f"{MAX_WORK.per_token:g} s per token of the answer. A body has at most {limits.max_body_bytes} bytes and "
        f"arrives within {limits.client_seconds:g} s. The first token comes within {limits.queue_seconds:g} s and the "
        f"last within {limits.request_seconds:g} s, or an error does."
    )


def write_whole_bounds(schema: Any) -> None:
    """Writes bounds of integers as integers: FastAPI turns them into floats, which cannot hold all of them."""
    children = schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ()
    for child in children:
        write_whole_bounds(child)
    if isinstance(schema, dict) and schema.get("type") == "integer":
        schema.update({name: int(value) for name, value in schema.items() if isinstance(value, float)})
