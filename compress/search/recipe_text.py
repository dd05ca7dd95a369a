"""A recipe as YAML text that `compress run` reads. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compress.checkpoint.disk import atomic_file
from compress.checkpoint.errors import CheckpointError
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.factorize import FactorizeStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import PER_CHANNEL, QuantizeStage
from compress.stages.table import Stage

HEADER = "# Found by compress search."


def write_recipe(path: Path, recipe: Recipe, remarks: Sequence[str]) -> None:
    """Writes a recipe, over an older one of a search if need be. Raises CheckpointError for anybody else's file."""
    if path.exists() and not path.read_bytes().startswith(HEADER.encode()):
        raise CheckpointError(f"{path} exists and is no recipe of a search", "Name another file with --recipe")
    with atomic_file(path) as stream:
        stream.write(recipe_text(recipe, remarks).encode())


def recipe_text(recipe: Recipe, remarks: Sequence[str]) -> str:
    """YAML with remarks in front. Its stages must be such as a search finds."""
    lines = [HEADER, *(f"# {remark}" for remark in remarks)]
    lines += [f"name: {_quoted(recipe.name)}", f"seed: {recipe.seed}", *_calibration(recipe.calibration), "stages:"]
    for stage in recipe.stages:
        lines += _stage(stage)
    return "\n".join(lines) + "\n"


def _calibration(options: CalibrationOptions) -> list[str]:
    lines = ["calibration:"]
    if isinstance(options.source, str):
        lines.append(f"  source: {_quoted(options.source)}")
    else:
        lines.append("  source:")
        lines += [f"    - {{source: {_quoted(part.source)}, weight: {part.weight!r}}}" for part in options.source]
    return [*lines, f"  samples: {options.samples}", f"  length: {options.length}"]


def _stage(stage: Stage) -> list[str]:
    match stage:
        case QuantizeStage(scheme=scheme):
            group = scheme.group_size or PER_CHANNEL
            symmetric = "true" if scheme.symmetric else "false"
            name, fields = "quantize", {"bits": scheme.bits, "group_size": group, "symmetric": symmetric}
        case PruneStage(pattern=pattern) if pattern:
            name, fields = "prune", {"pattern": _quoted(str(pattern))}
        case FactorizeStage():
            name, fields = "factorize", {"keep": stage.keep, "allocation": stage.allocation}
        case _:
            raise TypeError(f"a search writes no {type(stage).__name__}")
    lines = [f"  - {name}:", f"      method: {stage.method}", *(f"      {key}: {fields[key]}" for key in fields)]
    return [*lines, "      targets:", *(f"        - {target}" for target in stage.targets)]


def _quoted(text: str) -> str:
    """A YAML scalar that is this text whatever characters it has."""
    return "'" + text.replace("'", "''") + "'"
