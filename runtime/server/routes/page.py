"""The page at `/`: static files of this package."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from runtime.server.errors import ApiError
from runtime.server.page import FOLDER, MEDIA_TYPES, find_files
from runtime.server.routes.registry import register
from runtime.server.serving import Service

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@register(order=100)
def page_router(_: Service) -> APIRouter:
    """Serves the page from memory; it is read once, when the application is created."""
    router = APIRouter(include_in_schema=False)
    contents = {name: item.read_bytes() for name, item in find_files(FOLDER)}

    def answer(name: str) -> Response:
        return Response(contents[name], media_type=MEDIA_TYPES[name], headers=HEADERS)

    @router.get("/")
    async def page() -> Response:
        return answer("index.html")

    @router.get("/page/{name:path}")
    async def part_of_page(name: str) -> Response:
        if name not in contents:
            raise ApiError(404, f"The page has no file '{name}'.")
        return answer(name)

    return router
