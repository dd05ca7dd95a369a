"""`/v1/models`."""

from __future__ import annotations

import time
from typing import Any, cast

from fastapi import APIRouter
from starlette.responses import Response

from runtime.server.errors import JsonResponse
from runtime.server.response_models import PARAMETER_ERRORS, Model, ModelList
from runtime.server.routes.registry import register
from runtime.server.serving import Service


@register(order=80)
def models_router(service: Service) -> APIRouter:
    """Routes that list the served models, their adapters and the virtual models."""
    router, served, created = APIRouter(), service.intake.served, int(time.time())

    def describe(name: str, length: int, root: str, parent: str | None = None) -> Model:
        common = {"object": "model", "created": created, "owned_by": "local"}
        found: Any = {"id": name, **common, "max_model_len": length, "root": root, "parent": parent}
        return cast(Model, found)

    def find_models() -> dict[str, Model]:
        lengths = {peer.model_name: peer.limits.max_model_len for peer in service.peers}
        found = {name: describe(name, length, name) for name, length in lengths.items()}
        for peer in service.peers:
            for name, path in peer.intake.served.adapters.items():
                found[name] = describe(name, peer.limits.max_model_len, str(path), peer.model_name)
        for name, route in service.routes.items():
            found[name] = describe(name, min(lengths[model] for model in route.models), name)
        return found

    @router.get("/v1/models", response_model=ModelList)
    async def list_models() -> Response:
        """Lists the served models, then adapters, whose `parent` their model is, then virtual models."""
        models: ModelList = {"object": "list", "data": [*find_models().values()]}
        return JsonResponse(models)

    @router.get("/v1/models/{name:path}", response_model=Model, responses=PARAMETER_ERRORS)
    async def get_model(name: str) -> Response:
        if (found := find_models().get(name)) is None:
            served.check_model(name)
        return JsonResponse(found)

    return router
