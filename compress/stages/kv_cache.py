"""The stage that says how keys and values are kept while serving."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.errors import RecipeError
from compress.checkpoint.kv_cache import AUTO, KV_FORMATS, KVCacheScheme
from compress.stages.words import nearest

SMALLEST_FIRST = ("int4", "k8v4", "fp8", "int8")
LONGEST_WINDOW = 8192
"""Windows are as long as the model's context, up to this: attention over more takes minutes on a CPU."""


@dataclass(frozen=True, slots=True)
class KVCacheStage:
    """Chooses the checkpoint's default form of keys and values, by what it costs on long texts. No tensor changes.

    Attributes:
        format: `16bit`, `fp8`, `int8`, `k8v4`, `int4`, or `auto`: the smallest that stays within `max_kl`.
        rotate: keys are turned by a Hadamard matrix; None turns those of int4.
        sinks, recent: first and last tokens that stay exact. Recent ones save the most, and cost the runtime's prefix
            cache: blocks are then not alike for all sequences that have the same tokens.
        max_kl: most mean KL, in nats, between the checkpoint with a 16-bit cache and with this one.
        data: text to measure on, see `calibration.sources.load_texts`.
        tokens: how many of it.
        length: tokens of a window; None takes the model's context, up to `LONGEST_WINDOW`.
    """

    format: str = AUTO
    rotate: bool | None = None
    sinks: int = 0
    recent: int = 0
    max_kl: float = 0.01
    data: str = "pydoc"
    tokens: int = 16384
    length: int | None = None

    def __post_init__(self) -> None:
        if self.format not in (AUTO, *KV_FORMATS):
            raise RecipeError(
                f"KV cache format {self.format!r} does not exist", nearest(self.format, (AUTO, *KV_FORMATS), "Formats")
            )
        if not self.max_kl > 0:
            raise RecipeError(f"max_kl={self.max_kl} lets no format pass", "Use 0.01, or format: 16bit")
        if self.tokens < 2 or (self.length is not None and self.length < 2):
            raise RecipeError("a KV cache cannot be measured on less than 2 tokens", "Use tokens: 16384")
        # Raises SchemeError for what makes no sense together.
        _ = self.candidates

    @property
    def candidates(self) -> tuple[KVCacheScheme, ...]:
        """What is measured, the smallest first; nothing for a cache of 16 bits."""
        formats = SMALLEST_FIRST if self.format == AUTO else (self.format,)
        schemes = [KVCacheScheme.named(format, self.rotate, self.sinks, self.recent) for format in formats]
        return tuple(scheme for scheme in schemes if not scheme.is_exact)

    @property
    def needs_calibration(self) -> bool:
        return False

    def window_length(self, context: int | None) -> int:
        """Tokens of a window for a model of this context."""
        wanted = self.length or LONGEST_WINDOW
        return min(wanted, context or wanted)
