"""Recipes as data: `compress quantize` builds one from options, `compress run` reads one from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from calibration.parts import Part, check_parts, parse_parts, share_out
from compress.common.cli import check_options, option
from compress.common.errors import RecipeError
from compress.stages.base import Stage, TensorStage

Kind = TypeVar("Kind", bound=Stage)

MAX_TOKENS = 2**27
"""Most tokens of a calibration: the hidden states of a model with 4,096 channels would take a terabyte."""


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """Text the model runs over while it is measured. `source`: `bundled`, `pydoc`, `self`, a path or a dataset name, or
    several with weights: `bundled:0.5,a.txt:0.5`, or as parts."""

    source: str | tuple[Part, ...] = option(
        "--calibration",
        default="bundled",
        written=str | list[Any],
        typed=str,
        metavar="TEXT[:WEIGHT,...]",
        help="Text to calibrate on: bundled, self (the model writes it), a .txt, .jsonl or .parquet file, a datasets "
        "name, or several with weights: bundled:0.5,chats.jsonl:0.5",
    )
    samples: int = option(
        "--num-calibration-samples",
        default=64,
        name="num_calibration_samples",
        limits={"at least": 1},
        help="Calibration sequences.",
    )
    length: int = option(
        "--max-seq-length",
        default=512,
        name="max_seq_length",
        limits={"at least": 2},
        help="Tokens per calibration sequence.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.samples * self.length > MAX_TOKENS:
            raise RecipeError(
                f"{self.samples} samples of length {self.length} are more than {MAX_TOKENS:,} tokens",
                "Use --num-calibration-samples 64 and --max-seq-length 512",
            )
        share_out(self.parts, self.samples)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The texts and their weights; one part where no mixture is asked for. Raises DataError."""
        return parse_parts(self.source) if isinstance(self.source, str) else check_parts(self.source)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe: stages in order, calibration and seed.

    Attributes:
        gate: limits of the result, see `compress.evaluate.gate`; they change nothing of it.
    """

    stages: tuple[Stage, ...]
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    seed: int = 0
    name: str = ""
    gate: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.stages:
            raise RecipeError("the recipe has no stages", "Add one, e.g. `- quantize: {method: awq, bits: 4}`")
        if not 0 <= self.seed < 2**63:
            raise RecipeError(f"seed={self.seed} is outside 0 to 2^63 - 1", "Use --seed 0")
        for stage in self.stages:
            stage.check_among(self.stages)

    def find(self, kind: type[Kind]) -> Kind | None:
        """Returns the stage of a kind that a recipe has at most once; None without one."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    @property
    def tensor_stages(self) -> tuple[TensorStage, ...]:
        """Stages that change linears, in order."""
        return tuple(stage for stage in self.stages if isinstance(stage, TensorStage))

    @property
    def needs_calibration(self) -> bool:
        return any(stage.needs_calibration for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for comparing two runs."""
        values = {name: value for name, value in asdict(self).items() if name != "gate"}
        return values | {"stages": [{"stage": stage.name, **stage.to_dict()} for stage in self.stages]}
