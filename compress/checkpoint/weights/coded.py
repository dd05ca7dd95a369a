"""Codes under scales: the scheme and the weight of the forms that are rows of `forms`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights.base import (
    Weight,
    cast_exactly,
    dequantize_by_rows,
    digest_of,
    scale_problems,
)
from compress.common.errors import SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.grids import Grid

INT, INTEGERS, TABLE, FLOAT8 = "int", "block-scaled integer", "table", "float8"
"""Kinds of codes: integers with zero points, or under scales and minima of blocks, places in a table of numbers, bytes
of e4m3."""
EXPONENTS, FLOAT8_SCALES = "uint8", "float8_e4m3fn"
"""Dtypes of scales that are few numbers: `2 ** (e - 127)`, and positive 8-bit floats."""
EXPONENT_BIAS, NAN_EXPONENT = 127, 255
SCALE_BITS = {"": 0, EXPONENTS: 8, FLOAT8_SCALES: 8, "float16": 16, "float32": 32}


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of a form, one for each row and group of columns.

    Attributes:
        dtype: of stored scales, as torch names it; empty for the model's.
        search: the entry of `compress.checkpoint.form_grids.SEARCHES` that finds them; empty where none does.
        tried: what the search tries: places from the scale that spans a group on, or factors of that scale.
        step_bits: width of the integer of each group by which the scale of its block is multiplied; 0 for none.
        has_minima: whether groups have a minimum, stored as scales are.
        divisor_bits: width of the number of a matrix by which all scales are divided; 0 for none.
    """

    dtype: str = ""
    search: str = ""
    tried: Sequence[float] = ()
    step_bits: int = 0
    has_minima: bool = False
    divisor_bits: int = 0

    def bits(self, num_groups: int, num_blocks: int, scale_bits: int, step_bits: int) -> int:
        """Bits of the scales and minima of a row, given those of a scale of the model's dtype and of a step."""
        each = num_groups * (step_bits if self.step_bits else 0) + num_blocks * (SCALE_BITS[self.dtype] or scale_bits)
        return each * (2 if self.has_minima else 1)


@dataclass(frozen=True, slots=True)
class Coded(Scheme):
    """`W ~ numbers[qweight] * scales - minima`: a row of the table of forms, by attributes of its class.

    Attributes:
        scales: of the groups.
        block_size: columns that share a stored scale, where these are several groups; else 0.
        readers: which engines read the form, for plans; empty where most do.
    """

    scales: ClassVar[Scales]
    block_size: ClassVar[int] = 0
    readers: ClassVar[str] = "is read by this runtime only; others read `compress export --format dense`"
    has_grid = True
    is_exact_size = True

    @property
    @abstractmethod
    def bits(self) -> int: ...

    @property
    def note(self) -> str:
        return f"{self} {self.readers}" if self.readers else ""

    @property
    def block_rows(self) -> int:
        """Rows that share a stored scale."""
        return 1

    @property
    def zero(self) -> int:
        """The code of zero of integers without zero points, before minima."""
        return 0 if self.scales.has_minima else 1 << (self.bits - 1)

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def holds_zeros(self) -> bool:
        return 0.0 in self.code_values if self.numbers == TABLE else not self.scales.has_minima

    @property
    def column_multiple(self) -> int:
        return self.block_size or self.group_size or 1

    def columns(self, in_features: int) -> int:
        """Columns that share a scale; the last ones of a row may be fewer."""
        return self.group_size or in_features

    def num_blocks(self, in_features: int) -> int:
        """Stored scales of a row. Raises SchemeError when blocks or groups do not divide it."""
        size = self.block_size or self.columns(in_features)
        if in_features % size:
            kind = "blocks" if self.block_size else "groups"
            raise SchemeError(
                f"{self.word or self.key} {kind} of {size} do not divide {in_features} input features",
                "Leave the layer out with --ignore" if self.word else "Quantize it again from its dense checkpoint",
            )
        return in_features // size

    def num_groups(self, in_features: int) -> int:
        blocks = self.num_blocks(in_features)
        return in_features // self.columns(in_features) if self.block_size else blocks

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        groups, blocks = self.num_groups(in_features), self.num_blocks(in_features)
        scales = self.scales.bits(groups, blocks, scale_bits, self.scales.step_bits)
        scales += 0 if self.symmetric else groups * self.bits
        scaled = -(-out_features // self.block_rows)
        return out_features * in_features * self.bits + scaled * scales + self.scales.divisor_bits

    def unpacked_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        groups, blocks = self.num_groups(in_features), self.num_blocks(in_features)
        scales = self.scales.bits(groups, blocks, 8 * scale_bytes, 8) + self.scales.divisor_bits
        scales += 0 if self.symmetric else 8 * groups
        return out_features * (in_features + scales // 8)

    def __str__(self) -> str:
        return f"w{self.bits}a{self.activation_bits or 16} {self.title}"

    @property
    def title(self) -> str:
        """Name of the form with the size of its groups."""
        return f"{self.word} g{self.group_size}"

    @property
    def entry(self) -> Any:
        """Value of the stored description under `key`."""
        return True

    def fields(self) -> dict[str, Any]:
        names = "bits", "group_size", "symmetric", "activation_bits"
        return {**{name: getattr(self, name) for name in names}, self.key: self.entry}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        scheme = cls()
        scheme.check_fields(fields, group_size=scheme.group_size, activation_bits=None)
        return scheme

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any], **fixed: Any) -> None:
        """Raises SchemeError for entries of a stored description that a form cannot have."""
        for name, value in {"bits": cls.bits, "symmetric": True, **fixed}.items():
            if fields.get(name, value) != value:
                groups = f" in groups of {fixed['group_size']}" if fixed.get("group_size") else ""
                problem = f"{cls.word or cls.key} has {cls.bits} bits{groups}, not {name}={fields[name]}"
                raise SchemeError(problem, f"Leave {name} out")

    def repeated(self, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns the scales `[O, B]` of stored ones. Raises SchemeError for scales of another shape."""
        return scales

    def stored_scales(self, weight: CodedWeight, dtype: torch.dtype) -> Tensor:
        """Returns the scales that are stored. Raises SchemeError for those that `dtype`, the model's, does not hold."""
        is_number = self.scales.dtype not in (EXPONENTS, FLOAT8_SCALES)
        return cast_exactly(weight.scales, dtype) if is_number else weight.scales.contiguous()

    def weight(self, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> CodedWeight:
        """Returns the weight of codes `[O, I]` under scales and zero points `[O, G]`, which symmetric ones drop."""
        return CodedWeight(codes, scales, self, zeros=None if self.symmetric else zeros)

    @abstractmethod
    def tensors(self, weight: CodedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        """As `Weight.tensors`."""

    def grid(
        self,
        weight: Tensor,
        importance: Tensor | None = None,
        scale_dtype: torch.dtype | None = None,
        inputs: Tensor | None = None,
    ) -> Grid[CodedWeight]:
        from compress.checkpoint.form_grids import Search

        return Search(self, weight, importance, scale_dtype, inputs).grid()

    def round(
        self, weight: Tensor, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None
    ) -> CodedWeight:
        from compress.checkpoint.form_grids import Search

        return Search(self, weight, importance, scale_dtype).rounded()

    def round_in_range(self, weight: Tensor, scale_dtype: torch.dtype | None = None) -> Tensor:
        from compress.checkpoint.form_grids import Search

        return Search(self, weight, None, scale_dtype, spans=True).rounded().dequantize()


@dataclass(frozen=True, slots=True)
class CodedWeight(Weight):
    """`W [O, I] ~ numbers[qweight] * scales * steps / divisors - minima * minimum_steps`.

    Numbers are those of the scheme: entries of its table, 8-bit floats, or integers above the code of zero. What a
    form does not have is None.

    Attributes:
        qweight: uint8 `[O, I]`, or float8_e4m3fn.
        scales: `[O, B]`, of blocks of columns, in the dtype that is stored; exponents `e` of `2 ** (e - 127)` in uint8.
        minima: `[O, B]`, as scales.
        steps, minimum_steps: int8 `[O, G]`, of groups of columns; without them blocks are groups.
        divisors: float32 `[O, 1]`.
        zeros: uint8 `[O, G]`, zero points of integers; None where all are the scheme's code of zero.

    Raises:
        SchemeError: shapes or dtypes that contradict the scheme.
    """

    qweight: Tensor
    scales: Tensor
    scheme: Coded
    minima: Tensor | None = None
    steps: Tensor | None = None
    minimum_steps: Tensor | None = None
    divisors: Tensor | None = None
    zeros: Tensor | None = None

    def __post_init__(self) -> None:
        is_float = self.qweight.is_floating_point()
        if (
            not isinstance(self.scheme, Coded)
            or is_float != (self.scheme.numbers == FLOAT8)
            or self.qweight.element_size() != 1
        ):
            raise SchemeError(f"codes of {self.scheme} cannot be {self.qweight.dtype}")
        rows, columns = self.qweight.shape
        groups, blocks, kind = self.scheme.num_groups(columns), self.scheme.num_blocks(columns), self.scheme.scales
        sizes = {
            "scales": blocks,
            "zeros": 0 if self.scheme.symmetric else groups,
            "minima": blocks if kind.has_minima else 0,
            "steps": groups if kind.step_bits else 0,
            "minimum_steps": groups if kind.step_bits and kind.has_minima else 0,
            "divisors": 1 if kind.divisor_bits else 0,
        }
        expected = {name: (rows, size) for name, size in sizes.items() if size}
        found = {name: tuple(part.shape) for name, part in self.named_parts().items() if name != "qweight"}
        for name in sizes:
            if found.get(name) != expected.get(name):
                raise SchemeError(f"{name} {found.get(name)} must be {expected.get(name)} for {self.scheme}")

    @property
    def zero_points(self) -> Tensor:
        """Codes of zero `[O, G]`, uint8, also where none are stored."""
        import torch

        if self.zeros is not None:
            return self.zeros
        shape = self.shape[0], self.scheme.num_groups(self.shape[1])
        return torch.full(shape, self.scheme.zero, dtype=torch.uint8, device=self.qweight.device)

    @property
    def is_symmetric(self) -> bool:
        return self.zeros is None or bool((self.zeros == self.scheme.zero).all())

    def group_scales(self) -> Tensor:
        """Float32 `[O, G]`: what the numbers of codes are multiplied by."""
        scales = powers_of_two(self.scales) if str(self.scales.dtype) == f"torch.{EXPONENTS}" else self.scales.float()
        return _times(scales if self.divisors is None else scales / self.divisors, self.steps)

    def group_minima(self) -> Tensor | None:
        """Float32 `[O, G]`, subtracted from the multiples of scales."""
        return None if self.minima is None else _times(self.minima.float(), self.minimum_steps)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[O, I]`, rounded once to `dtype`.

        They are computed in float32 as other loaders do. Integers and 8-bit floats are computed in float64 where that
        is asked for, and integers where their scales have 32 bits, so that products are exact before they are rounded.
        """
        import torch

        kind, numbers, scales = self.scheme.numbers, self._numbers(), self.group_scales()
        if (kind in (INT, FLOAT8) and dtype == torch.float64) or (kind == INT and self.scales.dtype == torch.float32):
            scales = scales.double()
        group, columns = self.scheme.columns(self.shape[1]), self.shape[1]

        def panel(codes: Tensor, scales: Tensor, zeros: Tensor | None, minima: Tensor | None) -> Tensor:
            values = numbers(codes).to(scales.dtype)
            if columns % group:
                values = torch.nn.functional.pad(values, (0, -columns % group))
            grouped: Tensor = values.unflatten(1, (-1, group))
            if zeros is not None:
                grouped.sub_(zeros.to(scales.dtype).unsqueeze(-1))
            grouped.mul_(scales.unsqueeze(-1))
            if minima is not None:
                grouped.sub_(minima.unsqueeze(-1))
            return grouped.flatten(1)[:, :columns]

        return dequantize_by_rows(dtype, panel, self.qweight, scales, self.zeros, self.group_minima())

    def _numbers(self) -> Callable[[Tensor], Tensor]:
        """Returns a function that gives codes their numbers, before zero points, in a new tensor."""
        import torch

        if self.scheme.numbers == TABLE:
            values = torch.tensor(self.scheme.code_values, device=self.qweight.device)
            return lambda codes: values.index_select(0, codes.flatten().int()).view(codes.shape)
        if self.scheme.numbers == FLOAT8 or self.zeros is not None:
            return lambda codes: codes.float()
        return lambda codes: codes.float().sub_(self.scheme.zero)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return self.scheme.tensors(self, dtype)

    def stored_as(self, scheme: Scheme) -> Weight:
        if not isinstance(scheme, Coded) or {scheme.numbers, self.scheme.numbers} != {INT}:
            return Weight.stored_as(self, scheme)
        return replace(self, scheme=scheme, zeros=None if scheme.symmetric else self.zero_points)

    def fuse(self, others: Sequence[Weight]) -> Self | None:
        """As one weight; None when matrices differ in the number that their scales are divided by."""
        divisors = [
            each.divisors[:1] for each in (self, *others) if isinstance(each, CodedWeight) and each.divisors is not None
        ]
        if any(float(each) != float(divisors[0]) for each in divisors):
            return None
        return Weight.fuse(self, others)

    def problems(self, module: str) -> Iterator[str]:
        integers = [part for part in (self.qweight, self.zeros) if part is not None and self.scheme.numbers == INT]
        if any(int(part.max()) > self.scheme.max_code for part in integers):
            yield f"{module} has codes or zero points above {self.scheme.max_code}"
        if self.scheme.scales.dtype == EXPONENTS:
            if bad := int((self.scales == NAN_EXPONENT).sum()):
                yield f"{module} has {bad} exponents that are NaN"
            return
        yield from scale_problems(module, self.group_scales() if self.divisors is not None else self.scales)
        if self.minima is not None:
            yield from scale_problems(module, self.minima)

    def digest(self) -> str:
        if self.scheme.numbers != INT:
            return Weight.digest(self)
        import torch

        kind = f"{self.scheme.bits} {self.scheme.group_size} {self.shape}"
        return digest_of(kind, self.qweight, self.scales.to(torch.float64), self.zero_points)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Float32 `2 ** (e - 127)` of exponents `e`."""
    import torch

    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - EXPONENT_BIAS)


def _times(numbers: Tensor, steps: Tensor | None) -> Tensor:
    """Float32 `[O, G]`: integers `[O, G]` times the number `[O, B]` of their block; without them the numbers."""
    if steps is None:
        return numbers
    grouped: Tensor = steps.float().unflatten(1, (numbers.shape[1], -1))
    return (grouped * numbers.unsqueeze(-1)).flatten(1)
