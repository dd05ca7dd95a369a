"""Files of the page at `/`, which has no resources of other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable

FOLDER = files("runtime.server") / "page"

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
}
"""Media types by the ends of names; licences and the list of versions in `vendor` have none and are not served."""


def find_files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    """Yields path and file of what is served, with folders inside."""
    for item in folder.iterdir():
        if item.is_dir():
            yield from find_files(item, f"{prefix}{item.name}/")
        elif item.name.rpartition(".")[2] in TYPES:
            yield prefix + item.name, item


MEDIA_TYPES = {name: TYPES[name.rpartition(".")[2]] for name, _ in find_files(FOLDER)}
"""Media types of the files in the folder `page`, by path."""

PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in MEDIA_TYPES)})
"""Served without an API key, which is entered in the page."""
