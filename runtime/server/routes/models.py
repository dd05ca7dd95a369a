"""`/v1/models`."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.responses import Response

from runtime.server.errors import JsonResponse
from runtime.server.response_models import PARAMETER_ERRORS, Model, ModelList
from runtime.server.routes.registry import register
from runtime.server.serving import Service


@register(position=80)
def models_router(service: Service) -> APIRouter:
    """Routes that list the served model."""
    router = APIRouter()
    model: Model = {
        "id": service.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "local",
        "max_model_len": service.limits.max_model_len,
    }

    @router.get("/v1/models", response_model=ModelList)
    async def list_models() -> Response:
        """Lists the served model."""
        models: ModelList = {"object": "list", "data": [model]}
        return JsonResponse(models)

    @router.get("/v1/models/{name:path}", response_model=Model, responses=PARAMETER_ERRORS)
    async def get_model(name: str) -> Response:
        service.intake.served.check_model(name)
        return JsonResponse(model)

    return router
