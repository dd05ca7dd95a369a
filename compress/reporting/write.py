"""A page on its way to the disk: whole or not at all, and never over somebody's own file."""

from __future__ import annotations

from pathlib import Path

from compress.checkpoint.errors import ToolkitError
from compress.reporting.html import GENERATOR

_HEAD = 400


def write_page(page: str, out: Path) -> None:
    """Writes a page, over an older one if need be.

    Raises:
        ToolkitError: `out` is a folder or another file than such a page, or its folder does not exist.
    """
    if out.is_dir():
        raise ToolkitError(f"{out} is a folder", f"Name a file: --out {out / 'report.html'}")
    if out.exists() and GENERATOR.encode() not in out.read_bytes()[:_HEAD]:
        raise ToolkitError(f"{out} exists and is no page of this command", "Name another file with --out")
    if not out.parent.is_dir():
        raise ToolkitError(f"the folder {out.parent} does not exist", "Make it, or name another file with --out")
    partial = out.with_name(f"{out.name}.partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(out)
