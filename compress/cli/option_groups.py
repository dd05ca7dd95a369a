"""Options that make a calibration and a job, grouped as the commands take them. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.errors import RecipeError
from compress.cli.options import (
    AsJson,
    CalibrationText,
    Device,
    DryRun,
    Dtype,
    Length,
    Resume,
    Samples,
    Seed,
    TrustRemoteCode,
)
from compress.recipe import DEFAULT_LENGTH, DEFAULT_SAMPLES, CalibrationOptions, Recipe
from compress.stages.table import Stage

DEFAULT_TEXT = "bundled"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Text to calibrate on."""

    calibration: CalibrationText = DEFAULT_TEXT
    samples: Samples = DEFAULT_SAMPLES
    length: Length = DEFAULT_LENGTH
    seed: Seed = 0

    def recipe(self, stages: tuple[Stage, ...], name: str) -> Recipe:
        """Stages that calibrate on this text. Raises RecipeError, also where none does and a text is named."""
        recipe = Recipe(stages, self.options, self.seed, name=name)
        if self.calibration != DEFAULT_TEXT and not recipe.needs_calibration:
            problem = f"nothing in this run looks at the calibration text {self.calibration}"
            raise RecipeError(problem, "Leave --calibration out, or choose another --method")
        return recipe

    @property
    def options(self) -> CalibrationOptions:
        return CalibrationOptions(self.calibration, self.samples, self.length)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How a recipe is carried out."""

    device: Device = "auto"
    dtype: Dtype = "auto"
    resume: Resume = True
    dry_run: DryRun = False
    as_json: AsJson = False
    trust_remote_code: TrustRemoteCode = False
