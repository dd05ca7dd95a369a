"""Attention of one decode step over pages on a GPU, by the form of keys and values, beside that of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from benchmarking.cpu_attention import Case, decoder_config
from benchmarking.gpu_timing import num_copies
from compress.checkpoint.kv_cache import KVCacheScheme
from runtime.backends.kv.pages import ExactPages, QuantizedPages
from runtime.backends.triton.attention import block_rows, num_splits
from runtime.backends.triton.kernels.page_views import layer_pages

FORMS = ("16bit", "fp8", "int8", "int4")
SDPA = "SDPA bf16, contiguous"


@dataclass(frozen=True)
class Calls:
    """The same step over several copies of keys and values, and the bytes that one of them reads."""

    calls: list[Callable[[], object]]
    nbytes: int


def paged_calls(case: Case, form: str, processors: int, device: torch.device) -> Calls:
    """One token of each of `case.batch` sequences over `case.context` keys, in the form of the pages."""
    from runtime.backends.triton.kernels.paged_attention import attend

    blocks, scheme = case.batch * case.context // case.block_size, KVCacheScheme(form)
    config = decoder_config(case, copies_of(case))
    pages: ExactPages | QuantizedPages
    if scheme.is_exact:
        pages = ExactPages(config, blocks, case.block_size, torch.bfloat16, device)
    else:
        pages = QuantizedPages(config, scheme, blocks, case.block_size, torch.bfloat16, device)
    _fill(pages)
    tensors = pages.memory.tensors
    query = torch.randn(case.batch, case.heads, case.head_dim, device=device, dtype=torch.bfloat16)
    table = torch.randperm(blocks, device=device).view(case.batch, -1)
    positions = torch.full((case.batch,), case.context - 1, device=device)
    splits = num_splits(case.context, case.batch * case.kv_heads, processors)

    def call(layer: int) -> Callable[[], object]:
        read = layer_pages(tensors, scheme, layer)
        pages = read.pages, read.scales, read.formats
        return lambda: attend(query, *pages, table, positions, None, block_rows(case.head_dim)[0], splits)

    nbytes = sum(tensor[0].nbytes for tensor in tensors.values())
    return Calls([call(layer) for layer in range(config.num_layers)], nbytes)


def sdpa_calls(case: Case, device: torch.device) -> Calls:
    """The same by torch, whose keys and values lie in one piece."""
    shape = case.batch, case.kv_heads, case.context, case.head_dim
    query = torch.randn(case.batch, case.heads, 1, case.head_dim, device=device, dtype=torch.bfloat16)

    def call() -> Callable[[], object]:
        key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        return lambda: functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return Calls([call() for _ in range(copies_of(case))], case.kv_bytes)


def copies_of(case: Case) -> int:
    return num_copies(case.kv_bytes // 4)  # int4 pages are that much smaller, and must not fit in the cache either


def _fill(pages: ExactPages | QuantizedPages) -> None:
    for name, tensor in pages.memory.tensors.items():
        if tensor.dtype == torch.uint8:
            tensor.random_(0, 119)  # as fp8 too: no NaN among them
        elif name.endswith("scales"):
            tensor.uniform_(0.01, 0.02)
        else:
            tensor.normal_()
