"""The interface of a compression method, and the registry that command line, recipes, plan and pipeline ask.

A method is one file: a class derived from `QuantizationMethod`, `PruningMethod` or `FactorizationMethod` and decorated
with `register`. Method modules are imported by `--help`, so they import torch inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast

from compress.checkpoint.weights import Int, NMSparsity, Scheme
from compress.checkpoint.weights.integer import integers
from compress.common.cli import nearest
from compress.common.errors import RecipeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from calibration.statistics import InputStatistics
    from compress.checkpoint.weights import Weight
    from compress.checkpoint.weights.gguf_blocks import BlockIntegers
    from compress.checkpoint.weights.integer import IntegerWeight
    from compress.checkpoint.weights.low_rank import LowRankWeight
    from compress.checkpoint.weights.outlier_columns import OutlierWeight
    from compress.methods.shared.decomposition import Whitening
    from compress.methods.shared.hessian import HessianCache
    from compress.methods.shared.smoothing import SmoothingResult

    Learnable = IntegerWeight | BlockIntegers
    """Weights whose rounding can be learned."""

EMBEDDING, HEAD = "embedding", "head"
SMOOTHING_ROWS = 512
"""Input rows over which the scale inside an expert is searched: few of the tokens of other searches reach it."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Data that a method reads besides the weight.

    Attributes:
        inputs: magnitudes of the layer's inputs on the calibration text.
        hessian: the second moments of the inputs.
        sample_rows: input rows that are kept as they are.
        dense_inputs: how the inputs differ from those in the dense model.
        learning_batch: sequences of one step of gradient descent; 0 learns nothing. Above 0 the block's output in the
            dense model is kept too.
    """

    inputs: bool = False
    hessian: bool = False
    sample_rows: int = 0
    dense_inputs: bool = False
    learning_batch: int = 0

    @property
    def dense_model(self) -> bool:
        """Whether the calibration also passes through the dense model."""
        return self.dense_inputs or self.learning_batch > 0

    def __or__(self, other: Needs) -> Needs:
        return Needs(*(max(getattr(self, each.name), getattr(other, each.name)) for each in fields(Needs)))


@dataclass
class Layer:
    """One linear layer as a method sees it.

    Attributes:
        name: full module name.
        weight: float32 `[O, I]`, after smoothing and pruning.
        scheme: of the codes that are wanted.
        options: the method's `Options`.
        dtype: dtype of stored scales and of values that are not quantized.
        inputs: statistics of the inputs, and factorized Hessians of them.
        kept: bool `[O, I]`, False where a weight was pruned and stays zero; None where nothing was.
        details: facts for the report, which a method adds to.
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
        """The scheme, for methods that choose integers. Raises SchemeError for another one."""
        return integers(self.scheme)

    @property
    def importance(self) -> Tensor | None:
        """Mean square `[I]` of each (smoothed) input; None when nothing is known."""
        return self.inputs.mean_square


@dataclass(frozen=True, slots=True)
class ScaleSearch:
    """The search for a smoothing scale `[I]` of linears that share an input.

    Attributes:
        weights: the linears `[O_k, I]`.
        statistics: of their input.
        quantize: fake quantization of one weight, same shape out.
        loss: error of the parent module's output with these weights, under a scale of the inputs.
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
    """The error of a block's output, as a function of the weights of its linears."""

    def batches(self) -> Iterator[Any]:
        """Yield micro-batches without end, in an order that depends on seed and block alone."""
        ...

    def size(self, batch: Any) -> int:
        """Return the sequences in a micro-batch."""
        ...

    def error(self, weights: Mapping[str, Tensor], batch: Any) -> Tensor:
        """Return the squared error, differentiable in the weights `[O, I]` by name inside the block."""
        ...

    def judge(self, weights: Mapping[str, Tensor]) -> float:
        """Return the mean error over the search sequences."""
        ...


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """The outcome of learning the rounding of a block.

    Attributes:
        steps: number of steps taken.
        best_step: step after which the error was least; 0 keeps the start.
        loss_before, loss_after: squared error of the block's output on the search sequences, relative to the output.
        changed: share of the codes that differ from the start's.
    """

    steps: int
    best_step: int
    loss_before: float
    loss_after: float
    changed: float


@dataclass(frozen=True, slots=True)
class TunedBlock:
    """Learned weights by name inside the block, the record, and a note on a fallback."""

    weights: Mapping[str, Learnable]
    record: TuningRecord
    recovery: str = ""


@dataclass(frozen=True, slots=True)
class Pruned:
    """A pruned layer: float32 values `[O, I]`, and the mask of the kept ones; None keeps all."""

    values: Tensor
    kept: Tensor | None


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a method without any."""


class Method:
    """A compression method.

    Attributes:
        kind: stage of a recipe that it belongs to.
        name: how recipes and `--method` name it.
        help: half a sentence for `--help`.
        Options: dataclass of its options. Fields are annotated with their help and become options of the command line
            and keys of recipes.
        data: what it reads besides the weight, whatever its options.
        is_default: is taken where a user names no method of its kind.
        is_fallback: takes the place of methods of its kind where no calibration token reached a layer.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    help: ClassVar[str]
    Options: ClassVar[type] = NoOptions
    data: ClassVar[Needs] = Needs()
    is_default: ClassVar[bool] = False
    is_fallback: ClassVar[bool] = False

    def needs(self, options: Any) -> Needs:
        """Return the data that the method reads besides the weight, with these options."""
        return self.data

    def unsupported(self, scheme: Scheme) -> str:
        """Return the reason why weights of this scheme cannot be made; empty when they can."""
        return ""


class QuantizationMethod(Method):
    """A method that rounds weights.

    Attributes:
        smooths: searches scales between a layer and what feeds it: has `smoothing_scale`.
        tunes: learns the weights of a block together, after `compress`: has `tune_block`.
        keeps_zeros: leaves pruned weights at zero.
        rounds_factors: rounds both factors of a low-rank weight: has `round_factors`.
        joins_pruning: is done in the loop of a pruning method that has one.
        takes_grids: rounds to the grid of any form that has one, integers or not.
        matrices: `EMBEDDING` and `HEAD`, where it is of use there.
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
        """Return the scheme of a user who names none."""
        return Int()

    def compress(self, layer: Layer) -> Weight:
        """Quantize one layer.

        Raises:
            SchemeError: the group size does not divide the inputs.
            NumericsError: NaN or infinity in the weight or its statistics.
        """
        raise NotImplementedError

    def compress_beside(self, layer: Layer, columns: Tensor) -> OutlierWeight:
        """Quantize all but `columns [k]`, which stay in 16 bits. Raises as `compress`."""
        from compress.methods.outlier_columns import compress_rest

        return compress_rest(self, layer, columns)

    def round_factors(self, left: Tensor, right: Tensor, layer: Layer) -> LowRankWeight:
        """Quantize the factors `left [O, r]` and `right [r, I]` of a layer. Raises as `compress`."""
        raise NotImplementedError

    def smoothing_scale(self, search: ScaleSearch, options: Any) -> SmoothingResult:
        """Find the scale between a layer's input and its weights. Raises NumericsError."""
        raise NotImplementedError

    def tune_block(
        self,
        objective: BlockObjective,
        starts: Mapping[str, tuple[Tensor, Learnable]],
        options: Any,
        tick: Callable[[float], None],
    ) -> TunedBlock:
        """Learn the weights of a block.

        Args:
            starts: float32 weight `[O, I]` and what `compress` made of it, by name inside the block.
            tick: receives the share of the steps taken.
        """
        raise NotImplementedError


class PruningMethod(Method):
    """A method that sets weights to zero."""

    kind: ClassVar[str] = "prune"

    def prune(
        self, layer: Layer, pattern: NMSparsity | None, sparsity: float, joint: Int | None
    ) -> Pruned | IntegerWeight:
        """Prune one layer, and quantize it too where a scheme for both is given and the method can.

        Args:
            pattern: N:M; None prunes a share `sparsity` of the weights anywhere.
            joint: scheme to round to in the same loop, where the method has one.

        Raises:
            SchemeError: the group size does not divide the inputs.
            NumericsError: NaN or infinity in the weight or its statistics.
        """
        raise NotImplementedError


class FactorizationMethod(Method):
    """A method that replaces a weight by two factors of low rank: a truncated SVD of the whitened weight.

    Attributes:
        energies_are_errors: squared singular values are squared errors of the output, comparable between layers.
    """

    kind: ClassVar[str] = "factorize"
    energies_are_errors: ClassVar[bool] = False

    def whitening(self, statistics: InputStatistics) -> Whitening:
        """Return the matrix that the weight is multiplied by before it is decomposed. Raises NumericsError."""
        raise NotImplementedError


METHODS: dict[str, dict[str, Method]] = {"quantize": {}, "prune": {}, "factorize": {}}
"""Registered methods by kind and name."""

Registered = TypeVar("Registered", bound=type[Method])


def register(method: Registered) -> Registered:
    """Add a method class to the registry. Raises ValueError for a name that is taken."""
    known = METHODS[method.kind]
    if method.name in known:
        raise ValueError(f"{method.kind} method {method.name!r} is registered twice")
    known[method.name] = method()
    return method


def names(kind: str) -> tuple[str, ...]:
    """Return the names of all methods of a kind."""
    return tuple(METHODS[kind])


def find(kind: str, name: str) -> Method:
    """Return a method by kind and name. Raises RecipeError with the nearest name."""
    if name not in METHODS[kind]:
        raise RecipeError(f"{kind} method {name!r} does not exist", nearest(name, names(kind), "Methods"))
    return METHODS[kind][name]


def default(kind: str) -> str:
    """Return the name of the method of a user who names none."""
    return next(name for name, method in METHODS[kind].items() if method.is_default)


def fallback(kind: str) -> Method:
    """Return the method that takes over where nothing is known of a layer's inputs."""
    return next(method for method in METHODS[kind].values() if method.is_fallback)


def quantization(name: str) -> QuantizationMethod:
    """Return a quantization method. Raises RecipeError."""
    return cast(QuantizationMethod, find("quantize", name))


def pruning(name: str) -> PruningMethod:
    """Return a pruning method. Raises RecipeError."""
    return cast(PruningMethod, find("prune", name))


def factorization(name: str) -> FactorizationMethod:
    """Return a factorization method. Raises RecipeError."""
    return cast(FactorizationMethod, find("factorize", name))


def options_of(kind: str) -> dict[str, list[Method]]:
    """Return every option name of a kind with the methods that take it."""
    found: dict[str, list[Method]] = {}
    for method in METHODS[kind].values():
        for each in fields(method.Options):
            found.setdefault(each.name, []).append(method)
    return found


def make_options(method: Method, values: Mapping[str, Any]) -> Any:
    """Build a method's options. Raises RecipeError for an option that it does not take, or a value out of range."""
    known = {each.name for each in fields(method.Options)}
    for name, value in values.items():
        if name not in known:
            others = " or ".join(other.name for other in options_of(method.kind).get(name, []))
            remedy = f"Leave it out, or use method {others}" if others else "Leave it out"
            raise RecipeError(f"{name}={value} has no effect with {method.name}", remedy)
    return method.Options(**values)


def require_supported(method: Method, scheme: Scheme) -> None:
    """Raise RecipeError when a method cannot make weights of a scheme, and name those that can."""
    if reason := method.unsupported(scheme):
        able = [other.name for other in METHODS[method.kind].values() if not other.unsupported(scheme)]
        raise RecipeError(f"{method.name} cannot make {scheme}: {reason}", f"Use method {' or '.join(able)}")
