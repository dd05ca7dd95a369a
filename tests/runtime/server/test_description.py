"""The published description holds: every status that a route can answer is listed, and limits have their numbers."""

import ast
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from servers import post_head, running, send_raw, url_of

import runtime.server
from compress.common.cli import tool_version
from runtime.core.config import Limits
from runtime.server.drain import create_server
from runtime.server.protocol.generation import MAX_INPUTS
from runtime.server.routes.registry import ROUTES
from runtime.text.grammar import MAX_CHARACTERS, MAX_SCHEMA_CHARACTERS

KEY = "open sesame"
AUTHORIZATION = f"Authorization: Bearer {KEY}"
BEARER = {"Authorization": f"Bearer {KEY}"}
LIMITS = Limits(100, max_requests=4, max_body_bytes=5_000)
IMPATIENT = Limits(100, client_seconds=0.1, queue_seconds=0.1, request_seconds=0.2)
COMPLETION = {"model": "alphabet", "prompt": "Z", "max_tokens": 9}
CONVERSATION = {"model": "alphabet", "messages": [{"role": "user", "content": "Z"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": {**CONVERSATION, "max_tokens": 9},
    "/v1/messages": {**CONVERSATION, "max_tokens": 9},
    "/v1/responses": {"model": "alphabet", "input": "Z", "max_output_tokens": 9},
    "/v1/messages/count_tokens": CONVERSATION,
    "/v1/embeddings": {"model": "alphabet", "input": "Z"},
    "/v1/rerank": {"model": "alphabet", "query": "Z", "documents": ["Y"]},
    "/score": {"model": "alphabet", "text_1": "Z", "text_2": "Y"},
    "/tokenize": {"prompt": "Z"},
    "/detokenize": {"tokens": [65]},
}
GENERATIONS = tuple(BODIES)[:4]
BODIES_OF_ROUTES = [body for family in ROUTES.values() for body in family.bodies]


@dataclass
class Asked:
    """A server, and the statuses that its paths answered."""

    api: httpx.Client
    engine: Any
    server: Any
    answered: set[tuple[str, int]] = field(default_factory=set)

    def ask(self, paths: Iterable[str], status: int, **options: Any) -> None:
        """Sends requests that are right except for the options; at least one of them must get the status."""
        for path in paths:
            body = {"json": BODIES[path]} if path in BODIES else {}
            request = {"method": "POST" if body else "GET", "headers": BEARER, **body, **options}
            response = self.api.request(url=path.replace("{name}", "other"), **request)
            self.answered.add((path, response.status_code))
        assert status in {found for path, found in self.answered if path in paths}


@pytest.fixture
def ask(alphabet_parts: Any) -> Iterator[Callable[..., Asked]]:
    with ExitStack() as servers:

        def serve(limits: Limits) -> Asked:
            app, engine, _ = alphabet_parts(limits=limits, api_key=KEY, allowed_hosts=["127.0.0.1", "x"])
            server = servers.enter_context(running(create_server(app, 600, 60)))
            servers.callback(server.handle_exit, signal.SIGTERM, None)
            api = servers.enter_context(httpx.Client(base_url=url_of(server), timeout=20))
            return Asked(api, engine, server)

        yield serve


def test_models_of_requests_and_answers_have_names_of_their_own(alphabet_parts: Any) -> None:
    app, *_ = alphabet_parts()
    answers = FastAPI.openapi(app)["components"]["schemas"]
    requests = models_json_schema([(kind, "validation") for kind in BODIES_OF_ROUTES])[1]["$defs"]
    assert "ResponseObject" in answers
    assert "ResponsesRequest" in requests
    assert sorted(answers.keys() & requests.keys()) == []
    assert [name for name in (*answers, *requests) if "__" in name] == []


def statuses_described(asked: Asked) -> dict[str, set[int]]:
    """The statuses that the description lists for each path; all paths have one method."""
    paths = asked.api.get("/openapi.json", headers=BEARER).json()["paths"]
    return {path: {int(status) for op in item.values() for status in op["responses"]} for path, item in paths.items()}


def statuses_in_sources() -> set[int]:
    """Statuses of refusals in the code of the server."""
    trees = [ast.parse(file.read_text()) for file in Path(runtime.server.__file__).parent.rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    refusals = [call for call in calls if getattr(call.func, "id", "") in ("ApiError", "error_response")]
    return {call.args[0].value for call in refusals if isinstance(call.args[0], ast.Constant)}


def late_bodies(asked: Asked) -> None:
    """Sends bodies that do not end, and waits until the server has had enough."""
    connections = {path: socket.create_connection(asked.server.address, timeout=20) for path in BODIES}
    for path, connection in connections.items():
        connection.sendall(post_head(500, path, AUTHORIZATION))
    for path, connection in connections.items():
        with connection, HTTPResponse(connection) as response:
            response.begin()
            asked.answered.add((path, response.status))


def test_every_status_is_described(ask: Any, wait_until: Any) -> None:
    """A status that the code can answer and this test does not provoke fails it as well."""
    asked, impatient = ask(LIMITS), ask(IMPATIENT)
    described = statuses_described(asked)
    paths = list(described)
    asked.ask(paths, 200)
    asked.ask(paths, 401, headers={})
    asked.ask(paths, 403, headers={**BEARER, "Host": "evil.example"})
    asked.ask(paths, 413, content=b" " * (LIMITS.max_body_bytes + 1), json=None)
    asked.ask(paths, 415, headers={**BEARER, "Content-Encoding": "gzip"})
    asked.ask(BODIES, 400, content=b"{", json=None)
    asked.ask(BODIES, 404, json={**COMPLETION, "model": "other"})
    asked.engine.failure = "the engine has made no progress"
    asked.ask(["/health"], 503)
    asked.engine.fail_after = 0
    asked.ask(GENERATIONS, 500)
    asked.engine.reset()
    asked.engine.gate.clear()
    with send_raw(asked.api.base_url, "/v1/completions", AUTHORIZATION, **COMPLETION, n=LIMITS.max_requests):
        wait_until(lambda: bool(asked.engine.active))
        asked.ask(BODIES, 429)
        asked.server.handle_exit(signal.SIGTERM, None)
        asked.ask(paths, 503)
    impatient.engine.close_gate_at = 3
    impatient.ask(GENERATIONS[:1], 504)
    impatient.ask(GENERATIONS, 503)
    late_bodies(impatient)
    answered = asked.answered | impatient.answered
    assert [(path, status) for path, status in answered if status not in described[path]] == []
    assert statuses_in_sources() - {status for _, status in answered} == set()


def test_limits_have_their_numbers(ask: Any) -> None:
    asked = ask(LIMITS)
    description = asked.api.get("/openapi.json", headers=BEARER).json()
    responses = description["paths"]["/v1/completions"]["post"]["responses"]
    numbers = {400: 100, 413: 5_000, 408: 30, 429: 4, 503: 600, 504: 3600}
    for status, number in numbers.items():
        assert f" {number} " in f" {responses[str(status)]['description']} "
    schemas = description["components"]["schemas"]
    for schema, name in (("CompletionRequest", "max_tokens"), ("ChatRequest", "max_completion_tokens")):
        assert schemas[schema]["properties"][name]["anyOf"][0]["maximum"] == LIMITS.max_model_len - 1
    assert schemas["ChatRequest"]["properties"]["n"]["anyOf"][0]["maximum"] == LIMITS.max_requests
    assert schemas["ChatRequest"]["properties"]["guided_regex"]["anyOf"][0]["maxLength"] == MAX_CHARACTERS
    assert schemas["ChatRequest"]["properties"]["guided_json"]["anyOf"][1]["maxLength"] == MAX_SCHEMA_CHARACTERS
    for schema, name, most in (("CompletionRequest", "prompt", 4), ("EmbeddingRequest", "input", MAX_INPUTS)):
        _, texts, tokens, several = schemas[schema]["properties"][name]["anyOf"]
        assert (texts["maxItems"], several["maxItems"], tokens["maxItems"]) == (most, most, LIMITS.max_model_len)
        assert several["items"]["maxItems"] == LIMITS.max_model_len
    version = asked.api.get("/version", headers=BEARER).json()["version"]
    assert version == description["info"]["version"] == tool_version()


@pytest.mark.parametrize("kind", BODIES_OF_ROUTES, ids=lambda kind: kind.__name__)
def test_optional_fields_may_be_null(kind: type[BaseModel]) -> None:
    optional = {field.alias or name: None for name, field in kind.model_fields.items() if not field.is_required()}
    required = {name for name, field in kind.model_fields.items() if field.is_required()}
    try:
        kind.model_validate(optional)
    except ValidationError as error:
        wrong = {each["loc"][0] for each in error.errors() if each["loc"]}
        assert wrong <= required
