"""Kernels in C for CPUs, called through `compress.cpu`."""

from runtime.backends.base import AttentionKernel, AttentionStep, Backend, LayersKernel, Model, OpsKernel, register
from runtime.backends.cpu.attention import CpuAttention
from runtime.backends.cpu.kv_pages import CpuPages, make_pages, pages_unsupported_reason
from runtime.backends.cpu.layers import CpuLayers, CpuOps, layers_unsupported_reason, ops_unsupported_reason
from runtime.backends.cpu.linear import DENSE, INT8, PACKED, SPARSE, W4A8, is_fast
from runtime.backends.cpu.sampling import CpuSampling
from runtime.backends.kv_pages import KVCache
from runtime.core.batch import Batch
from runtime.core.memory_plan import MemoryPlan


def attention_unsupported_reason(model: Model, memory: MemoryPlan) -> str:
    """Why compiled attention cannot serve a model; "" when it can."""
    if memory.attention_window.window is not None and memory.attention_window.sinks:
        return "keeps no sinks of streams"
    reason = pages_unsupported_reason(model.config, memory.kv_cache, memory.block_size, model.dtype, model.device)
    return reason or ("" if isinstance(model.ops, CpuOps) else "goes with compiled ops between linears")


def prepare_attention(
    model: Model, cache: KVCache, windows: tuple[int | None, ...], memory: MemoryPlan
) -> AttentionStep:
    """Compiled attention over pages in place."""
    pages, rotate = cache.pages, cache.scheme.rotate
    if not isinstance(pages, CpuPages):
        raise TypeError(f"{type(pages).__name__} are not the pages of compiled attention")

    def step(batch: Batch) -> CpuAttention:
        return CpuAttention(pages, batch, windows, rotate)

    return step


def prepare_layers(model: Model, cache: KVCache, windows: tuple[int | None, ...]) -> CpuLayers:
    """All layers in one call."""
    if not isinstance(cache.pages, CpuPages):
        raise TypeError(f"{type(cache.pages).__name__} are not the pages of compiled layers")
    return CpuLayers(model, cache.pages, windows)


register(
    Backend(
        "cpu",
        "cpu",
        linears=(INT8, SPARSE, PACKED, W4A8),
        dense=(DENSE,),
        is_fast=is_fast,
        ops=OpsKernel("compiled, one pass over each row", ops_unsupported_reason, CpuOps),
        attention=AttentionKernel(
            "compiled, reads pages as they are", attention_unsupported_reason, make_pages, prepare_attention
        ),
        layers=LayersKernel("all layers in one call", layers_unsupported_reason, prepare_layers),
        sampling=CpuSampling(),
    )
)
