"""What to do to a model, as data: `compress quantize` builds it from options, `compress run` reads it from YAML."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from typing import Any

from calibration.parts import Part, check_parts, parse_parts, share_out
from compress.checkpoint.errors import RecipeError
from compress.checkpoint.scheme import Scheme, Sparsity

PRUNING_METHODS = ("sparsegpt", "wanda", "ria", "magnitude")
FACTORIZING_METHODS = ("svd-llm", "asvd", "svd")
ALLOCATIONS = ("block", "uniform")
METHODS = ("rtn", "awq", "gptq", "smoothquant")
SMOOTHING_METHODS = frozenset(("awq", "smoothquant"))
PER_CHANNEL = -1
DEFAULT_SAMPLES, DEFAULT_LENGTH = 64, 512


@dataclass(frozen=True, slots=True)
class QuantizeStage:
    """Integer quantization of the linears in the transformer blocks.

    Attributes:
        method: rtn (no calibration), awq, gptq or smoothquant.
        scheme: bits, group size and symmetry.
        targets: patterns of the linears this stage takes; empty means all in the blocks. A later stage wins.
        ignore: patterns of modules that stay dense.
        alpha: SmoothQuant's exponent, 0 to 1, for every layer; None searches one for each.
    """

    method: str = "awq"
    scheme: Scheme = field(default_factory=Scheme)
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise RecipeError(f"method {self.method!r} does not exist", nearest(self.method, METHODS, "Methods"))
        if self.method == "smoothquant" and self.scheme.activation_bits is None:
            problem = f"smoothquant makes room for 8-bit activations, and {self.scheme} has none"
            raise RecipeError(problem, "Set activation_bits: 8, or use awq for 16-bit activations")
        if self.alpha is not None and (self.method != "smoothquant" or not 0 <= self.alpha <= 1):
            raise RecipeError(f"alpha={self.alpha} with {self.method} means nothing", "Give smoothquant one of 0 to 1")

    @property
    def needs_calibration(self) -> bool:
        return self.method != "rtn"


@dataclass(frozen=True, slots=True)
class PruneStage:
    """Sets the least important weights to zero. A later quantize stage keeps those zeros exact.

    Attributes:
        method: sparsegpt, wanda, ria, or magnitude (no calibration).
        pattern: N:M, stored without its zeros; None prunes a `sparsity` of the weights wherever they stand, and the
            zeros are stored.
        sparsity: share of the weights that go; a pattern decides it itself.
        targets: patterns of the linears this stage takes; empty means all in the blocks. A later stage wins.
        ignore: patterns of modules that stay as they are.
    """

    method: str = "sparsegpt"
    pattern: Sparsity | None = None
    sparsity: float = 0.5
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in PRUNING_METHODS:
            raise RecipeError(
                f"pruning method {self.method!r} does not exist", nearest(self.method, PRUNING_METHODS, "Methods")
            )
        if not 0 < self.sparsity < 1:
            raise RecipeError(f"sparsity={self.sparsity} is not between 0 and 1", "Use --sparsity 0.5")
        if self.pattern and self.sparsity != 0.5 and self.sparsity != 1 - self.pattern.kept / self.pattern.of:
            raise RecipeError(f"sparsity={self.sparsity} contradicts {self.pattern}", "Give one of them")

    @property
    def needs_calibration(self) -> bool:
        return self.method != "magnitude"


@dataclass(frozen=True, slots=True)
class FactorizeStage:
    """Makes two smaller matrices of each linear, its product of low rank. A later quantize stage rounds both.

    Attributes:
        method: svd-llm (whitened by the inputs), asvd (inputs scaled by their magnitudes), or svd (no calibration).
        keep: share of the weights that stay: a rank of `keep * O * I / (O + I)`, rounded down to a multiple of 8.
        allocation: block shares the ranks out among the linears of a block for the least loss; uniform gives each
            linear its own share.
        targets: patterns of the linears this stage takes; empty means all in the blocks. A later stage wins.
        ignore: patterns of modules that stay as they are.
    """

    method: str = "svd-llm"
    keep: float = 0.8
    allocation: str = "block"
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in FACTORIZING_METHODS:
            remedy = nearest(self.method, FACTORIZING_METHODS, "Methods")
            raise RecipeError(f"factorizing method {self.method!r} does not exist", remedy)
        if self.allocation not in ALLOCATIONS:
            remedy = nearest(self.allocation, ALLOCATIONS, "Allocations")
            raise RecipeError(f"allocation {self.allocation!r} does not exist", remedy)
        if not 0 < self.keep < 1:
            raise RecipeError(f"keep={self.keep} is not between 0 and 1", "Use --keep 0.8 to keep 80 % of the weights")

    @property
    def needs_calibration(self) -> bool:
        return self.method != "svd"


Stage = QuantizeStage | PruneStage | FactorizeStage


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


STAGE_NAMES = {QuantizeStage: "quantize", PruneStage: "prune", FactorizeStage: "factorize"}
"""How a recipe file spells each kind of stage."""


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

    @property
    def needs_calibration(self) -> bool:
        return any(stage.needs_calibration for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for comparing two runs."""
        stages = [{"stage": STAGE_NAMES[type(stage)], **asdict(stage)} for stage in self.stages]
        return asdict(self) | {"stages": stages}


def default_scheme(method: str) -> Scheme:
    """What a method is for, where the user does not say."""
    return Scheme(8, None, activation_bits=8) if method == "smoothquant" else Scheme()


def group_size_from(value: int) -> int | None:
    """The scheme's group size from what a user writes: -1 means one group per output channel."""
    return None if value == PER_CHANNEL else value


def nearest(wanted: str, known: tuple[str, ...], what: str) -> str:
    """A remedy: the nearest known word, if one is near, and all of them."""
    near = get_close_matches(wanted, known, n=1, cutoff=0.5)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    return f"{guess}{what}: {', '.join(known)}"
