"""`/v1/models`: the one model that is served."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.responses import Response

from runtime.server.errors import JsonResponse
from runtime.server.service import Service


def models_router(service: Service) -> APIRouter:
    """Routes that say what is served."""
    router = APIRouter()
    model = {
        "id": service.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "local",
        "max_model_len": service.limits.max_model_len,
    }

    @router.get("/v1/models")
    async def list_models() -> Response:
        """The one model that is served."""
        return JsonResponse({"object": "list", "data": [model]})

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        service.check_model(name)
        return JsonResponse(model)

    return router
