"""Attention over pages on NVIDIA GPUs through Triton, for one step."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.attention.step_keys import StepKeys
from runtime.batch import AttentionGroup
from runtime.kernels.gpu_linears import has_triton, num_processors

MAX_ROWS = 64
MIN_ROWS = 16
"""Rows of one program: tokens times the query heads that share a kv head; tensor cores take no fewer than 16."""
MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 64


class TritonAttention:
    """As `PagedAttention`: stores the step's keys and values, then each group of sequences attends in one launch.

    Args:
        keys: what is read; without exact sinks or a recent window.
        windows: sliding window of every layer; None is none.
    """

    def __init__(self, keys: StepKeys, windows: tuple[int | None, ...]) -> None:
        self.keys, self.windows = keys, windows
        self.processors = num_processors(keys.cache.pages.memory.device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache = self.keys.cache
        query = cache.turn(query)
        self.keys.write(layer, cache.turn(key), value)
        parts = [self._attend(layer, group, query[group.rows]) for group in self.keys.batch.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, layer: int, group: AttentionGroup, query: Tensor) -> Tensor:
        from runtime.kernels.gpu.launch_attention import attend

        tensors = self.keys.cache.pages.memory.tensors
        scheme = self.keys.cache.scheme
        names = ("keys", "values") if scheme.is_exact else ("key_codes", "value_codes")
        pages = [tensors[name][layer] for name in names]
        scales = pages if scheme.is_exact else [tensors[name][layer] for name in ("key_scales", "value_scales")]
        kv_heads = pages[0].shape[2]
        rows = len(query) // group.num_sequences * (query.shape[1] // kv_heads)
        block_rows = min(MAX_ROWS, max(MIN_ROWS, 1 << (rows - 1).bit_length()))
        programs = group.num_sequences * -(-rows // block_rows) * kv_heads
        return attend(
            query.contiguous(),
            pages,
            scales,
            (scheme.key_format, scheme.value_format),
            group.blocks.view(group.num_sequences, -1),
            group.positions,
            self.windows[layer],
            block_rows,
            num_splits(group.num_keys, programs, self.processors),
        )


def num_splits(num_keys: int, programs: int, processors: int) -> int:
    """Into how many stretches the context is cut: two programs per processor, none with less than its fixed costs."""
    return max(1, min(2 * processors // programs, num_keys // MIN_SPLIT_TOKENS, MAX_SPLITS))


def refuse(device: torch.device, dtype: torch.dtype, head_dim: int, exact_tokens: bool) -> str:
    """Why this attention cannot serve; empty when it can.

    Args:
        exact_tokens: some tokens are kept exactly beside quantized pages, or positions are relative to a window.
    """
    if device.type != "cuda":
        return "runs on NVIDIA GPUs"
    if not has_triton():
        return "needs Triton"
    if dtype not in (torch.bfloat16, torch.float16):
        return "computes in 16 bits"
    if head_dim & (head_dim - 1) or head_dim < 32:
        return "takes heads of 32, 64, 128 or 256 dimensions"
    return "reads no exact sinks and no recent window" if exact_tokens else ""
