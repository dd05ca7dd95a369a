"""Interface of the stages of a recipe, and their registry.

A stage is one file of this folder: a frozen dataclass derived from `Stage`, or from `TensorStage` if it changes
linears, and decorated with `STAGES.register(order=...)`, which says when it works. Fields declared with
`compress.common.cli.option` are its keys in recipes, and options of the command with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from compress.common.cli import Key, as_written, check_options, from_written, option
from compress.common.errors import RecipeError
from compress.common.registry import Registry
from compress.methods.base import METHODS
from compress.plan import End, LayerPlan, PlanRow

STAGES: Registry[type[Stage]] = Registry("stage", "compress.stages", RecipeError)


@dataclass(frozen=True)
class Stage:
    """Stage of a recipe. `added_by`: option of `compress quantize` that adds the stage, with the value of its first
    field."""

    name: ClassVar[str]
    is_single: ClassVar[bool] = False
    added_by: ClassVar[Key | None] = None

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def written_keys(cls, **starts: Any) -> Iterator[Key]:
        """Yields the keys as users write them; `starts` replace their defaults."""
        return as_written(cls, **starts)

    @classmethod
    def build(cls, written: Mapping[str, Any], **changes: Any) -> Self:
        """Builds the stage from its keys as users write them, and `changes`. Raises RecipeError, SchemeError."""
        return from_written(cls, written, **changes)

    @property
    def needs_calibration(self) -> bool:
        return False

    @property
    def label(self) -> str:
        """Part of the name of a recipe that a command builds."""
        return self.name

    def check_among(self, stages: Sequence[Stage]) -> None:
        """Raises RecipeError if a recipe with these stages, of which this is one, cannot have it."""
        if self.is_single and sum(each.name == self.name for each in stages) > 1:
            raise RecipeError(f"the recipe has two {self.name} stages", "Keep one")

    def fitted(self, planned_bytes: Callable[[Stage], int]) -> Stage:
        """Returns the stage with everything that the size of the model decides. Raises RecipeError: a size out of
        reach. `planned_bytes`: function from another stage in its place to the bytes of the checkpoint."""
        return self

    def notes(self, rows: Sequence[PlanRow], context_length: int | None) -> list[str]:
        """Returns notes for users on a plan with this stage."""
        return []

    def to_keys(self) -> dict[str, Any]:
        """Returns the keys of recipes that a search writes."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for recorded recipes."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class TensorStage(Stage):
    """Stage that changes linears.

    Attributes:
        targets: patterns of the linears that it takes; empty takes all in the blocks. A later stage wins.
        ignore: patterns of modules that it leaves as they are.
    """

    targets: tuple[str, ...] = option(default=(), written=list[str], typed=None, read=tuple)
    ignore: tuple[str, ...] = option(default=(), written=list[str], typed=None, read=tuple)

    def apply(self, before: LayerPlan, in_features: int, ignored: bool) -> LayerPlan:
        """Returns the plan of a linear after this stage; if `ignored`, without what an earlier stage of this kind
        did."""
        raise NotImplementedError

    def check_outside(self, name: str, end: End) -> None:
        """Raises RecipeError if the stage cannot change the token embedding or the output head."""
        remedy = "Target linear layers inside the blocks, or quantize it"
        raise RecipeError(f"{self.name} cannot change {name}, the {end.what}", remedy)

    def to_keys(self) -> dict[str, Any]:
        return self.work_keys() | {"targets": list(self.targets)}

    def work_keys(self) -> dict[str, Any]:
        """Returns the keys of recipes that a search writes, without patterns."""
        raise NotImplementedError


def method_help(stage: str, default: str = "") -> str:
    """Returns the help of `--method`: all methods of a stage with theirs."""
    listed = "; ".join(f"{name} ({method.help})" for name, method in METHODS[stage].items())
    return f"{listed}. {default}".strip()
