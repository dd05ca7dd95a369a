"""What a layer may become, and its word: `w4g128`, `2:4`, `asvd0.8w8`. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compress.checkpoint.errors import RecipeError
from compress.checkpoint.scheme import FLOAT_BITS, Scheme, Sparsity
from compress.stages.factorize import FactorizeStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage
from compress.stages.table import TensorStage

RANK_WORDS = {"rank": "svd-llm", "asvd": "asvd", "svd": "svd"}
"""Factorizing methods by the words that menus have for them."""


@dataclass(frozen=True, slots=True)
class Form:
    """Pruned or factorized or neither, and quantized or not; a layer of which none is true stays dense.

    Attributes:
        scheme: of the integers: of all weights, of both factors, or of what pruning leaves; None keeps 16-bit values.
        pattern: N:M sparsity.
        factorizing: method that makes two factors; None leaves one matrix.
        keep: share of the weights that factors keep.

    Raises:
        RecipeError: pruned and factorized, or a share that means nothing.
        SchemeError: groups that cut through the pattern.
    """

    scheme: Scheme | None = None
    pattern: Sparsity | None = None
    factorizing: str | None = None
    keep: float = 1.0

    def __post_init__(self) -> None:
        if self.pattern and self.factorizing:
            raise RecipeError(f"{self} is both pruned and factorized", "Choose one: factors are not sparse")
        if self.pattern and self.scheme:
            Scheme(self.scheme.bits, self.scheme.group_size, self.scheme.symmetric, sparsity=self.pattern)
        self.stages("gptq", ("any",))

    @property
    def is_dense(self) -> bool:
        return not (self.scheme or self.pattern or self.factorizing)

    @property
    def is_plain(self) -> bool:
        """Whether every weight is rounded and nothing else is done."""
        return self.scheme is not None and not self.pattern and not self.factorizing

    @property
    def bits_per_weight(self) -> float:
        """About how many, scales left out."""
        bits = self.scheme.bits if self.scheme else FLOAT_BITS
        if self.pattern:
            return (bits + self.pattern.index_bits) * self.pattern.kept / self.pattern.of
        return bits * self.keep

    def stages(self, method: str, targets: Sequence[str]) -> tuple[TensorStage, ...]:
        """What a recipe does to give these layers this form.

        Args:
            method: how integers are rounded.
        """
        named = tuple(targets)
        stages: list[TensorStage] = []
        if self.factorizing:
            stages.append(FactorizeStage(self.factorizing, self.keep, "uniform", named))
        if self.pattern:
            stages.append(PruneStage(pattern=self.pattern, targets=named))
        if self.scheme:
            stages.append(QuantizeStage(method, self.scheme, named))
        return tuple(stages)

    def __str__(self) -> str:
        words = {method: word for word, method in RANK_WORDS.items()}
        structure = str(self.pattern) if self.pattern else ""
        if self.factorizing:
            structure += f"{words[self.factorizing]}{self.keep}"
        if self.scheme is None:
            return structure or "dense"
        group = f"g{self.scheme.group_size}" if self.scheme.group_size else ""
        return f"{structure}w{self.scheme.bits}{group}{'' if self.scheme.symmetric else 'asym'}"
