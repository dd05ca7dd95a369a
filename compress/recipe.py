"""Recipes as data: `compress quantize` builds one from options, `compress run` reads one from YAML."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from calibration.parts import Part, check_parts, parse_parts, share_out
from compress.checkpoint.scheme import FLOAT_BITS, MAX_BITS, targets
from compress.checkpoint.weights import Fp8, Int, NMSparsity, OutlierColumns, Scheme
from compress.common import cli
from compress.common.cli import nearest
from compress.common.errors import RecipeError
from compress.methods import base as methods
from compress.methods.kv_cache import KVCacheStage
from compress.methods.mtp import MtpStage
from compress.methods.outlier_columns import check_amount, number_of_columns
from compress.methods.rotation import RotateStage

INT, FP8 = Int.word, Fp8.word
ALLOCATIONS = ("block", "model", "uniform")


@dataclass(frozen=True, slots=True)
class FactorizeStage:
    """Makes two smaller matrices of each linear, its product of low rank. A later quantize stage rounds both.

    Attributes:
        method: svd-llm (whitened by the inputs), asvd (inputs scaled by their magnitudes), or svd (no calibration).
        keep: share of the weights that stay: a rank of `keep * O * I / (O + I)`, rounded down to a multiple of 8.
        allocation: block shares the ranks out among the linears of a block for the least loss; model among those of all
            blocks, after a first pass; uniform gives each linear its own share.
        targets: patterns of the linears this stage takes; empty means all in the blocks. A later stage wins.
        ignore: patterns of modules that stay as they are.
        target_size: bytes of the whole checkpoint's tensors, which decide `keep`; for allocation model.
    """

    method: str = methods.default("factorize")
    keep: float = 0.8
    allocation: str = "block"
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    target_size: int | None = None

    def __post_init__(self) -> None:
        methods.factorization(self.method)
        if self.allocation not in ALLOCATIONS:
            remedy = nearest(self.allocation, ALLOCATIONS, "Allocations")
            raise RecipeError(f"allocation {self.allocation!r} does not exist", remedy)
        if self.target_size is not None and (self.allocation != "model" or self.target_size < 1):
            problem = f"target_size={self.target_size} with allocation {self.allocation!r} has no effect"
            raise RecipeError(problem, "Give allocation: model a size above 0")
        if not 0 < self.keep < 1:
            raise RecipeError(f"keep={self.keep} is not between 0 and 1", "Use --keep 0.8 to keep 80 % of the weights")

    @property
    def needs_calibration(self) -> bool:
        return methods.factorization(self.method).needs(None).inputs


def parse_size(text: str) -> int:
    """Parses `5GB`, `800 MB`, `1.5GiB` or a plain number into bytes. Raises RecipeError for anything else."""
    try:
        return cli.parse_size(text)
    except ValueError as error:
        raise RecipeError(f"{text!r} is no size", "Write a number and a unit: 5GB, 800MB, 1.5GiB") from error


@dataclass(frozen=True)
class FactorizeKeys:
    """Keys of a factorize stage."""

    method: str = methods.default("factorize")
    keep: Annotated[float | None, "Share of the weights to keep. Default: 0.8."] = None
    allocation: Annotated[
        str, "block allocates ranks to the layers of a block, model to all layers; uniform gives all the same share."
    ] = "block"
    target_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="5GB, 700MB: decides --keep, with --allocation model.", show_default=False),
    ] = None

    def stage(self, targets: tuple[str, ...] = (), ignore: tuple[str, ...] = ()) -> FactorizeStage:
        """Build the stage. Raises RecipeError."""
        if self.keep is not None and self.target_size is not None:
            raise RecipeError("keep and target_size both decide the ranks", "Give one of them")
        size = None if self.target_size is None else parse_size(self.target_size)
        keep = 0.8 if self.keep is None else self.keep
        return FactorizeStage(self.method, keep, self.allocation, targets, ignore, size)


LAYERWISE = ("uniform", "owl")
DEFAULT_OUTLIER_FACTOR = 5.0
DEFAULT_SPREAD = 0.08
"""The spread that the paper of OWL uses throughout."""


@dataclass(frozen=True, slots=True)
class PruneStage:
    """Sets the least important weights to zero. A later quantize stage keeps those zeros exact.

    Attributes:
        method: sparsegpt, wanda, ria, or magnitude (no calibration).
        pattern: N:M, stored without its zeros; None prunes a `sparsity` of the weights anywhere, and the
            zeros are stored.
        sparsity: share of the weights that go; a pattern decides it itself.
        layerwise: uniform prunes every block alike; owl spares those with outliers, see `compress.methods.owl`.
        outlier_factor, spread: owl's M and lambda.
        targets: patterns of the linears this stage takes; empty means all in the blocks. A later stage wins.
        ignore: patterns of modules that stay as they are.
    """

    method: str = methods.default("prune")
    pattern: NMSparsity | None = None
    sparsity: float = 0.5
    layerwise: str = "uniform"
    outlier_factor: float = DEFAULT_OUTLIER_FACTOR
    spread: float = DEFAULT_SPREAD
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        methods.pruning(self.method)
        if not 0 < self.sparsity < 1:
            raise RecipeError(f"sparsity={self.sparsity} is not between 0 and 1", "Use --sparsity 0.5")
        if self.pattern and self.sparsity != 0.5 and self.sparsity != 1 - self.pattern.n / self.pattern.m:
            raise RecipeError(f"sparsity={self.sparsity} contradicts {self.pattern}", "Give one of them")
        if self.layerwise not in LAYERWISE:
            remedy = nearest(self.layerwise, LAYERWISE, "Ways")
            raise RecipeError(f"layerwise {self.layerwise!r} does not exist", remedy)
        if self.layerwise != "uniform":
            self._check_layerwise()
        elif (self.outlier_factor, self.spread) != (DEFAULT_OUTLIER_FACTOR, DEFAULT_SPREAD):
            problem = f"outlier_factor={self.outlier_factor:g} and spread={self.spread:g} mean nothing where all blocks"
            raise RecipeError(f"{problem} are pruned alike", "Add --layerwise owl, or leave them out")

    def _check_layerwise(self) -> None:
        share = self.share
        if not 0 < self.spread < min(share, 1 - share):
            raise RecipeError(
                f"spread={self.spread} around a sparsity of {share:g} leaves 0 to 1",
                f"Use --owl-lambda {DEFAULT_SPREAD}",
            )
        if self.outlier_factor <= 1:
            raise RecipeError(f"outlier_factor={self.outlier_factor} makes outliers of most weights", "Use 5")
        if self.pattern and self.spread * self.pattern.m < 0.5:
            raise RecipeError(
                f"{self.pattern} has steps of 1/{self.pattern.m}, too coarse for a spread of {self.spread}",
                "Use 4:8, a larger spread, or no pattern",
            )

    @property
    def share(self) -> float:
        """Share of the weights that go."""
        return 1 - self.pattern.n / self.pattern.m if self.pattern else self.sparsity

    @property
    def needs_calibration(self) -> bool:
        return methods.pruning(self.method).needs(None).inputs or self.layerwise != "uniform"


@dataclass(frozen=True)
class PruneKeys:
    """Keys of a prune stage."""

    method: str = methods.default("prune")
    pattern: Annotated[
        str,
        typer.Option(
            metavar="N:M|none", help="2:4, 4:8 or another N:4 or N:8, zeros not stored; none prunes anywhere."
        ),
    ] = "none"
    sparsity: Annotated[float, "Share of the weights to remove, with --pattern none."] = 0.5
    layerwise: Annotated[
        str, "uniform prunes all blocks alike; owl prunes blocks with outliers less and the others more."
    ] = "uniform"
    owl_lambda: Annotated[float, "Largest difference of a block's sparsity from the mean, with --layerwise owl."] = (
        DEFAULT_SPREAD
    )
    owl_m: Annotated[float, "Scores above this many times their mean are outliers, with --layerwise owl."] = (
        DEFAULT_OUTLIER_FACTOR
    )

    def stage(self, targets: tuple[str, ...] = (), ignore: tuple[str, ...] = ()) -> PruneStage:
        """Build the stage. Raises RecipeError, SchemeError."""
        pattern = None if self.pattern == "none" else NMSparsity.parse(self.pattern)
        owl = self.owl_m, self.owl_lambda
        return PruneStage(self.method, pattern, self.sparsity, self.layerwise, *owl, targets, ignore)


PER_CHANNEL = -1
HEAD_TARGET, EMBEDDING_TARGET = "lm_head", "embed_tokens"


@dataclass(frozen=True, slots=True)
class QuantizeStage:
    """Quantization of the linears in the transformer blocks.

    Attributes:
        method: name of a registered quantization method.
        scheme: stored form of the weights.
        targets: patterns of the linears this stage takes; empty means all in the blocks. A later stage wins.
        ignore: patterns of modules that stay dense.
        options: the method's `Options`; None takes its defaults.
        outlier_columns: share of the input columns (below 1), or how many, that stay in 16 bits.
    """

    method: str = methods.default("quantize")
    scheme: Scheme = field(default_factory=Int)
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    options: Any = None
    outlier_columns: float | None = None

    def __post_init__(self) -> None:
        method = methods.quantization(self.method)
        if self.options is None:
            object.__setattr__(self, "options", method.Options())
        if not isinstance(self.options, method.Options):
            problem = f"{type(self.options).__name__} are no options of {self.method}"
            raise RecipeError(problem, "Leave them out, or use the method that they belong to")
        methods.require_supported(method, self.scheme)
        if self.outlier_columns is not None:
            check_amount(self.outlier_columns)
            methods.require_supported(method, OutlierColumns.of(self.scheme, 1))

    @property
    def needs_calibration(self) -> bool:
        return methods.quantization(self.method).needs(self.options).inputs or self.outlier_columns is not None

    def scheme_for(self, in_features: int) -> Scheme:
        """Return the scheme of a layer with `in_features` inputs."""
        if self.outlier_columns is None:
            return self.scheme
        return OutlierColumns.of(self.scheme, number_of_columns(self.outlier_columns, in_features))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values. Options of learned methods are under `tuning`, others beside it, where older readers
        look for them."""
        values = asdict(self) | {"scheme": self.scheme.to_dict()}
        options, columns = values.pop("options"), values.pop("outlier_columns")
        learned = methods.quantization(self.method).tunes
        tuned = {"alpha": None, "tuning": options} if learned else {"alpha": None, **options, "tuning": None}
        return values | tuned | {"outlier_columns": columns}


def form_of(word: str) -> type[Scheme]:
    """Return the stored form of this word. Raises RecipeError with the nearest one."""
    forms = targets()
    if word not in forms:
        raise RecipeError(f"weights {word!r} are no form", nearest(word, tuple(forms), "Forms"))
    return forms[word]


def default_method(word: str = INT) -> str:
    """Return the method of a user who names none, for the form of a word."""
    usual = methods.default("quantize")
    can = word == INT or not methods.quantization(usual).unsupported(form_of(word).target())
    return usual if can else methods.fallback("quantize").name


def default_scheme(method: str, word: str = INT) -> Scheme:
    """Return the scheme of a user who names none."""
    return methods.quantization(method).default_scheme() if word == INT else form_of(word).target()


def activation_bits_from(value: int) -> int | None:
    """Return the scheme's activation bits from what a user writes: 16 means that activations are not rounded."""
    return None if value == FLOAT_BITS else value


@dataclass(frozen=True)
class QuantizeKeys:
    """Keys of a quantize stage without those of methods. None takes the method's default."""

    method: str | None = None
    bits: Annotated[int | None, "Bits of a weight, 2 to 8."] = None
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORM",
            help="What weights are rounded to: int; fp8 (as --fp8), fp8-block (8-bit floats in blocks of 128x128), "
            "nvfp4 (4-bit floats in groups of 16), mxfp4, mxfp8 (4- and 8-bit floats in groups of 32), nf4 (NF4 of "
            "QLoRA, in groups of 64), q2_k, q3_k, q4_k, q5_k, q6_k, q4_1, q5_1, iq4_nl (the types of "
            "GGUF files). Default: int.",
            show_default=False,
        ),
    ] = None
    fp8: Annotated[
        bool,
        typer.Option(
            "--fp8",
            help="8-bit floats (e4m3) for weights and inputs in place of integers, for GPUs that multiply them "
            "(NVIDIA since Ada and Hopper).",
        ),
    ] = False
    group_size: Annotated[
        int | None, "Input columns that share a scale: 128, 64, 32, or -1 for one scale per output row."
    ] = None
    activation_bits: Annotated[
        int | None, "8: round the inputs of the layers to 8 bits, token by token (W8A8). 16: keep them."
    ] = None
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Fixed or stored zero points. Symmetric loads everywhere.")
    ] = True
    outlier_columns: Annotated[
        float | None,
        "Share of the input columns (0.01), or how many, that stay in 16 bits beside the codes: those that "
        "cost most, or with 8-bit activations the largest. For this runtime only. Default: none.",
    ] = None

    def stage(self, targets: tuple[str, ...] = (), ignore: tuple[str, ...] = ()) -> QuantizeStage:
        """Build the stage. Raises RecipeError, SchemeError."""
        name = self.method or default_method(self.form)
        options = methods.make_options(methods.quantization(name), self.method_options)
        return QuantizeStage(name, self.scheme, targets, ignore, options, self.outlier_columns)

    @property
    def method_options(self) -> dict[str, Any]:
        """Options of methods that were given."""
        given = {name: getattr(self, name, None) for name in methods.options_of("quantize")}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def form(self) -> str:
        """The word of the form of the weights. Raises RecipeError."""
        if self.fp8 and self.weights not in (None, FP8):
            raise RecipeError(f"fp8 and weights {self.weights!r} contradict each other", "Give one of them")
        return FP8 if self.fp8 else self.weights or INT

    @property
    def scheme(self) -> Scheme:
        """The stored form of the weights. Raises RecipeError, SchemeError."""
        values: dict[str, Any] = {"symmetric": self.symmetric}
        if self.bits is not None:
            values["bits"] = self.bits
        if self.group_size is not None:
            values["group_size"] = group_size_from(self.group_size)
        if self.activation_bits is not None:
            values["activation_bits"] = activation_bits_from(self.activation_bits)
        default = default_scheme(self.method or default_method(self.form), self.form)
        return default.parse({**default.fields(), **values})


def end_stages(stage: QuantizeStage, head_bits: int | None, embedding_bits: int | None) -> tuple[QuantizeStage, ...]:
    """Stages for the matrices outside of the blocks, where they get bits: the head is rounded by GPTQ when there is a
    calibration anyway, the embedding to nearest. 8 bits have one scale per row, fewer have the groups of `stage`; the
    usual ones beside 8-bit activations, whose weights have none, and beside floats.

    Args:
        stage: the stage of the linears in the blocks.
    """
    head_method = "gptq" if stage.needs_calibration else "rtn"
    own_groups = isinstance(stage.scheme, Int) and not stage.scheme.activation_bits
    group_size = stage.scheme.group_size if own_groups else Int().group_size
    wanted = ((HEAD_TARGET, head_bits, head_method), (EMBEDDING_TARGET, embedding_bits, "rtn"))
    return tuple(
        QuantizeStage(method, Int(bits, None if bits == MAX_BITS else group_size), targets=(name,))
        for name, bits, method in wanted
        if bits is not None
    )


def group_size_from(value: int) -> int | None:
    """Return the scheme's group size from what a user writes: -1 means one group per output channel."""
    return None if value == PER_CHANNEL else value


TensorStage = QuantizeStage | PruneStage | FactorizeStage
"""Stages that change tensors."""
Stage = TensorStage | RotateStage | KVCacheStage | MtpStage

STAGE_NAMES = {
    RotateStage: "rotate",
    QuantizeStage: "quantize",
    PruneStage: "prune",
    FactorizeStage: "factorize",
    KVCacheStage: "kv_cache",
    MtpStage: "mtp",
}


DEFAULT_SAMPLES, DEFAULT_LENGTH = 64, 512
MAX_TOKENS = 2**27
"""Most tokens of a calibration: the hidden states of a model with 4,096 channels would take a terabyte."""


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
            raise RecipeError(
                f"samples={self.samples} leaves nothing to calibrate on", "Use --num-calibration-samples 64"
            )
        if self.length < 2:
            raise RecipeError(f"length={self.length} is too short a sequence", "Use --max-seq-length 512")
        if self.samples * self.length > MAX_TOKENS:
            raise RecipeError(
                f"{self.samples} samples of length {self.length} are more than {MAX_TOKENS:,} tokens",
                f"Use --num-calibration-samples {DEFAULT_SAMPLES} and --max-seq-length {DEFAULT_LENGTH}",
            )
        share_out(self.parts, self.samples)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The texts and their weights; one part where no mixture is asked for. Raises DataError."""
        return parse_parts(self.source) if isinstance(self.source, str) else check_parts(self.source)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe: stages in order, calibration and seed."""

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
            raise RecipeError("the recipe has two kv_cache stages", "Keep one: its format `auto` compares them all")
        if len([stage for stage in self.stages if isinstance(stage, MtpStage)]) > 1:
            raise RecipeError("the recipe has two mtp stages", "Keep one")

        if any(isinstance(stage, RotateStage) for stage in self.stages[1:]):
            raise RecipeError("rotate is not the first stage", "Put it first: every other stage works on its result")

    @property
    def rotate(self) -> RotateStage | None:
        """The stage that rotates the whole model before all others."""
        return next((stage for stage in self.stages if isinstance(stage, RotateStage)), None)

    @property
    def tensor_stages(self) -> tuple[TensorStage, ...]:
        """Stages that change linears, in order."""
        return tuple(stage for stage in self.stages if not isinstance(stage, KVCacheStage | MtpStage | RotateStage))

    @property
    def kv_cache(self) -> KVCacheStage | None:
        """The kv_cache stage, which runs last wherever it is listed."""
        return next((stage for stage in self.stages if isinstance(stage, KVCacheStage)), None)

    @property
    def mtp(self) -> MtpStage | None:
        """The mtp stage, which runs when the weights are done wherever it is listed."""
        return next((stage for stage in self.stages if isinstance(stage, MtpStage)), None)

    @property
    def needs_calibration(self) -> bool:
        return any(stage.needs_calibration for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for comparing two runs."""
        stages = [{"stage": STAGE_NAMES[type(stage)], **_plain(stage)} for stage in self.stages]
        return asdict(self) | {"stages": stages}


def _plain(stage: Stage) -> dict[str, Any]:
    if isinstance(stage, QuantizeStage | KVCacheStage):
        return stage.to_dict()
    pattern = stage.pattern if isinstance(stage, PruneStage) else None
    return asdict(stage) | ({"pattern": pattern.to_dict()} if pattern else {})
