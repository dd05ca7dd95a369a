"""`compress export`: the same integers in another file format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    path: Annotated[Path, typer.Argument(help="A packed checkpoint folder.")],
    format: Annotated[str, typer.Option(help="compressed-tensors, compress-runtime, gptq, awq, or dense.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
) -> None:
    """Write a packed checkpoint in another format, losslessly, or say why that format cannot hold it."""
    from compress.checkpoint.export import export_checkpoint

    written = export_checkpoint(path, format, out)
    typer.echo(f"wrote {written} ({format})")
