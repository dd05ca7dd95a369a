"""Models, health and metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from runtime.server.errors import JsonResponse
from runtime.server.service import Service


def misc_router(service: Service) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def model() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": created,
            "owned_by": "local",
            "max_model_len": service.limits.max_model_len,
        }

    @router.get("/v1/models")
    async def list_models() -> Response:
        """The one model that is served."""
        return JsonResponse({"object": "list", "data": [model()]})

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        service.check_model(name)
        return JsonResponse(model())

    @router.get("/health", responses={503: {"description": "Unhealthy", "content": {"application/json": {}}}})
    async def health() -> Response:
        """Status 200 while answers can be expected, else 503 with the reason."""
        state = service.generations.engine.check()
        body = {
            "status": "ok" if state.healthy else "unhealthy",
            "reason": state.reason,
            "running": state.num_running,
            "waiting": state.num_waiting,
        }
        return JsonResponse(body, 200 if state.healthy else 503)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Figures of the engine in Prometheus' text format."""
        return PlainTextResponse(service.render_metrics(), media_type="text/plain; version=0.0.4")

    return router
