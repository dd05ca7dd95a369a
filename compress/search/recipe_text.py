"""A recipe as YAML text that `compress run` reads. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compress.checkpoint.disk import atomic_file
from compress.checkpoint.errors import CheckpointError
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.quantize import PER_CHANNEL, QuantizeStage

HEADER = "# Found by compress search."


def write_recipe(path: Path, recipe: Recipe, remarks: Sequence[str]) -> None:
    """Writes a recipe, over an older one of a search if need be. Raises CheckpointError for anybody else's file."""
    if path.exists() and not path.read_bytes().startswith(HEADER.encode()):
        raise CheckpointError(f"{path} exists and is no recipe of a search", "Name another file with --recipe")
    with atomic_file(path) as stream:
        stream.write(recipe_text(recipe, remarks).encode())


def recipe_text(recipe: Recipe, remarks: Sequence[str]) -> str:
    """YAML with remarks in front. The recipe's stages must all be of quantization."""
    lines = [HEADER, *(f"# {remark}" for remark in remarks)]
    lines += [f"name: {_quoted(recipe.name)}", f"seed: {recipe.seed}", *_calibration(recipe.calibration), "stages:"]
    for stage in recipe.stages:
        if not isinstance(stage, QuantizeStage):
            raise TypeError(f"a search writes no {type(stage).__name__}")
        lines += _quantize(stage)
    return "\n".join(lines) + "\n"


def _calibration(options: CalibrationOptions) -> list[str]:
    lines = ["calibration:"]
    if isinstance(options.source, str):
        lines.append(f"  source: {_quoted(options.source)}")
    else:
        lines.append("  source:")
        lines += [f"    - {{source: {_quoted(part.source)}, weight: {part.weight!r}}}" for part in options.source]
    return [*lines, f"  samples: {options.samples}", f"  length: {options.length}"]


def _quantize(stage: QuantizeStage) -> list[str]:
    scheme = stage.scheme
    return [
        "  - quantize:",
        f"      method: {stage.method}",
        f"      bits: {scheme.bits}",
        f"      group_size: {scheme.group_size or PER_CHANNEL}",
        f"      symmetric: {'true' if scheme.symmetric else 'false'}",
        "      targets:",
        *(f"        - {target}" for target in stage.targets),
    ]


def _quoted(text: str) -> str:
    """A YAML scalar that is this text whatever characters it has."""
    return "'" + text.replace("'", "''") + "'"
