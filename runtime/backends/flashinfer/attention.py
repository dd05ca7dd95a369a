"""Attention of a step's spans over 16-bit pages by flashinfer's batched prefill; captured steps stay in Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.backends.backend import AttentionStep
from runtime.backends.kv_pages import KVCache
from runtime.backends.measured import Verdict
from runtime.backends.model import Model
from runtime.backends.scores import Scores
from runtime.backends.torch.attention import StepKeys
from runtime.backends.triton.attention import TritonAttention, attention_unsupported_reason, layer_pages
from runtime.backends.triton.device import judge_on_gpu
from runtime.backends.triton.fused_linear import ROWS_LAYOUT, ActivationLayout, QuantizedInput
from runtime.core.batch import Batch
from runtime.core.memory_plan import MemoryPlan
from runtime.core.step import ScheduledSequence

if TYPE_CHECKING:
    from runtime.backends.triton.kernels.norm_act import InputRoom

TABLES = Path(__file__).parent / "tables"
"""Measured speed-ups, one file per GPU, named after it."""
MEASURED = "16-bit pages"
"""Name of these pages in the tables."""
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 * 2**20
"""Size that the package recommends for partial results of long contexts."""


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of a step as the package counts them, int32 in host memory except for the pages.

    Attributes:
        rows: `[spans + 1]`, where the rows of each span begin and end.
        pages: `[spans + 1]`, where the pages of each span begin and end in `page_ids`.
        page_ids: int32 on the device.
        last_lengths: `[spans]`, keys in the last page of each.
    """

    rows: Tensor
    pages: Tensor
    page_ids: Tensor
    last_lengths: Tensor


def spans_of(entries: Sequence[ScheduledSequence], block_size: int, device: torch.device) -> Spans:
    """Counts rows and pages of entries in the order of their rows."""
    lengths = [entry.start + entry.num_tokens for entry in entries]
    tables = [
        entry.sequence.block_ids[: -(-length // block_size)] for entry, length in zip(entries, lengths, strict=True)
    ]
    return Spans(
        _bounds([entry.num_tokens for entry in entries]),
        _bounds([len(table) for table in tables]),
        torch.tensor([block for table in tables for block in table], dtype=torch.int32).to(device),
        torch.tensor([(length - 1) % block_size + 1 for length in lengths], dtype=torch.int32),
    )


def _bounds(sizes: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)


def new_wrapper(device: torch.device) -> Any:
    """The package's batched prefill over pages `[pages, page_size, kv_heads, D]`, with a workspace of its own."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper(torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "NHD")


def plan(
    wrapper: Any,
    spans: Spans,
    heads: tuple[int, int, int],
    page_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Makes a wrapper ready for spans that attend causally.

    Args:
        heads: number of query heads, of kv heads, and their dimensions.
    """
    wrapper.plan(
        spans.rows,
        spans.pages,
        spans.page_ids,
        spans.last_lengths,
        *heads,
        page_size,
        causal=True,
        window_left=-1 if window is None else window - 1,
        logits_soft_cap=softcap,
        q_data_type=dtype,
    )


class FlashInferAttention(TritonAttention):
    """As `TritonAttention`; the package computes steps that are laid out on the host and have no trees of drafts."""

    def __init__(
        self, keys: StepKeys, windows: tuple[int | None, ...], scores: Scores, wrappers: Mapping[int | None, Any]
    ) -> None:
        super().__init__(keys, windows, scores)
        batch, device = keys.batch, keys.cache.pages.memory.device
        is_captured, has_trees = not batch.entries, any(group.ancestors is not None for group in batch.groups)
        planned = not is_captured and not has_trees
        self._spans = spans_of(batch.entries, self.pages.block_size, device) if planned else None
        self._wrappers = wrappers
        self._planned: set[int | None] = set()

    def attend(
        self,
        layer: int,
        query: Tensor,
        moved: Tensor | None = None,
        form: ActivationLayout = ROWS_LAYOUT,
        room: InputRoom | None = None,
    ) -> QuantizedInput:
        """Attention `[T, heads * D]` of the step's queries `[T, heads, D]` over keys and values that are written, in a
        form."""
        from runtime.backends.triton.kernels.norm_act import convert_input

        if self._spans is None:
            return super().attend(layer, query, moved, form, room)
        window, cache = self.windows[layer], self.keys.cache
        read = layer_pages(self.pages, cache.scheme, cache.sources[layer])
        wrapper, (_, page_size, kv_heads, head_dim) = self._wrappers[window], read.pages[0].shape
        if window not in self._planned:
            heads = query.shape[1], kv_heads, head_dim
            plan(wrapper, self._spans, heads, page_size, query.dtype, window, self.scores.softcap)
            self._planned.add(window)
        attended: Tensor = wrapper.run(query.contiguous(), read.pages)
        return convert_input(attended.flatten(1), form)


def prepare_attention(
    model: Model, cache: KVCache, windows: tuple[int | None, ...], memory: MemoryPlan
) -> AttentionStep:
    """Attention over pages in the layouts of plain torch, which both packages read in place."""
    wrappers, scores = {window: new_wrapper(model.device) for window in set(windows)}, model.scores

    def step(batch: Batch) -> FlashInferAttention:
        keys = StepKeys(cache, batch, cache.place(model, batch.entries))
        return FlashInferAttention(keys, windows, scores, wrappers)

    return step


def unsupported_reason(model: Model, memory: MemoryPlan) -> str:
    """Why the package cannot serve a model; "" when it can."""
    if not is_installed():
        return "needs the package flashinfer-python (extra flashinfer)"
    if reason := attention_unsupported_reason(model, memory):
        return reason
    config, scheme = model.config, memory.kv_cache
    if {scheme.key_format, scheme.value_format} != {"16bit"}:
        return "takes 16-bit pages"
    if len(set(config.head_dims)) > 1 or config.mixer.head_dim not in HEAD_DIMS:
        return f"takes heads of {', '.join(map(str, HEAD_DIMS))} dimensions, the same in all layers"
    if memory.attention_window.window is not None:
        return "takes whole sequences"
    mixer = config.mixer
    if mixer.latent or mixer.sink_logits or any(config.chunks or ()):
        return "takes neither latents, sink logits nor chunks"
    return ""


@cache
def is_installed() -> bool:
    return find_spec("flashinfer") is not None


def verdict(model: Model, memory: MemoryPlan) -> Verdict:
    """Whether it is taken unasked: where the table of this GPU, or of one like it, says that it is faster."""
    return judge_on_gpu(TABLES, model.device, MEASURED, model.config.mixer.head_dim)
