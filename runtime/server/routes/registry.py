"""Registry of families of routes: the application asks it, and names no route."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from compress.common.registry import Registry
from runtime.server.protocol.strict import Strict
from runtime.server.serving import Service


class PlainRoute(APIRoute):
    """A route whose endpoint takes the request and returns a response: FastAPI describes it, and adds nothing to it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


CreateRouter = Callable[[Service], APIRouter]
"""Creates the router of a family for the served model."""


@dataclass(frozen=True, slots=True)
class RouteFamily:
    """Routes that one file describes, and the bodies that they read themselves."""

    create_router: CreateRouter
    bodies: tuple[type[Strict], ...]


ROUTES: Registry[RouteFamily] = Registry("route family", "runtime.server.routes")


def register(order: int, bodies: Sequence[type[Strict]] = ()) -> Callable[[CreateRouter], CreateRouter]:
    """Registers what creates the router of a family.

    Args:
        order: place among the families, by which requests are matched and the description is ordered.
        bodies: bodies that the routes read themselves, in the order of the description.
    """

    def add(create_router: CreateRouter) -> CreateRouter:
        ROUTES.register(create_router.__name__, order=order)(RouteFamily(create_router, tuple(bodies)))
        return create_router

    return add
