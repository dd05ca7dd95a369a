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
from runtime.server.routes import registry
from runtime.server.routes.registry import register, route_families
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


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of the same families, which a test may add to."""
    route_families()
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))


@pytest.mark.full
@pytest.mark.usefixtures("own_registry")
def test_a_family_is_served_and_described_at_its_position(new_alphabet_app: Callable[..., FastAPI]) -> None:
    before: dict[str, Any] = new_alphabet_app().openapi()
    register(position=15, bodies=[ReverseRequest])(reverse_router)
    app = new_alphabet_app()
    after = app.openapi()
    assert list(after["paths"])[:3] == ["/v1/completions", "/reverse", "/v1/chat/completions"]
    assert after["components"]["schemas"].pop("ReverseRequest")["required"] == ["text"]
    del after["paths"]["/reverse"]
    assert after == before
    with serving(app) as url:
        assert httpx.post(f"{url}/reverse", json={"text": "abc"}).json() == {"text": "cba"}


@pytest.mark.usefixtures("own_registry")
def test_a_position_has_one_family() -> None:
    families = route_families()
    with pytest.raises(ValueError, match="position 10 is that of completions_router already"):
        register(position=10)(reverse_router)
    assert route_families() == families
