"""How one linear layer is quantized. Free of torch: planning and command lines import it cheaply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from compress.common.errors import SchemeError

MIN_BITS, MAX_BITS = 2, 8
FLOAT_BITS = 16
COLUMN_BITS = 32
"""Of the number of an outlier column."""
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Sparsity:
    """N:M sparsity: of every `of` neighbouring inputs of a row at most `kept` are not zero, and only those are stored,
    each with its place among the `of`."""

    kept: int = 2
    of: int = 4

    def __post_init__(self) -> None:
        if not (self.of in (4, 8) and 1 <= self.kept < self.of):
            raise SchemeError(f"sparsity pattern {self} is not supported", "Use 2:4, 4:8 or another N:4 or N:8")

    @classmethod
    def parse(cls, text: str) -> Sparsity:
        """`2:4` and the like. Raises SchemeError for anything else."""
        kept, colon, of = text.partition(":")
        if not (colon and kept.isdigit() and of.isdigit()):
            raise SchemeError(f"{text!r} is no sparsity pattern", "Use 2:4 or 4:8")
        return cls(int(kept), int(of))

    @property
    def index_bits(self) -> int:
        """Bits that say where a kept value stands."""
        return (self.of - 1).bit_length()

    def __str__(self) -> str:
        return f"{self.kept}:{self.of}"


@dataclass(frozen=True, slots=True)
class Scheme:
    """Quantization of a weight `[O, I]`: `W ~ (codes - zero) * scale`, one scale per row and group.

    Attributes:
        bits: width of a code, 2 to 8.
        group_size: input columns that share one scale; None means one scale for the whole row (per channel).
        symmetric: zero point fixed at `2 ** (bits - 1)`; scales may be negative (signed full range).
        activation_bits: 8 for dynamic per-token int8 inputs (W8A8), None for 16-bit inputs.
        sparsity: only some of the codes are stored; with it `bits` may be 16, which means values in the model's own
            dtype, without scales.
        rank: the weight is the product of two factors `[O, rank]` and `[rank, I]`, each stored so; with it `bits` may
            be 16, which means factors in the model's own dtype.
        outliers: so many input columns are stored in the model's own dtype, beside codes that are zero there.
        fp8: codes are 8-bit floats (e4m3) and there are no zero points, `W ~ codes * scale`; 8-bit activations are such
            floats too.
    """

    bits: int = 4
    group_size: int | None = 128
    symmetric: bool = True
    activation_bits: int | None = None
    sparsity: Sparsity | None = None
    rank: int | None = None
    outliers: int | None = None
    fp8: bool = False

    def __post_init__(self) -> None:
        if self.sparsity is not None:
            self._check_sparse(self.sparsity)
        if self.rank is not None:
            self._check_rank(self.rank)
        if self.outliers is not None:
            self._check_outliers(self.outliers)
        if self.fp8:
            self._check_fp8()
        if self.is_float:
            return
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise SchemeError(f"bits={self.bits} is outside {MIN_BITS} to {MAX_BITS}", "Choose --bits 4, 3, 2 or 8")
        if self.group_size is not None and self.group_size < 1:
            raise SchemeError(f"group size {self.group_size} is not positive", "Choose --group-size 128, 64 or 32")
        if self.activation_bits not in (None, 8):
            raise SchemeError(f"activation_bits={self.activation_bits} is not supported", "Use 8 or leave it out")

    def _check_sparse(self, sparsity: Sparsity) -> None:
        if self.group_size is not None and self.group_size % sparsity.of:
            raise SchemeError(f"groups of {self.group_size} cut through the {sparsity} pattern", "Use --group-size 128")
        if self.is_float and self.group_size is not None:
            raise SchemeError("16-bit values have no groups", "Leave the group size out")
        if self.activation_bits:
            raise SchemeError(f"{sparsity} sparsity with 8-bit activations is not supported", "Use 16-bit activations")

    def _check_rank(self, rank: int) -> None:
        if rank < 1:
            raise SchemeError(f"a rank of {rank} leaves nothing", "Keep more of the weights")
        if self.sparsity is not None or self.activation_bits is not None:
            raise SchemeError(
                "factors of low rank are neither sparse nor multiplied with 8-bit activations",
                "Leave the pattern and activation_bits out where layers are factorized",
            )
        if self.is_float and self.group_size is not None:
            raise SchemeError("16-bit values have no groups", "Leave the group size out")

    def _check_outliers(self, outliers: int) -> None:
        if outliers < 1:
            raise SchemeError(f"{outliers} outlier columns are none", "Leave outlier columns out")
        if self.sparsity is not None or self.rank is not None:
            raise SchemeError(
                "outlier columns go with neither sparsity nor low rank", "Leave outlier columns out there"
            )

    def _check_fp8(self) -> None:
        if (self.bits, self.group_size, self.symmetric) != (8, None, True):
            raise SchemeError(
                "8-bit floats have 8 bits, one scale per output channel and no zero points",
                "Leave bits, group size and asymmetry out beside fp8",
            )
        if self.sparsity is not None or self.rank is not None or self.outliers is not None:
            raise SchemeError(
                "8-bit floats go with neither N:M sparsity, low rank nor outlier columns", "Use integers there"
            )

    @property
    def is_float(self) -> bool:
        """Values in the model's own dtype, without scales: pruned or factorized, but not quantized."""
        return self.bits == FLOAT_BITS and (self.sparsity is not None or self.rank is not None)

    @property
    def factor(self) -> Scheme | None:
        """Of each factor of a weight of low rank; None when factors are plain numbers."""
        return None if self.is_float else replace(self, rank=None)

    @property
    def base(self) -> Scheme:
        """Of the codes alone, outlier columns left out."""
        return replace(self, outliers=None)

    def matrices(self, out_features: int, in_features: int) -> list[tuple[Scheme | None, int, int]]:
        """What a weight `[O, I]` is multiplied as, in order: itself, or its codes and then its outlier columns, or the
        right factor and then the left one. Without a scheme: as plain numbers."""
        if self.outliers is not None:
            return [(self.base, out_features, in_features), (None, out_features, self.outliers)]
        if self.rank is None:
            return [(self, out_features, in_features)]
        return [(self.factor, self.rank, in_features), (self.factor, out_features, self.rank)]

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def midpoint(self) -> int:
        """The zero point of a symmetric code."""
        return 1 << (self.bits - 1)

    def num_groups(self, in_features: int) -> int:
        """Groups per row. Raises SchemeError when the group size does not divide `in_features`."""
        if self.group_size is None:
            return 1
        if in_features % self.group_size:
            fitting = [size for size in GROUP_SIZES if in_features % size == 0]
            remedy = f"Use --group-size {fitting[-1]}" if fitting else "Use per-channel groups (--group-size -1)"
            raise SchemeError(
                f"group size {self.group_size} does not divide {in_features} input features",
                f"{remedy}, or leave the layer out with --ignore",
            )
        return in_features // self.group_size

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        """Bits of a packed `[O, I]` weight: codes and their places, scales and (asymmetric) packed zero points, outlier
        columns and their numbers.

        `scale_bits` are those of the model's dtype, in which all that is not quantized is stored too.
        """
        if self.outliers is not None:
            codes = self.base.stored_bits(out_features, in_features, scale_bits)
            return codes + self.outliers * (out_features * scale_bits + COLUMN_BITS)
        if self.rank is not None:
            factors = self.matrices(out_features, in_features)
            return sum(
                rows * columns * scale_bits if factor is None else factor.stored_bits(rows, columns, scale_bits)
                for factor, rows, columns in factors
            )
        stored, place = in_features, 0
        if self.sparsity is not None:
            stored, place = in_features // self.sparsity.of * self.sparsity.kept, self.sparsity.index_bits
        groups = 0 if self.is_float else self.num_groups(in_features)
        zero_bits = 0 if self.symmetric else self.bits
        return out_features * (stored * (self.bits + place) + groups * (scale_bits + zero_bits))

    def __str__(self) -> str:
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        activation = f"a{self.activation_bits}" if self.activation_bits else "a16"
        structure = f" {self.sparsity}" if self.sparsity else f" rank {self.rank}" if self.rank else ""
        structure += f" + {self.outliers} columns" if self.outliers else ""
        if self.is_float:
            return f"w{self.bits}a16{structure}"
        if self.fp8:
            return f"w{self.bits}{activation} fp8 {group}"
        return f"w{self.bits}{activation} {group} {'sym' if self.symmetric else 'asym'}{structure}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as config.json and reports hold them."""
        return asdict(self) | {"sparsity": str(self.sparsity) if self.sparsity else None}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Scheme:
        """The inverse of `to_dict`. Raises SchemeError, or TypeError for fields that do not exist."""
        sparsity = fields.get("sparsity")
        return cls(**{**fields, "sparsity": Sparsity.parse(sparsity) if sparsity else None})
