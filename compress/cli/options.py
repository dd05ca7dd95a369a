"""Options that several commands share, spelled the same everywhere. Imports nothing heavy: help must be instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compress.checkpoint.errors import RecipeError

Model = Annotated[
    Path | None,
    typer.Argument(metavar="MODEL", help="Folder of a dense Hugging Face model. Default: the bundled demo model."),
]
Out = Annotated[Path, typer.Option("--out", help="Folder to write; must not exist.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="Dtype of the calibration passes: auto, bfloat16, float16 or float32."),
]
Resume = Annotated[
    bool,
    typer.Option("--resume/--restart", help="Continue unfinished progress of this output, or throw it away."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would happen to every tensor, and stop.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python files of the model folder. Read them first.")
]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", help="Layer to leave as it is: a name (down_proj), a glob, or re:PATTERN. Repeatable."),
]
CalibrationText = Annotated[
    str,
    typer.Option(
        "--calibration",
        metavar="TEXT[:WEIGHT,...]",
        help="Text to calibrate on: bundled, self (the model writes it), a .txt, .jsonl or .parquet file, a datasets "
        "name, or several with weights: bundled:0.5,chats.jsonl:0.5",
    ),
]
Samples = Annotated[int, typer.Option("--samples", help="Calibration sequences.")]
Length = Annotated[int, typer.Option("--length", help="Tokens of a calibration sequence.")]
Seed = Annotated[int, typer.Option("--seed", help="Decides which calibration sequences are taken.")]

DEFAULT_OUT = Path("packed")


def check_rounded(bits: int | None, group_size: int | None) -> None:
    """Raises RecipeError for groups of weights that are not rounded."""
    if bits is None and group_size is not None:
        raise RecipeError(f"--group-size {group_size} means nothing without --bits", "Add --bits 4, or leave it out")
