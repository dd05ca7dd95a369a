"""Registry of families of routes: the application asks it, and names no route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from fastapi import APIRouter

import runtime.server.routes
from runtime.server.protocol.strict import Strict
from runtime.server.serving import Service

CreateRouter = Callable[[Service], APIRouter]
"""Creates the router of a family for the served model."""


@dataclass(frozen=True, slots=True)
class RouteFamily:
    """Routes that one file describes, and the bodies that they read themselves."""

    create_router: CreateRouter
    bodies: tuple[type[Strict], ...]


_FAMILIES: dict[int, RouteFamily] = {}


def register(position: int, bodies: Sequence[type[Strict]] = ()) -> Callable[[CreateRouter], CreateRouter]:
    """Registers what creates the router of a family.

    Args:
        position: place among the families, by which requests are matched and the description is ordered.
        bodies: bodies that the routes read themselves, in the order of the description.

    Raises:
        ValueError: another family has the position.
    """

    def add(create_router: CreateRouter) -> CreateRouter:
        if position in _FAMILIES:
            raise ValueError(f"position {position} is that of {_FAMILIES[position].create_router.__name__} already")
        _FAMILIES[position] = RouteFamily(create_router, tuple(bodies))
        return create_router

    return add


def route_families() -> list[RouteFamily]:
    """Returns the families in the order of their positions."""
    _import_routes()
    return [_FAMILIES[position] for position in sorted(_FAMILIES)]


@cache
def _import_routes() -> None:
    for module in iter_modules(runtime.server.routes.__path__):
        import_module(f"{runtime.server.routes.__name__}.{module.name}")
