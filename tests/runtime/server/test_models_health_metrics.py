"""`/v1/models`, `/health`, `/metrics` and the description of the API itself."""

from typing import Any

import httpx


def test_models(api: httpx.Client) -> None:
    listing = api.get("/v1/models").json()
    assert [model["id"] for model in listing["data"]] == ["alphabet"]
    assert listing["data"][0]["max_model_len"] == 100
    assert api.get("/v1/models/alphabet").json() == listing["data"][0]


def test_health_follows_the_engine(api: httpx.Client, engine: Any) -> None:
    assert api.get("/health").json() == {"status": "ok", "reason": "", "running": 0, "waiting": 0}
    engine.failure = "the engine has made no progress for 130 s"
    response = api.get("/health")
    assert response.status_code == 503
    assert response.json()["reason"] == engine.failure


def test_watchers_may_ask_for_the_head_only(api: httpx.Client) -> None:
    response = api.head("/health")
    assert (response.status_code, response.content) == (200, b"")


def test_metrics_are_prometheus_text(api: httpx.Client) -> None:
    response = api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE runtime_generation_tokens_total counter" in response.text


def test_openapi_describes_all_routes(api: httpx.Client) -> None:
    description = api.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(description["paths"])
    request = description["components"]["schemas"]["CompletionRequest"]
    assert request["additionalProperties"] == {"type": "null"}


def test_openapi_bounds_are_exact(api: httpx.Client) -> None:
    fields = api.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["seed"]["anyOf"][0] == {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**63}
    assert isinstance(fields["seed"]["anyOf"][0]["exclusiveMaximum"], int)
    assert fields["model"]["enum"] == ["alphabet"]
