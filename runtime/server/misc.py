"""Models, health and metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

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

    return router
