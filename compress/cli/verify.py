"""`compress verify`: is a checkpoint on disk what it says it is?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.cli.options import AsJson

if TYPE_CHECKING:
    from compress.checkpoint.structure import StructureReport


def verify(
    path: Annotated[Path, typer.Argument(help="A checkpoint folder, packed by this or another tool.")],
    as_json: AsJson = False,
) -> None:
    """Re-read a checkpoint and check config, names, shapes, codes and scales.

    Where the folder holds the report of its making, the codes are compared with it bit for bit.
    """
    from compress.checkpoint.errors import CheckpointError
    from compress.checkpoint.verify import verify_structure
    from compress.pipeline.finish import compare_with_report

    structure = verify_structure(path)
    differing = compare_with_report(path)
    problems = [*structure.problems, *(differing or ())]
    if as_json:
        typer.echo(json.dumps(structure.as_dict() | {"problems": problems, "ok": not problems}, indent=2))
    else:
        _print(structure, compared=differing is not None)
        for problem in problems:
            typer.echo(f"problem: {problem}")
    if problems:
        raise CheckpointError(f"{path} has {len(problems)} problems", "Write or download it again")


def _kv_cache(path: str) -> list[str]:
    """What the checkpoint says of keys and values, where it says anything."""
    from compress.checkpoint.config import read_config
    from compress.checkpoint.errors import ToolkitError
    from compress.checkpoint.kv_cache import stored_kv_cache

    try:
        scheme = stored_kv_cache(read_config(path))
    except ToolkitError:
        # It is among the problems.
        return []
    return [f"keys and values are kept as {scheme} unless serving is told otherwise"] if scheme else []


def _print(structure: StructureReport, compared: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from compress.targets import without_indices

    kinds: dict[tuple[str, str], int] = {}
    for module, scheme in structure.quantized.items():
        kinds[without_indices(module), scheme] = kinds.get((without_indices(module), scheme), 0) + 1
    for tensor in structure.dense:
        kind = (without_indices(tensor.name), f"dense: {tensor.reason}")
        kinds[kind] = kinds.get(kind, 0) + 1
    table = Table("tensor", "stored as", "count", title=f"{structure.path} ({structure.format})", title_justify="left")
    for (name, stored), count in sorted(kinds.items()):
        table.add_row(name, stored, str(count))
    console = Console()
    console.print(table)
    lines = [
        f"{structure.total_bytes / 1e6:,.2f} MB, {structure.bits_per_weight:.3f} bits per quantized weight, "
        f"{structure.bits_per_parameter:.3f} over the whole model",
        *_kv_cache(structure.path),
        "codes compared with the report of their making" if compared else "no report to compare the codes with",
        *structure.notes,
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False)
