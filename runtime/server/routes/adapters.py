"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's form."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from compress.common.errors import ToolkitError
from runtime.server.errors import ApiError
from runtime.server.intake import ServedText, described
from runtime.server.protocol.strict import Strict
from runtime.server.response_models import BODY_ERRORS
from runtime.server.routes.registry import PlainRoute, register
from runtime.server.serving import Service

logger = logging.getLogger("runtime.server")


class LoadAdapterRequest(Strict):
    """Body of `/v1/load_lora_adapter`."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1, description="folder on the server that PEFT wrote")


class UnloadAdapterRequest(Strict):
    """Body of `/v1/unload_lora_adapter`."""

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = Field(None, description="ignored; vLLM's clients may send it")


def read_load(served: ServedText, raw: bytes) -> LoadAdapterRequest:
    """Returns a checked body. Raises ApiError."""
    return served.parse(raw, LoadAdapterRequest)


def read_unload(served: ServedText, raw: bytes) -> UnloadAdapterRequest:
    """Returns a checked body. Raises ApiError."""
    return served.parse(raw, UnloadAdapterRequest)


@register(order=85, bodies=[LoadAdapterRequest, UnloadAdapterRequest])
def adapters_router(service: Service) -> APIRouter:
    """Routes that change the adapters, if the server's options allow that; none otherwise."""
    router, adapters = APIRouter(route_class=PlainRoute), service.intake.served.adapters
    if not service.changes_adapters:
        return router
    options: dict[str, Any] = {"responses": BODY_ERRORS, "response_class": PlainTextResponse}

    @router.post("/v1/load_lora_adapter", openapi_extra=described(LoadAdapterRequest), **options)
    async def load_lora_adapter(request: Request) -> Response:
        """Loads the LoRA adapter of a folder of the server, which requests name as their model from then on."""
        body = await service.intake.read(request, read_load)
        if body.lora_name in (service.model_name, *adapters):
            raise ApiError(400, f"The name '{body.lora_name}' is served already. Choose another one.", "lora_name")
        path = Path(body.lora_path)
        try:
            await service.engine.change_adapters(body.lora_name, path)
        except ToolkitError as error:
            raise ApiError(400, str(error), "lora_path", "refused") from error
        adapters[body.lora_name] = path
        logger.info("loaded the adapter %s of %s", body.lora_name, path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", openapi_extra=described(UnloadAdapterRequest), **options)
    async def unload_lora_adapter(request: Request) -> Response:
        """Forgets an adapter; answers that have begun are finished with it."""
        name = (await service.intake.read(request, read_unload)).lora_name
        if adapters.pop(name, None) is None:
            raise ApiError(404, f"There is no adapter '{name}'.", "lora_name", "model_not_found")
        await service.engine.change_adapters(name, None)
        logger.info("unloaded the adapter %s", name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return router
