"""What one linear gets: how it is pruned, factored and quantized."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.scheme import Scheme, Sparsity
from compress.layerwise import OutlierShares
from compress.stages.tuning import Tuning


@dataclass(frozen=True, slots=True)
class Pruning:
    """Which weights of a linear become zero: N:M by `pattern`, or a `share` of all.

    With `layerwise` both are means, from which a first pass over the model sets those of each block.
    """

    method: str
    pattern: Sparsity | None
    share: float
    layerwise: OutlierShares | None = None

    def __str__(self) -> str:
        amount = str(self.pattern) if self.pattern else f"{round(100 * self.share, 1):g}%"
        return f"{self.method} {amount}{f' ({self.layerwise})' if self.layerwise else ''}"


@dataclass(frozen=True, slots=True)
class Factoring:
    """How a linear becomes two factors.

    Attributes:
        allocation: block and model share ranks out when more is known (`compress.ranks.share_out`), so that the planned
            rank may change; uniform keeps it.
    """

    method: str
    keep: float
    allocation: str = "uniform"

    @property
    def is_shared(self) -> bool:
        return self.allocation != "uniform"

    def __str__(self) -> str:
        return f"{self.method} {self.keep:.0%}"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one linear gets.

    Attributes:
        method: of quantization; None keeps 16-bit values.
        scheme: how the weight is stored; None is dense, zeros and all.
        alpha: SmoothQuant's exponent or GPTAQ's share where the user fixed it.
        pruning: what is pruned before.
        factoring: how the factors are made whose rank `scheme` has.
        tuning: how its rounding is learned, when it is.
    """

    method: str | None
    scheme: Scheme | None
    alpha: float | None = None
    pruning: Pruning | None = None
    factoring: Factoring | None = None
    tuning: Tuning | None = None

    @property
    def needs_hessian(self) -> bool:
        work = {self.method, self.pruning and self.pruning.method, self.factoring and self.factoring.method}
        return bool(work & {"gptq", "gptaq", "signround", "sparsegpt", "svd-llm"})

    @property
    def needs_first_pass(self) -> bool:
        """Whether the whole model has to be looked at before it is known what this linear gets."""
        return bool(self.pruning and self.pruning.layerwise) or self.shares_ranks

    @property
    def shares_ranks(self) -> bool:
        """Whether its rank is decided beside those of the whole model."""
        return self.factoring is not None and self.factoring.allocation == "model"

    @property
    def quantized(self) -> Scheme | None:
        """The integers the weight is rounded to; None when it is not."""
        return None if self.method is None else self.scheme

    def __str__(self) -> str:
        work = [str(self.pruning)] if self.pruning else []
        if self.factoring and self.scheme:
            work.append(f"{self.factoring} {'about ' if self.factoring.is_shared else ''}rank {self.scheme.rank}")
        stored = self.scheme.factor if self.factoring and self.scheme else self.scheme
        return " + ".join([*work, f"{self.method} {stored}"] if self.method else work)
