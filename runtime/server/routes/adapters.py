"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's form."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from compress.common.errors import ToolkitError
from runtime.core.adapter import find_base
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
    base_model_name: str | None = Field(
        None, description="the one of several models that it is for; by default that of its configuration"
    )


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


def owner_of(service: Service, name: str) -> Service | None:
    """Returns the one of several models that has an adapter."""
    return next((peer for peer in service.peers if name in peer.intake.served.adapters), None)


async def load_adapter(service: Service, body: LoadAdapterRequest) -> None:
    """Loads an adapter for the one of several models that it is for. Raises ApiError."""
    name, path, peers = body.lora_name, Path(body.lora_path), {peer.model_name: peer for peer in service.peers}
    if name in peers or name in service.routes or owner_of(service, name) is not None:
        raise ApiError(400, f"The name '{name}' is served already. Choose another one.", "lora_name")
    try:
        owner = peers[find_base(name, path, body.base_model_name or "", peers)]
        await owner.engine.change_adapters(name, path)
    except ToolkitError as error:
        raise ApiError(400, str(error), "lora_path", "refused") from error
    owner.intake.served.adapters[name] = path
    logger.info("loaded the adapter %s of %s for the model %s", name, path, owner.model_name)


@register(order=85, bodies=[LoadAdapterRequest, UnloadAdapterRequest])
def adapters_router(service: Service) -> APIRouter:
    """Routes that change the adapters, if the server's options allow that; none otherwise."""
    router, turn = APIRouter(route_class=PlainRoute), asyncio.Lock()
    if not service.changes_adapters:
        return router
    options: dict[str, Any] = {"responses": BODY_ERRORS, "response_class": PlainTextResponse}

    @router.post("/v1/load_lora_adapter", openapi_extra=described(LoadAdapterRequest), **options)
    async def load_lora_adapter(request: Request) -> Response:
        """Loads the LoRA adapter of a folder of the server, which requests name as their model from then on."""
        body = await service.intake.read(request, read_load)
        async with turn:
            await load_adapter(service, body)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", openapi_extra=described(UnloadAdapterRequest), **options)
    async def unload_lora_adapter(request: Request) -> Response:
        """Forgets an adapter; answers that have begun are finished with it."""
        name = (await service.intake.read(request, read_unload)).lora_name
        if (owner := owner_of(service, name)) is None:
            raise ApiError(404, f"There is no adapter '{name}'.", "lora_name", "model_not_found")
        del owner.intake.served.adapters[name]
        await owner.engine.change_adapters(name, None)
        logger.info("unloaded the adapter %s", name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return router
