"""Quantization: rounds weights to integers or small floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar, Self

from compress.checkpoint.scheme import FLOAT_BITS, MAX_BITS, as_width, targets
from compress.checkpoint.weights import Fp8, Int, OutlierColumns, Scheme
from compress.common.cli import Key, as_written, from_written, option
from compress.common.errors import RecipeError
from compress.methods import base as methods
from compress.methods.outlier_columns import check_amount, number_of_columns
from compress.plan import End, LayerPlan
from compress.stages.base import STAGES, TensorStage, method_help

INT, FP8 = Int.word, Fp8.word
PER_CHANNEL = -1
GROUPS = "Input columns that share a scale: 128, 64, 32, or -1 for one scale per output row."
ACTIVATIONS = "8, 4: round the inputs of the layers to 8 or 4 bits, token by token (W8A8, W4A8, W4A4). 16: keep them."
HEAD_TARGET, EMBEDDING_TARGET = "lm_head", "embed_tokens"


def with_defaults(key: str, none: int, text: str) -> str:
    """Returns the help of a key of a scheme, with its default and the methods that have another; `none` is written for
    None."""
    schemes = {name: default_scheme(name) for name in methods.QUANTIZATION} | {"--fp8": default_scheme("", FP8)}
    defaults = {name: getattr(scheme, key) or none for name, scheme in schemes.items()}
    usual, others = defaults[methods.default("quantize")], dict[int, list[str]]()
    for name, value in defaults.items():
        others.setdefault(value, []).append(name)
    listed = [f"{' and '.join(names)}: {value}" for value, names in others.items() if value != usual]
    return f"{text} {'; '.join([f'Default: {usual}', *listed])}."


@dataclass(frozen=True)
class SchemeKeys:
    """Keys of a quantize stage that say its scheme. None takes the method's default."""

    bits: float | None = option(
        default=None,
        read=as_width,
        help=partial(with_defaults, "bits", 0, "Bits of a weight: 2 to 8; exl3: 1 to 8, and 1.5 to 4.5."),
    )
    weights: str | None = option(
        default=None,
        metavar="FORM",
        help="What weights are rounded to: int; fp8 (as --fp8), fp8-block (8-bit floats in blocks of 128x128), "
        "nvfp4 (4-bit floats in groups of 16), mxfp4, mxfp8 (4- and 8-bit floats in groups of 32), nf4 (NF4 of "
        "QLoRA, in groups of 64), q2_k, q3_k, q4_k, q5_k, q6_k, q4_1, q5_1, iq4_nl (the types of "
        "GGUF files), exl3 (trellis codes of 1 to 8 bits and 1.5 to 4.5; best with method trellis). Default: int.",
    )
    fp8: bool = option(
        "--fp8",
        default=False,
        help="8-bit floats (e4m3) for weights and inputs in place of integers, for GPUs that multiply them "
        "(NVIDIA since Ada and Hopper).",
    )
    group_size: int | None = option(default=None, help=partial(with_defaults, "group_size", PER_CHANNEL, GROUPS))
    activation_bits: int | None = option(
        default=None, help=partial(with_defaults, "activation_bits", FLOAT_BITS, ACTIVATIONS)
    )
    symmetric: bool = option(
        "--symmetric/--asymmetric",
        default=True,
        help="Fixed or stored zero points. Symmetric loads everywhere.",
    )

    @property
    def form(self) -> str:
        """The word of the form of the weights. Raises RecipeError."""
        if self.fp8 and self.weights not in (None, FP8):
            raise RecipeError(f"fp8 and weights {self.weights!r} contradict each other", "Give one of them")
        return FP8 if self.fp8 else self.weights or INT

    def scheme(self, method: str) -> Scheme:
        """Returns the stored form of the weights. Raises RecipeError, SchemeError."""
        values: dict[str, Any] = {"symmetric": self.symmetric}
        if self.bits is not None:
            values["bits"] = self.bits
        if self.group_size is not None:
            values["group_size"] = group_size_from(self.group_size)
        if self.activation_bits is not None:
            values["activation_bits"] = None if self.activation_bits == FLOAT_BITS else self.activation_bits
        default = default_scheme(method, self.form)
        return default.parse({**default.fields(), **values})


@STAGES.register()
@dataclass(frozen=True)
class QuantizeStage(TensorStage):
    """Quantization of the linears in the transformer blocks.

    Attributes:
        scheme: stored form of the weights; in recipes `SchemeKeys`.
        outlier_columns: share of the input columns (below 1), or how many, that stay in 16 bits.
    """

    name: ClassVar[str] = "quantize"

    method: str = option(
        default=methods.default("quantize"),
        written=str | None,
        start=None,
        help=lambda: method_help("quantize", f"Default: {default_method()}; with --fp8: {default_method(FP8)}."),
    )
    scheme: Scheme = field(default_factory=Int)
    options: Any = None
    outlier_columns: float | None = option(
        default=None,
        help="Share of the input columns (0.01), or how many, that stay in 16 bits and are not rounded: those that "
        "cost most, or with 8-bit activations the largest. For this runtime only. Default: none.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        method = methods.QUANTIZATION.find(self.method)
        if self.options is None:
            object.__setattr__(self, "options", method.Options())
        if type(self.options) is not method.Options:
            problem = f"{type(self.options).__name__} does not belong to method {self.method}"
            raise RecipeError(problem, "Leave them out, or use the method that they belong to")
        methods.require_supported(method, self.scheme)
        if self.outlier_columns is not None:
            check_amount(self.outlier_columns)
            methods.require_supported(method, OutlierColumns.of(self.scheme, 1))

    @classmethod
    def written_keys(cls, **starts: Any) -> Iterator[Key]:
        """Yields the keys of the stage, with those of its scheme and of the options of all methods."""
        method, columns, *patterns = as_written(cls, **starts)
        return iter((method, *as_written(SchemeKeys), columns, *_method_keys(), *patterns))

    @classmethod
    def build(cls, written: Mapping[str, Any], **changes: Any) -> Self:
        keys = from_written(SchemeKeys, written)
        method = written.get("method") or default_method(keys.form)
        wanted = {name: written[name] for name in methods.options_of("quantize") if written.get(name) is not None}
        options = methods.make_options(methods.QUANTIZATION.find(method), wanted)
        return super().build(written, method=method, scheme=keys.scheme(method), options=options, **changes)

    @property
    def needs_calibration(self) -> bool:
        return methods.QUANTIZATION.find(self.method).needs(self.options).inputs or self.outlier_columns is not None

    @property
    def label(self) -> str:
        return f"{f'int{self.scheme.bits}' if self.scheme.numbers == 'int' else self.scheme.word}-{self.method}"

    def scheme_for(self, in_features: int) -> Scheme:
        """Returns the scheme of a layer with `in_features` inputs."""
        if self.outlier_columns is None:
            return self.scheme
        return OutlierColumns.of(self.scheme, number_of_columns(self.outlier_columns, in_features))

    def apply(self, before: LayerPlan, in_features: int, ignored: bool) -> LayerPlan:
        if ignored:
            return before.changed(method=None, scheme=None, options=None)
        method = methods.QUANTIZATION.find(self.method)
        return before.changed(method=method, scheme=self.scheme_for(in_features), options=self.options)

    def check_outside(self, name: str, end: End) -> None:
        if self.method not in end.methods:
            raise RecipeError(
                f"{self.method} cannot change {name}, the {end.what}",
                f"Give it a quantize stage of its own, with method {' or '.join(end.methods)}",
            )
        if self.outlier_columns is not None:
            raise RecipeError(f"{name}, the {end.what}, has no outlier columns", "Leave outlier_columns out of it")
        if self.scheme.numbers != "int":
            raise RecipeError(f"{name}, the {end.what}, supports integers only", "Give it a stage of 8-bit integers")
        if self.scheme.activation_bits:
            raise RecipeError(
                f"{name}, the {end.what}, takes no rounded activations", "Leave activation_bits out of it"
            )

    def outside(self, head_bits: int | None, embedding_bits: int | None) -> tuple[QuantizeStage, ...]:
        """Returns stages for output head and embedding, where they get bits: the head is rounded by GPTQ when there is
        a calibration anyway, the embedding to nearest. 8 bits have one scale per row, fewer have the groups of this
        stage; the usual ones if this stage has floats, or rounded activations and weights without groups."""
        head_method = "gptq" if self.needs_calibration else "rtn"
        own_groups = isinstance(self.scheme, Int) and not (self.scheme.activations and self.scheme.group_size is None)
        group_size = self.scheme.group_size if own_groups else Int().group_size
        wanted = ((HEAD_TARGET, head_bits, head_method), (EMBEDDING_TARGET, embedding_bits, "rtn"))
        return tuple(
            QuantizeStage(method, Int(bits, None if bits == MAX_BITS else group_size), targets=(name,))
            for name, bits, method in wanted
            if bits is not None
        )

    def work_keys(self) -> dict[str, Any]:
        if self.scheme.word != INT:
            width = {} if self.scheme == self.scheme.target() else {"bits": self.scheme.bits}
            return {"method": self.method, "weights": self.scheme.word, **width}
        inputs = {"activation_bits": self.scheme.activation_bits} if self.scheme.activation_bits else {}
        scheme = {"bits": self.scheme.bits, "group_size": self.scheme.group_size or PER_CHANNEL}
        return {"method": self.method, **scheme, "symmetric": self.scheme.symmetric} | inputs

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values. Options of learned methods are under `tuning`, others at the top, where older readers
        look for them."""
        values = asdict(self) | {"scheme": self.scheme.to_dict()}
        options, columns = values.pop("options"), values.pop("outlier_columns")
        learned = methods.QUANTIZATION.find(self.method).tunes
        tuned = {"alpha": None, "tuning": options} if learned else {"alpha": None, **options, "tuning": None}
        return values | tuned | {"outlier_columns": columns}


def _method_keys() -> Iterator[Key]:
    """Yields a key for each option of a method; None stands for the method's default."""
    found: dict[str, list[tuple[Any, str]]] = {}
    for method in methods.METHODS["quantize"].values():
        for name, kind, key in as_written(method.Options):
            default = "" if key.default is None else f" Default: {key.default}."
            text = f"{method.name}: {key.metadata['option'].details['help']}{default}"
            found.setdefault(name, []).append((kind, text))
    for name, texts in found.items():
        yield name, texts[0][0] | None, option(default=None, help=" ".join(text for _, text in texts))


def form_of(word: str) -> type[Scheme]:
    """Returns the stored form of this word. Raises RecipeError with the nearest one."""
    forms = targets()
    if word not in forms:
        raise RecipeError.unknown("weight form", word, forms, "Forms")
    return forms[word]


def default_method(word: str = INT) -> str:
    """Returns the method of a user who names none, for the form of a word."""
    usual = methods.default("quantize")
    return usual if word == INT else method_for(form_of(word).target(), usual)


def method_for(scheme: Scheme, wanted: str) -> str:
    """Returns the wanted method; instead of one that does not support the scheme, the method whose default is of this
    form, or the fallback."""
    if not methods.QUANTIZATION.find(wanted).unsupported(scheme):
        return wanted
    own = {type(method.default_scheme()): name for name, method in methods.QUANTIZATION.items()}
    return own.get(type(scheme)) or methods.fallback("quantize").name


def default_scheme(method: str, word: str = INT) -> Scheme:
    """Returns the scheme of a user who names none."""
    return methods.QUANTIZATION.find(method).default_scheme() if word == INT else form_of(word).target()


def group_size_from(value: int) -> int | None:
    """Returns the scheme's group size from what a user writes: -1 means one group per output channel."""
    return None if value == PER_CHANNEL else value
