"""Stored schemes of linear layers, one class per file in `compress.checkpoint.weights`.

Does not import torch, because planning and command lines use it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar, cast

from compress.common.errors import SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.grids import Grid
    from compress.checkpoint.weights.base import StoredTensors, Weight
    from compress.checkpoint.weights.integer import Int
    from compress.checkpoint.weights.sparse_nm import NMSparsity

MIN_BITS, MAX_BITS = 2, 8
FLOAT_BITS = 16
GROUP_SIZES = (32, 64, 128)

FIELDS: Mapping[str, Any] = {
    "bits": FLOAT_BITS,
    "group_size": None,
    "symmetric": True,
    "activation_bits": None,
    "sparsity": None,
    "rank": None,
    "outliers": None,
    "fp8": False,
}
"""Entries that every stored description has, in this order; a form appends its own."""


class Headers(Protocol):
    """Shapes and sizes of stored tensors, by full name."""

    def __contains__(self, name: object) -> bool: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def tensor_nbytes(self, name: str) -> int: ...


@dataclass(frozen=True, slots=True)
class Activations:
    """Rounding of a layer's inputs before its product.

    Attributes:
        numbers: `int`, or `float`: e4m3 of 8 bits, e2m1 of 4.
        bits: width of a number.
        group_size: inputs of a token that share a scale; None is all of them.
        scales: `float`; `e4m3`, divided by a stored factor; a rule of `POWERS`; or `other`, which is not computed here.
        symmetric: whether there are no zero points.
        stored: suffix of the stored scale of all tokens, or of the factor of `e4m3`; empty where scales are found as
            tokens come.
    """

    INT8: ClassVar[Activations]
    INT4: ClassVar[Activations]
    FP8: ClassVar[Activations]

    numbers: str = "int"
    bits: int = 8
    group_size: int | None = None
    scales: str = "float"
    symmetric: bool = True
    stored: str = ""

    @classmethod
    def from_bits(cls, bits: int | None, *kinds: Activations) -> Activations | None:
        """Returns the one of `kinds` of this width, None for 16-bit inputs (None). Raises SchemeError for another."""
        found = next((kind for kind in kinds if kind.bits == bits), None)
        if found is None and bits is not None:
            widths = ", ".join(str(kind.bits) for kind in kinds)
            raise SchemeError(f"activation_bits={bits} is not supported", f"Use {widths} or leave it out")
        return found

    def __str__(self) -> str:
        kind = f"{'int' if self.numbers == 'int' else 'fp'}{self.bits}"
        group = "" if self.group_size is None else f"g{self.group_size}"
        scales = {"float": "", "other": "with other scales"}.get(self.scales, f"{self.scales} scales")
        stored = "static" if self.stored and self.scales == "float" else ""
        return " ".join(filter(None, (kind, group, scales, stored, "" if self.symmetric else "asym")))


POWERS = "e8m0", "e8m0 floor", "e8m0 ceil"
"""Rules of the power of two that scales the largest input of a group: it becomes at most 1.75 times the last power of
two among the numbers (compressed-tensors), less than twice that (OCP microscaling 1.0), or the largest number."""
Activations.INT8, Activations.INT4, Activations.FP8 = Activations(), Activations(bits=4), Activations("float")
"""Rounding with one scale per token, found as it comes, which kernels of such weights do themselves."""


class Scheme(ABC):
    """Stored form of a weight `[O, I]`, without its tensors.

    A form derives from it in a file of its own and registers itself with `register`; planning, containers,
    verification, memory estimates and the runtime's choice of kernels ask the methods below and name no form.

    Attributes:
        key: entry of the stored description that says that it is of this form.
        suffixes: of the stored tensors' names, after the module's name.
        mark: the one of them that every module of this form has.
        parts: names below the module of matrices that are stored as modules of their own.
        wraps: whether its values are stored in another form, which the same description says.
        fuses: whether layers over the same input can be one weight, row by row.
        is_exact_size: whether `stored_bits` is what the tensors take, without padding to whole words.
        has_grid: whether methods may choose its codes: whether it has `grid`.
        word: names it as a target of compression, in `--weights`, recipes and candidates of searches; empty where it is
            none.
    """

    __slots__ = ()
    key: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    mark: ClassVar[str]
    parts: ClassVar[tuple[str, ...]] = ()
    wraps: ClassVar[bool] = False
    fuses: ClassVar[bool] = True
    is_exact_size: ClassVar[bool] = False
    has_grid: ClassVar[bool] = False
    word: ClassVar[str] = ""

    @classmethod
    def target(cls) -> Scheme:
        """Returns the scheme for the form's `word` in options and recipes."""
        return cls()

    @property
    @abstractmethod
    def bits(self) -> float:
        """Width of a stored value, 16 for values in the model's dtype; the mean where widths alternate."""

    @property
    def group_size(self) -> int | None:
        """Input columns that share one scale; None means one scale per row."""
        return None

    @property
    def symmetric(self) -> bool:
        """Whether there are no stored zero points."""
        return True

    @property
    def activations(self) -> Activations | None:
        """Rounding of the inputs; None keeps them in 16 bits."""
        return None

    @property
    def activation_bits(self) -> int | None:
        """Width of rounded inputs; None for 16 bits."""
        return self.activations.bits if self.activations else None

    @property
    def sparsity(self) -> NMSparsity | None:
        """Pattern of the zeros that are not stored."""
        return None

    @property
    def rank(self) -> int | None:
        """Inner dimension of two factors; None for a weight in one piece."""
        return None

    @property
    def num_outliers(self) -> int:
        """Input columns that stay in 16 bits and have no codes."""
        return 0

    @property
    def hadamard(self) -> int:
        """Order of the Hadamard matrices that inputs are multiplied by before they are rounded; 0 for none."""
        return 0

    @property
    def numbers(self) -> str:
        """Kind of the codes `[O, I]`, by which kernels are chosen; empty for codes that none knows."""
        return ""

    @property
    def code_values(self) -> tuple[float, ...]:
        """The number of each code, for kernels that look it up; empty where codes are not indices into a table."""
        return ()

    @property
    def structure(self) -> str:
        """Feature, in addition to plain codes and scales, that no format of other tools supports; else empty."""
        return f"the {self.key} layout"

    @property
    def holds_zeros(self) -> bool:
        """Whether zero is one of the values under every scale, so that pruned weights can stay zero."""
        return True

    @property
    def note(self) -> str:
        """Which engines read the form, for plans; empty where most do."""
        return f"{self} is read by this runtime only; others read `compress export --format dense`"

    @property
    def codes(self) -> Scheme | None:
        """The scheme in which a method rounds the values of this form; None when they stay in the model's dtype."""
        return self

    @property
    def expanded(self) -> Scheme:
        """The form of the same codes with structural zeros stored."""
        return self

    @property
    def as_symmetric(self) -> Scheme:
        """The form without zero points, for codes of which every zero point is the midpoint."""
        return self

    @property
    def num_shapes(self) -> int:
        """Stored `weight_shape` tensors, which are not counted as weights."""
        return 0

    @property
    def column_multiple(self) -> int:
        """Multiple of columns at which a weight can be cut between devices; 0 where it cannot be cut at all."""
        return self.group_size or 1

    def num_groups(self, in_features: int) -> int:
        """Scales per row. Raises SchemeError when the group size does not divide `in_features`."""
        return 1

    def check(self, shape: tuple[int, int]) -> None:
        """Raises SchemeError when a weight `[O, I]` cannot be stored in this form."""
        self.num_groups(shape[1])

    def check_plain(self, format: str, *numbers: str) -> None:
        """Raises SchemeError when a format of other tools, which holds plain codes of some kinds, of all without any,
        cannot hold this."""
        if self.structure:
            raise SchemeError(f"{format} cannot hold {self.structure} of {self}", "Use --format dense")
        if numbers and self.numbers not in numbers:
            raise SchemeError(f"{format} cannot hold the {self.numbers} codes of {self}", "Use --format dense")

    def matrices(self, out_features: int, in_features: int) -> list[tuple[Scheme | None, int, int]]:
        """Returns scheme and shape of each matrix that the layer multiplies by, in order; None is the model's dtype."""
        return [(self, out_features, in_features)]

    @abstractmethod
    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        """Bits of a packed `[O, I]` weight with all that belongs to it.

        `scale_bits` are those of the model's dtype, in which scales and unquantized values are stored.
        """

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """Bits that are read for one of the weights `[O, I]`, scales left out."""
        return self.bits

    def unpacked_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        """Returns the bytes of the weight with one byte per code, like `Weight.nbytes`."""
        return out_features * (in_features + self.num_groups(in_features) * scale_bytes)

    @classmethod
    def modules(cls, names: Iterable[str]) -> set[str]:
        """Modules among tensor names that are stored in this form."""
        return {name.removesuffix(cls.mark) for name in names if name.endswith(cls.mark)}

    def found(self, module: str, headers: Headers) -> Scheme:
        """Completes the scheme of one module from the headers of its stored tensors."""
        return self

    @abstractmethod
    def read(self, stored: StoredTensors) -> Weight:
        """Reads the weight from its tensors. Raises CheckpointError or SchemeError if they are contradictory."""

    @abstractmethod
    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        """Returns `(O, I)` of a stored weight, without decoding it."""

    def name_problems(self, module: str, suffixes: set[str]) -> list[str]:
        """Contradictions between the tensors that a module has, judged by their names."""
        return []

    def wrap(self, values: Weight | Tensor) -> Weight | Tensor:
        """Wraps rounded values of `codes`, or values in the model's dtype, in a weight of this form."""
        return values

    def round(self, weight: Tensor, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None) -> Weight:
        """Rounds to the nearest representable weight `[O, I]`, with scales of least squared error.

        Args:
            importance: `[I]`, mean square of each input; None weighs all columns alike.
            scale_dtype: dtype in which scales are stored; None is bfloat16.

        Raises:
            SchemeError: this form cannot be rounded to, or its groups do not divide `I`.
            NumericsError: NaN or infinity.
        """
        raise SchemeError(f"{self} has no rounding to nearest", "Choose integers or 8-bit floats")

    def grid(
        self,
        weight: Tensor,
        importance: Tensor | None = None,
        scale_dtype: torch.dtype | None = None,
        inputs: Tensor | None = None,
    ) -> Grid[Weight]:
        """Returns the grid of `weight [O, I]`, with scales of least error.

        Args:
            inputs: `[T, I]` sample inputs, for which the output error is minimized; other arguments as in `round`.

        Raises:
            SchemeError: the form has no grid, or its groups do not divide `I`.
            NumericsError: NaN or infinity.
        """
        raise SchemeError(f"{self} has no grid of values", "Choose integers, or method rtn")

    def round_in_range(self, weight: Tensor, scale_dtype: torch.dtype | None = None) -> Tensor:
        """Rounds `weight [O, I]` with scales that span its range, as float32; fast, for searches with many trials."""
        if self.codes is None:
            return weight.float()
        if self.codes is not self:
            return self.codes.round_in_range(weight, scale_dtype)
        return self.round(weight, None, scale_dtype).dequantize()

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Entries of the stored description that differ from `FIELDS`, `key` among them."""

    @classmethod
    @abstractmethod
    def parse(cls, fields: Mapping[str, Any]) -> Scheme:
        """Parses a stored description that has this form's `key`."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for config.json and reports."""
        return {**FIELDS, **self.fields()}

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Scheme:
        """Inverts `to_dict` for every registered form.

        Raises:
            SchemeError: a contradiction.
            TypeError: entries of a form that is not known here.
        """
        if unknown := fields.keys() - FIELDS.keys() - FORMS.keys():
            raise TypeError(f"unknown entries of a scheme: {', '.join(sorted(unknown))}")
        claimed = [form for key, form in FORMS.items() if key != BASE_FORM and is_set(fields.get(key))]
        wrapping = [form for form in claimed if form.wraps]
        if len(claimed) > 1 and not wrapping:
            raise SchemeError(f"one weight cannot be {' and '.join(form.key for form in claimed)}", "Keep one of them")
        return (*wrapping, *claimed, FORMS[BASE_FORM])[0].parse(fields)


BASE_FORM = "bits"
"""Key of the form of descriptions that name no other."""


def as_width(value: float | str) -> float:
    """Returns a width as an int where it is whole, as it is written and compared."""
    width = float(value)
    return int(width) if width.is_integer() else width


def is_set(value: Any) -> bool:
    """Returns whether an entry of a stored description is set; 0 counts as set."""
    return value is not None and value is not False


FORMS: dict[str, type[Scheme]] = {}
"""The registered forms by key. Importing `compress.checkpoint.weights` registers those of this package."""


def targets() -> dict[str, type[Scheme]]:
    """Forms that are targets of compression, by their words."""
    return {form.word: form for form in FORMS.values() if form.word}


Form = TypeVar("Form", bound=type[Scheme])


def register(key: str) -> Callable[[Form], Form]:
    """Registers a form under the entry of stored descriptions that names it."""

    def add(form: Form) -> Form:
        form.key = key
        FORMS[key] = form
        return form

    return add


@dataclass(frozen=True, slots=True)
class WrappingScheme(Scheme):
    """Form that wraps integers or values in the model's dtype.

    A form that derives from it adds one field, which the stored description has under `key`.

    Attributes:
        inner: the integers; None keeps values in the model's dtype, without scales.
        title: what the form adds to them, for messages.
        holds_floats: whether values may stay in the model's dtype.

    Raises:
        SchemeError: values of another form.
    """

    inner: Int | None

    wraps = True
    title: ClassVar[str]
    holds_floats: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, FORMS[BASE_FORM]) and (self.inner is not None or not self.holds_floats):
            raise SchemeError(f"{self.inner or '16-bit values'} cannot be combined with {self.title}", "Use integers")

    @classmethod
    def of(cls, inner: Scheme | None, entry: Any) -> Self:
        """Wraps another form. Raises SchemeError if the combination is not supported."""
        return cast(Self, cast(Any, cls)(inner, entry))

    @property
    @abstractmethod
    def entry(self) -> Any:
        """Value of the stored description under `key`."""

    @classmethod
    def parse_entry(cls, entry: Any) -> Any:
        """Parses the field of the form from its `entry`. Raises SchemeError."""
        return entry

    @property
    def bits(self) -> int:
        return self.inner.bits if self.inner else FLOAT_BITS

    @property
    def group_size(self) -> int | None:
        return self.inner.group_size if self.inner else None

    @property
    def symmetric(self) -> bool:
        return self.inner is None or self.inner.symmetric

    @property
    def activations(self) -> Activations | None:
        return self.inner.activations if self.inner else None

    @property
    def codes(self) -> Int | None:
        return self.inner

    @property
    def num_shapes(self) -> int:
        return self.inner.num_shapes if self.inner else 0

    def num_groups(self, in_features: int) -> int:
        return self.inner.num_groups(in_features) if self.inner else 1

    def name_problems(self, module: str, suffixes: set[str]) -> list[str]:
        return self.inner.name_problems(module, suffixes) if self.inner else []

    def fields(self) -> dict[str, Any]:
        return {**(self.inner.fields() if self.inner else {"bits": FLOAT_BITS}), self.key: self.entry}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        entry = cls.parse_entry(fields[cls.key])
        if fields.get("bits") != FLOAT_BITS:
            return cls.of(Scheme.from_dict({**fields, cls.key: None}), entry)
        if fields.get("group_size") is not None:
            raise SchemeError("16-bit values have no groups", "Leave the group size out")
        return cls.of(None, entry)

    def __str__(self) -> str:
        return str(self.inner or f"w{FLOAT_BITS}a16")


def stored_modules(names: Iterable[str]) -> list[str]:
    """Returns packed modules of any form among tensor names, without parts of modules."""
    listed = frozenset(names)
    owned = {form: form.modules(listed) for form in FORMS.values()}
    inside = {f"{module}.{part}" for form, modules in owned.items() for module in modules for part in form.parts}
    return sorted(set().union(*owned.values()) - inside)
