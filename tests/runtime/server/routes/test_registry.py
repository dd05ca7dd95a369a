"""A family of routes that a test registers: it is served and described, and nothing else changes."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from servers import serving
from starlette.responses import Response

from runtime.server.errors import JsonResponse
from runtime.server.intake import ServedText, described
from runtime.server.protocol.strict import Strict
from runtime.server.routes.registry import ROUTES, register
from runtime.server.serving import Service


class ReverseRequest(Strict):
    text: str


def prepare(served: ServedText, content: bytes) -> str:
    return ReverseRequest.model_validate_json(content).text[::-1]


def reverse_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/reverse", openapi_extra=described(ReverseRequest))
    async def reverse(request: Request) -> Response:
        return JsonResponse({"text": await service.intake.read(request, prepare)})

    return router


@pytest.mark.full
def test_a_family_is_served_and_described_at_its_position(new_alphabet_app: Callable[..., FastAPI]) -> None:
    before: dict[str, Any] = new_alphabet_app().openapi()
    register(order=15, bodies=[ReverseRequest])(reverse_router)
    try:
        app = new_alphabet_app()
        after = app.openapi()
    finally:
        ROUTES.remove("reverse_router")
    assert list(after["paths"])[:3] == ["/v1/completions", "/reverse", "/v1/chat/completions"]
    assert after["components"]["schemas"].pop("ReverseRequest")["required"] == ["text"]
    del after["paths"]["/reverse"]
    assert after == before
    with serving(app) as url:
        assert httpx.post(f"{url}/reverse", json={"text": "abc"}).json() == {"text": "cba"}
