"""What to do to a model, as data: `compress quantize` builds it from options, `compress run` reads it from YAML."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from calibration.parts import Part, check_parts, parse_parts, share_out
from compress.checkpoint.errors import RecipeError
from compress.stages.kv_cache import KVCacheStage
from compress.stages.rotate import RotateStage
from compress.stages.table import STAGE_NAMES, Stage, TensorStage

DEFAULT_SAMPLES, DEFAULT_LENGTH = 64, 512


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """Text the model runs over while it is measured.

    Attributes:
        source: `bundled`, `pydoc`, `self`, a path or a dataset name, or several with weights: `bundled:0.5,a.txt:0.5`,
            or as parts.
        samples: number of sequences.
        length: tokens of one sequence.
    """

    source: str | tuple[Part, ...] = "bundled"
    samples: int = DEFAULT_SAMPLES
    length: int = DEFAULT_LENGTH

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise RecipeError(f"samples={self.samples} leaves nothing to calibrate on", "Use --samples 64")
        if self.length < 2:
            raise RecipeError(f"length={self.length} is too short a sequence", "Use --length 512")
        share_out(self.parts, self.samples)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The texts and their weights; one part where no mixture is asked for. Raises DataError."""
        return parse_parts(self.source) if isinstance(self.source, str) else check_parts(self.source)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the result besides the model: stages in order, calibration and seed."""

    stages: tuple[Stage, ...]
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if not self.stages:
            raise RecipeError("the recipe has no stages", "Add one, e.g. `- quantize: {method: awq, bits: 4}`")
        if not 0 <= self.seed < 2**63:
            raise RecipeError(f"seed={self.seed} is outside 0 to 2^63 - 1", "Use --seed 0")

        if len([stage for stage in self.stages if isinstance(stage, KVCacheStage)]) > 1:
            raise RecipeError("kv_cache stands twice in the recipe", "Keep one: its format `auto` compares them all")

        if any(isinstance(stage, RotateStage) for stage in self.stages[1:]):
            raise RecipeError("rotate does not stand first", "Put it first: every other stage works on what it gives")

    @property
    def rotate(self) -> RotateStage | None:
        """The one that turns the whole model before all others."""
        return next((stage for stage in self.stages if isinstance(stage, RotateStage)), None)

    @property
    def tensor_stages(self) -> tuple[TensorStage, ...]:
        """Those that change linears, in order."""
        return tuple(stage for stage in self.stages if not isinstance(stage, KVCacheStage | RotateStage))

    @property
    def kv_cache(self) -> KVCacheStage | None:
        """The one that chooses the form of keys and values, wherever it stands: it is carried out last."""
        return next((stage for stage in self.stages if isinstance(stage, KVCacheStage)), None)

    @property
    def needs_calibration(self) -> bool:
        return any(stage.needs_calibration for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for comparing two runs."""
        stages = [{"stage": STAGE_NAMES[type(stage)], **asdict(stage)} for stage in self.stages]
        return asdict(self) | {"stages": stages}
