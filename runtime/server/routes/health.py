"""`/health`, `/metrics` and `/version`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from compress.common.cli import tool_version
from runtime.engine.metrics import join
from runtime.server.errors import JsonResponse
from runtime.server.response_models import HealthResponse, Responses, VersionResponse
from runtime.server.routes.registry import register
from runtime.server.serving import Service, check_all

UNHEALTHY: Responses = {
    503: {"model": HealthResponse, "description": "Starting, unhealthy, or draining: it stops after the last answer"}
}


@register(order=90)
def health_router(service: Service) -> APIRouter:
    """Routes for health, metrics and the version."""
    router = APIRouter()

    @router.get("/health", response_model=HealthResponse, responses=UNHEALTHY)
    async def health(request: Request) -> Response:
        """Status 200 while the engine is healthy and the server takes requests, else 503 with the reason."""
        state, is_draining = check_all(service.peers), request.app.state.drain.has_begun
        body: HealthResponse = {
            "status": "draining" if is_draining else "ok" if state.healthy else "unhealthy",
            "reason": "the server is stopping" if is_draining else state.reason,
            "running": state.num_running,
            "waiting": state.num_waiting,
        }
        return JsonResponse(body, 200 if body["status"] == "ok" else 503)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics of the engine, of requests and of the process in Prometheus' text format."""
        texts = await asyncio.gather(*(each.engine.render_metrics(each.model_name) for each in service.peers))
        text = join(texts) + service.render_server_metrics()
        return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)

    @router.get("/version", response_model=VersionResponse)
    async def get_version() -> Response:
        """Version of the toolkit."""
        version: VersionResponse = {"version": tool_version()}
        return JsonResponse(version)

    return router
