"""`/health` and `/metrics`: for those who watch the server."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from runtime.server.errors import JsonResponse
from runtime.server.service import Service


def health_router(service: Service) -> APIRouter:
    """Routes that say how the engine is."""
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
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
