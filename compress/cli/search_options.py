"""Options of `compress search`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from compress.search.goal import Goal, parse_size


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What is searched for; one of the three is given."""

    target_bpw: Annotated[
        float | None, typer.Option("--target-bpw", help="Best quality within so many bits per weight, scales included.")
    ] = None
    target_size: Annotated[
        str | None, typer.Option("--target-size", metavar="SIZE", help="Best quality within a size: 5GB, 800MB.")
    ] = None
    max_kl: Annotated[
        float | None, typer.Option("--max-kl", help="Least size whose measured KL to the dense model is at most this.")
    ] = None

    def goal(self) -> Goal:
        """What the options say. Raises RecipeError."""
        size = None if self.target_size is None else parse_size(self.target_size)
        return Goal(self.target_bpw, size, self.max_kl)


@dataclass(frozen=True, slots=True)
class SearchFiles:
    """Where a search keeps what it finds."""

    sensitivities: Annotated[
        Path | None,
        typer.Option(help="File of measured figures, read and added to. Default: OUT.sensitivities.json."),
    ] = None
    recipe: Annotated[Path | None, typer.Option("--recipe", help="Recipe to write. Default: OUT.yaml.")] = None
    recipe_only: Annotated[bool, typer.Option("--recipe-only", help="Write the recipe, and compress nothing.")] = False
