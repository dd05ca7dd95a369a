"""How one linear layer is quantized. Free of torch: planning and command lines import it cheaply."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.errors import SchemeError

MIN_BITS, MAX_BITS = 2, 8
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Integer quantization of a weight `[O, I]`: `W ~ (codes - zero) * scale`, one scale per row and group.

    Attributes:
        bits: width of a code, 2 to 8.
        group_size: input columns that share one scale; None means one scale for the whole row (per channel).
        symmetric: zero point fixed at `2 ** (bits - 1)`; scales may be negative (signed full range).
        activation_bits: 8 for dynamic per-token int8 inputs (W8A8), None for 16-bit inputs.
    """

    bits: int = 4
    group_size: int | None = 128
    symmetric: bool = True
    activation_bits: int | None = None

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise SchemeError(f"bits={self.bits} is outside {MIN_BITS} to {MAX_BITS}", "Choose --bits 4, 3, 2 or 8")
        if self.group_size is not None and self.group_size < 1:
            raise SchemeError(f"group size {self.group_size} is not positive", "Choose --group-size 128, 64 or 32")
        if self.activation_bits not in (None, 8):
            raise SchemeError(f"activation_bits={self.activation_bits} is not supported", "Use 8 or leave it out")

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
        """Bits of a packed `[O, I]` weight: codes, scales and (asymmetric) packed zero points."""
        groups = self.num_groups(in_features)
        zero_bits = 0 if self.symmetric else self.bits
        return out_features * (in_features * self.bits + groups * (scale_bits + zero_bits))

    def __str__(self) -> str:
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        activation = f"a{self.activation_bits}" if self.activation_bits else "a16"
        return f"w{self.bits}{activation} {group} {'sym' if self.symmetric else 'asym'}"
