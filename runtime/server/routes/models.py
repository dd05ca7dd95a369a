"""`/v1/models`."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.responses import Response

from runtime.server.errors import JsonResponse
from runtime.server.response_models import PARAMETER_ERRORS, Model, ModelList
from runtime.server.routes.registry import register
from runtime.server.serving import Service


@register(order=80)
def models_router(service: Service) -> APIRouter:
    """Routes that list the served model and its adapters."""
    router, served, created = APIRouter(), service.intake.served, int(time.time())

    def describe(name: str) -> Model:
        path = served.adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "local",
            "max_model_len": service.limits.max_model_len,
            "root": name if path is None else str(path),
            "parent": None if path is None else service.model_name,
        }

    @router.get("/v1/models", response_model=ModelList)
    async def list_models() -> Response:
        """Lists the served model, then its adapters, whose `parent` it is."""
        names = service.model_name, *served.adapters
        models: ModelList = {"object": "list", "data": [describe(name) for name in names]}
        return JsonResponse(models)

    @router.get("/v1/models/{name:path}", response_model=Model, responses=PARAMETER_ERRORS)
    async def get_model(name: str) -> Response:
        served.check_model(name)
        return JsonResponse(describe(name))

    return router
