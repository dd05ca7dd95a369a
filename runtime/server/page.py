"""The page at `/`: static files of this package, without resources of other hosts."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from runtime.server.errors import ApiError

MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "alternatives.js": "text/javascript; charset=utf-8",
    "answer.js": "text/javascript; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "conversation.js": "text/javascript; charset=utf-8",
    "figures.js": "text/javascript; charset=utf-8",
    "main.js": "text/javascript; charset=utf-8",
    "settings.js": "text/javascript; charset=utf-8",
}
"""Media types of the files in the folder `page`."""

PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in MEDIA_TYPES)})
"""Served without an API key, which is entered in the page."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    """Serves the page from memory; it is read once, when the application is created."""
    router = APIRouter(include_in_schema=False)
    folder = files("runtime.server") / "page"
    contents = {name: (folder / name).read_bytes() for name in MEDIA_TYPES}

    def answer(name: str) -> Response:
        return Response(contents[name], media_type=MEDIA_TYPES[name], headers=HEADERS)

    @router.get("/")
    async def page() -> Response:
        return answer("index.html")

    @router.get("/page/{name}")
    async def part_of_page(name: str) -> Response:
        if name not in contents:
            raise ApiError(404, f"The page has no file '{name}'.")
        return answer(name)

    return router
