"""Checks, one per file. Every module of this package is imported, so a new file registers itself."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
