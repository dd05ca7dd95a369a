"""Interface of compression methods, and their registry.

A method is one file: a class derived from `QuantizationMethod`, `PruningMethod` or `FactorizationMethod` and decorated
with `register`. Method modules are imported by `--help`, so they import torch inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from compress.checkpoint.weights import Int, NMSparsity, Scheme
from compress.checkpoint.weights.integer import integers
from compress.common.cli import check_options
from compress.common.errors import RecipeError
from compress.common.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from calibration.statistics import InputStatistics
    from compress.checkpoint.weights import Weight
    from compress.checkpoint.weights.coded import CodedWeight
    from compress.checkpoint.weights.low_rank import LowRankWeight
    from compress.checkpoint.weights.outlier_columns import OutlierWeight
    from compress.methods.shared.decomposition import Whitening
    from compress.methods.shared.hessian import HessianCache
    from compress.methods.shared.smoothing import SmoothingResult

    """Weight forms with learnable rounding."""

EMBEDDING, HEAD = "embedding", "head"
SMOOTHING_ROWS = 512
"""Number of input rows for the scale search inside an expert, which few tokens of other searches reach."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Calibration data that a method needs in addition to the weight.

    Attributes:
        inputs: input magnitudes on the calibration text.
        dense_inputs: differences of the inputs from those in the dense model.
        learning_batch: sequences per gradient step; 0 for methods without learning. Above 0 the block's output in the
            dense model is also stored.
    """

    inputs: bool = False
    hessian: bool = False
    sample_rows: int = 0
    dense_inputs: bool = False
    learning_batch: int = 0

    @property
    def dense_model(self) -> bool:
        """Whether the calibration also runs through the dense model."""
        return self.dense_inputs or self.learning_batch > 0

    def __or__(self, other: Needs) -> Needs:
        return Needs(*(max(getattr(self, each.name), getattr(other, each.name)) for each in fields(Needs)))


@dataclass
class Layer:
    """Linear layer in the interface of methods.

    Attributes:
        weight: float32 `[O, I]`, after smoothing and pruning.
        dtype: dtype of stored scales and of unquantized values.
        inputs: statistics of the inputs, and their factorized Hessians.
        kept: bool `[O, I]`, False for pruned weights, which stay zero; None without pruning.
        details: entries of the report, which a method extends.
    """

    name: str
    weight: Tensor
    scheme: Scheme
    options: Any
    dtype: torch.dtype
    inputs: HessianCache
    kept: Tensor | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def integers(self) -> Int:
        """Integer scheme. Raises SchemeError for any other scheme."""
        return integers(self.scheme)

    @property
    def importance(self) -> Tensor | None:
        """Mean square `[I]` of each (smoothed) input; None if unknown."""
        return self.inputs.mean_square


@dataclass(frozen=True, slots=True)
class ScaleSearch:
    """Search for a smoothing scale `[I]` of linears that share an input.

    Attributes:
        quantize: fake quantization of a weight, of the same shape.
        loss: error of the parent module's output with these weights and input scale.
        group_size: columns that share a scale of the weight.
        heads_per_group, head_dim: query heads that share a value head, and their channels, for the input of o_proj.
    """

    weights: list[Tensor]
    statistics: InputStatistics
    quantize: Callable[[Tensor], Tensor]
    loss: Callable[[list[Tensor], Tensor], float]
    group_size: int | None = None
    heads_per_group: int = 1
    head_dim: int = 1


class BlockObjective(Protocol):
    """Error of a block's output as a function of the weights of its linears."""

    def batches(self) -> Iterator[Any]:
        """Yields micro-batches indefinitely, in an order determined by seed and block."""

    def size(self, batch: Any) -> int:
        """Returns the number of sequences per micro-batch."""

    def error(self, weights: Mapping[str, Tensor], batch: Any) -> Tensor:
        """Returns the squared error, differentiable in the weights `[O, I]` by name inside the block."""

    def judge(self, weights: Mapping[str, Tensor]) -> float:
        """Returns the mean error over the search sequences."""


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """Record of learned rounding of a block.

    Attributes:
        best_step: step with the least error; 0 keeps the starting weights.
        loss_before, loss_after: squared error of the block's output on the search sequences, relative to the output.
        changed: share of codes that differ from the starting ones.
    """

    steps: int
    best_step: int
    loss_before: float
    loss_after: float
    changed: float


@dataclass(frozen=True, slots=True)
class TunedBlock:
    """Learned weights by name inside the block, the record, and a note on a fallback."""

    weights: Mapping[str, CodedWeight]
    record: TuningRecord
    recovery: str = ""


@dataclass(frozen=True, slots=True)
class Pruned:
    """Pruned layer: float32 values `[O, I]`, and the mask of kept weights; None keeps all."""

    values: Tensor
    kept: Tensor | None


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """Options of a method, none of its own. Raises RecipeError for a value outside declared words or limits."""

    def __post_init__(self) -> None:
        check_options(self)


class Method:
    """Compression method.

    Attributes:
        Options: dataclass of its options, whose fields are declared with `compress.common.cli.option`.
        data: calibration data that it needs with any options.
        is_fallback: whether it replaces methods of its kind for layers without calibration tokens.
        order: its place in `--help`.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    help: ClassVar[str]
    Options: ClassVar[type] = MethodOptions
    data: ClassVar[Needs] = Needs()
    is_default: ClassVar[bool] = False
    is_fallback: ClassVar[bool] = False
    order: ClassVar[int] = 0

    def needs(self, options: Any) -> Needs:
        """Returns the calibration data that the method needs with these options."""
        return self.data

    def unsupported(self, scheme: Scheme) -> str:
        """Returns the reason why the scheme is not supported; empty if it is."""
        return ""


class QuantizationMethod(Method):
    """Method that rounds weights.

    Attributes:
        smooths: whether it searches smoothing scales (`smoothing_scale`).
        tunes: whether it learns the weights of a block jointly, after `compress` (`tune_block`).
        keeps_zeros: whether it keeps pruned weights at zero.
        rounds_factors: whether it rounds both factors of a low-rank weight (`round_factors`).
        joins_pruning: whether it can run in the column loop of a pruning method.
        takes_grids: whether it supports the grid of any form, not only integers.
        matrices: `EMBEDDING` and `HEAD`, if it supports them.
    """

    kind: ClassVar[str] = "quantize"
    smooths: ClassVar[bool] = False
    tunes: ClassVar[bool] = False
    keeps_zeros: ClassVar[bool] = True
    rounds_factors: ClassVar[bool] = False
    joins_pruning: ClassVar[bool] = False
    takes_grids: ClassVar[bool] = False
    matrices: ClassVar[frozenset[str]] = frozenset()

    def unsupported(self, scheme: Scheme) -> str:
        if scheme.codes and (scheme.codes.numbers == "int" or (self.takes_grids and scheme.codes.has_grid)):
            return ""
        return f"it chooses {'codes on a grid' if self.takes_grids else 'integers'}, and {scheme} has none"

    def default_scheme(self) -> Scheme:
        return Int()

    def compress(self, layer: Layer) -> Weight:
        """Quantizes one layer. Raises SchemeError: the group size does not divide the inputs; NumericsError: NaN or
        infinity in the weight or its statistics."""
        raise NotImplementedError

    def compress_beside(self, layer: Layer, columns: Tensor) -> OutlierWeight:
        """Quantizes all columns except `columns [k]`, which stay in 16 bits. Raises as `compress`."""
        from compress.methods.outlier_columns import compress_rest

        return compress_rest(self, layer, columns)

    def round_factors(self, left: Tensor, right: Tensor, layer: Layer) -> LowRankWeight:
        """Quantizes the factors `left [O, r]` and `right [r, I]` of a layer. Raises as `compress`."""
        raise NotImplementedError

    def smoothing_scale(self, search: ScaleSearch, options: Any) -> SmoothingResult:
        """Searches the smoothing scale between a layer's input and its weights. Raises NumericsError."""
        raise NotImplementedError

    def tune_block(
        self,
        objective: BlockObjective,
        starts: Mapping[str, tuple[Tensor, CodedWeight]],
        options: Any,
        tick: Callable[[float], None],
    ) -> TunedBlock:
        """Learns the weights of a block.

        Args:
            starts: float32 weight `[O, I]` and the result of `compress`, by name inside the block.
            tick: callback with the completed share of the steps.
        """
        raise NotImplementedError


class PruningMethod(Method):
    """Method that sets weights to zero."""

    kind: ClassVar[str] = "prune"

    def prune(
        self, layer: Layer, pattern: NMSparsity | None, sparsity: float, joint: Int | None
    ) -> Pruned | CodedWeight:
        """Prunes one layer, and quantizes it jointly if a scheme is given and the method supports it. Raises
        SchemeError: the group size does not divide the inputs; NumericsError: NaN or infinity in the weight or its
        statistics.

        Args:
            pattern: N:M pattern; None is unstructured pruning by `sparsity`.
            joint: scheme to round to in the same loop, if the method supports it.
        """
        raise NotImplementedError


class FactorizationMethod(Method):
    """Method that replaces a weight by two low-rank factors: a truncated SVD of the whitened weight.
    `energies_are_errors`: whether squared singular values are squared output errors, comparable between layers."""

    kind: ClassVar[str] = "factorize"
    energies_are_errors: ClassVar[bool] = False

    def whitening(self, statistics: InputStatistics) -> Whitening:
        """Returns the matrix that the weight is multiplied by before it is decomposed. Raises NumericsError."""
        raise NotImplementedError


QUANTIZATION: Registry[QuantizationMethod] = Registry("quantize method", "compress.methods", RecipeError)
PRUNING: Registry[PruningMethod] = Registry("prune method", "compress.methods", RecipeError)
FACTORIZATION: Registry[FactorizationMethod] = Registry("factorize method", "compress.methods", RecipeError)
METHODS: Mapping[str, Registry[Any]] = {"quantize": QUANTIZATION, "prune": PRUNING, "factorize": FACTORIZATION}
"""Registered methods by kind and name."""

Registered = TypeVar("Registered", bound=type[Method])


def register(method: Registered) -> Registered:
    """Adds a method class to the registry. Raises ValueError for a duplicate name."""
    METHODS[method.kind].register(order=method.order)(method())
    return method


def default(kind: str) -> str:
    """Returns the name of the default method."""
    return next(name for name, method in METHODS[kind].items() if method.is_default)


def fallback(kind: str) -> Any:
    """Returns the fallback method for layers without input statistics."""
    return next(method for method in METHODS[kind].values() if method.is_fallback)


def options_of(kind: str) -> dict[str, list[Method]]:
    """Returns every option name of a kind with the methods that take it."""
    found: dict[str, list[Method]] = {}
    for method in METHODS[kind].values():
        for each in fields(method.Options):
            found.setdefault(each.name, []).append(method)
    return found


def make_options(method: Method, values: Mapping[str, Any]) -> Any:
    """Builds a method's options. Raises RecipeError for an unsupported option, or a value out of range."""
    known = {each.name for each in fields(method.Options)}
    for name, value in values.items():
        if name not in known:
            others = " or ".join(other.name for other in options_of(method.kind).get(name, []))
            remedy = f"Leave it out, or use method {others}" if others else "Leave it out"
            raise RecipeError(f"{name}={value} has no effect with {method.name}", remedy)
    return method.Options(**values)


def require_supported(method: Method, scheme: Scheme) -> None:
    """Raises RecipeError if a method does not support a scheme; names methods that do."""
    if reason := method.unsupported(scheme):
        able = [other.name for other in METHODS[method.kind].values() if not other.unsupported(scheme)]
        raise RecipeError(f"{method.name} does not support {scheme}: {reason}", f"Use method {' or '.join(able)}")
