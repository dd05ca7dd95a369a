"""A Python without the packages that a bare machine with a GPU lacks: import it first, or `pytest -p bare_machine`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from typing import Any

NAMES = """compressed_tensors datasets fastapi gemlite httpx importlinter jsonschema llama_cpp llguidance lm_eval openai
playwright pydantic schemathesis starlette tenacity uvicorn"""
MISSING = frozenset(NAMES.split())


class Without:
    """A finder of modules that does not find those of `MISSING`."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in MISSING else self.finder.find_spec(name, path, target)

    def find_distributions(self, *context: Any) -> Iterable[Distribution]:
        """Those of the finder without that of a package which is missing, or its plugins would be loaded."""
        found = getattr(self.finder, "find_distributions", lambda *context: ())(*context)
        return (each for each in found if each.name.lower().replace("-", "_") not in MISSING)


if loaded := sorted(MISSING & {name.partition(".")[0] for name in sys.modules}):
    raise ImportError(f"imported before bare_machine: {', '.join(loaded)}")
sys.meta_path[:] = map(Without, sys.meta_path)
