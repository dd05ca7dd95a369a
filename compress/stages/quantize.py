"""The stage that rounds weights to integers or 8-bit floats."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from compress.checkpoint.errors import RecipeError
from compress.checkpoint.scheme import FLOAT_BITS, MAX_BITS, Scheme
from compress.stages.tuning import Tuning
from compress.stages.words import nearest

METHODS = ("rtn", "hqq", "awq", "gptq", "gptaq", "signround", "smoothquant")
DATA_FREE_METHODS = frozenset(("rtn", "hqq"))
FACTOR_METHODS = frozenset(("rtn", "gptq"))
SMOOTHING_METHODS = frozenset(("awq", "smoothquant"))
ALPHA_METHODS = ("smoothquant", "gptaq")
FP8_METHODS = ("rtn", "smoothquant")
DEFAULT_METHOD, DEFAULT_FP8_METHOD = "awq", "rtn"
PER_CHANNEL = -1
HEAD_TARGET, EMBEDDING_TARGET = "lm_head", "embed_tokens"


@dataclass(frozen=True, slots=True)
class QuantizeStage:
    """Quantization of the linears in the transformer blocks.

    Attributes:
        method: rtn or hqq (no calibration), awq, gptq, gptaq, signround or smoothquant.
        scheme: bits, group size and symmetry, or 8-bit floats, which every weight is rounded to the nearest of.
        targets: patterns of the linears this stage takes; empty means all in the blocks. A later stage wins.
        ignore: patterns of modules that stay dense.
        alpha: SmoothQuant's exponent, 0 to 1, for every layer; None searches one for each. GPTAQ's share of the drift
            of inputs that is made up for, 0 to 1; None is all of it.
        tuning: how signround learns; None for every other method.
        outlier_columns: share of the input columns (below 1), or how many, that stay in 16 bits.
    """

    method: str = DEFAULT_METHOD
    scheme: Scheme = field(default_factory=Scheme)
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    alpha: float | None = None
    tuning: Tuning | None = None
    outlier_columns: float | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise RecipeError(f"method {self.method!r} does not exist", nearest(self.method, METHODS, "Methods"))
        if self.scheme.fp8 and self.method not in FP8_METHODS:
            problem = f"{self.method} chooses integers, and {self.scheme} has none"
            raise RecipeError(problem, f"Use method {' or '.join(FP8_METHODS)} for 8-bit floats")
        if self.method == "smoothquant" and self.scheme.activation_bits is None:
            problem = f"smoothquant makes room for 8-bit activations, and {self.scheme} has none"
            raise RecipeError(problem, "Set activation_bits: 8, or use awq for 16-bit activations")
        if self.alpha is not None and (self.method not in ALPHA_METHODS or not 0 <= self.alpha <= 1):
            remedy = f"Give {' or '.join(ALPHA_METHODS)} one of 0 to 1"
            raise RecipeError(f"alpha={self.alpha} with {self.method} means nothing", remedy)
        if self.outlier_columns is not None:
            self._check_outliers(self.outlier_columns)
        if self.method == "signround":
            self._check_signround()
        elif self.tuning is not None:
            raise RecipeError(f"{self.method} learns nothing in steps", "Leave steps out, or use method signround")

    def _check_signround(self) -> None:
        if self.scheme.activation_bits is not None:
            problem = f"signround learns with 16-bit activations, and {self.scheme} rounds them"
            raise RecipeError(problem, "Leave activation_bits out, or use gptq or smoothquant")
        if self.tuning is None:
            object.__setattr__(self, "tuning", Tuning())

    def _check_outliers(self, wanted: float) -> None:
        if not (0 < wanted < 1 or (float(wanted).is_integer() and wanted > 0)):
            problem = f"outlier_columns={wanted:g} is neither a share below 1 nor a number of columns"
            raise RecipeError(problem, "Use 0.01 to keep 1 % of the columns in 16 bits")
        if self.method == "signround":
            raise RecipeError("signround learns no outlier columns", "Use gptq, or leave outlier_columns out")
        if self.method == "gptaq":
            raise RecipeError("gptaq keeps no outlier columns", "Use gptq, or leave outlier_columns out")

    @property
    def needs_calibration(self) -> bool:
        return self.method not in DATA_FREE_METHODS or self.outlier_columns is not None

    def scheme_for(self, in_features: int) -> Scheme:
        """The scheme of a layer with so many inputs."""
        wanted = self.outlier_columns
        if wanted is None:
            return self.scheme
        return replace(self.scheme, outliers=int(wanted) if wanted >= 1 else max(1, round(wanted * in_features)))


def default_method(fp8: bool) -> str:
    """The method of a user who names none."""
    return DEFAULT_FP8_METHOD if fp8 else DEFAULT_METHOD


def default_scheme(method: str, fp8: bool = False) -> Scheme:
    """What a method or 8-bit floats are for, where the user does not say."""
    return Scheme(8, None, activation_bits=8, fp8=fp8) if fp8 or method == "smoothquant" else Scheme()


def activation_bits_from(value: int) -> int | None:
    """The scheme's activation bits from what a user writes: 16 means that activations are not rounded."""
    return None if value == FLOAT_BITS else value


def end_stages(stage: QuantizeStage, head_bits: int | None, embedding_bits: int | None) -> tuple[QuantizeStage, ...]:
    """Stages for the matrices outside of the blocks, where they get bits: the head is rounded by GPTQ when there is a
    calibration anyway, the embedding to nearest. 8 bits have one scale per row, fewer have the groups of `stage`; the
    usual ones beside 8-bit activations, whose weights have none.

    Args:
        stage: what the linears in the blocks get.
    """
    head_method = "gptq" if stage.needs_calibration else "rtn"
    group_size = Scheme().group_size if stage.scheme.activation_bits else stage.scheme.group_size
    wanted = ((HEAD_TARGET, head_bits, head_method), (EMBEDDING_TARGET, embedding_bits, "rtn"))
    return tuple(
        QuantizeStage(method, Scheme(bits, None if bits == MAX_BITS else group_size), targets=(name,))
        for name, bits, method in wanted
        if bits is not None
    )


def group_size_from(value: int) -> int | None:
    """The scheme's group size from what a user writes: -1 means one group per output channel."""
    return None if value == PER_CHANNEL else value
