"""Which pages hold a runner's keys and values, and why; the attention follows them."""

from __future__ import annotations

from runtime.memory import MemoryPlan
from runtime.model.decoder import Decoder
from runtime.model.ops import TorchOps
from runtime.model.pages import ExactPages, KVPages
from runtime.model.pages_native import NativePages, refuse_pages
from runtime.model.pages_quantized import QuantizedPages


def choose_pages(decoder: Decoder, memory: MemoryPlan) -> tuple[KVPages, str]:
    """Pages of compiled attention where it can serve this runner, else those of plain torch."""
    config, scheme = decoder.config, memory.kv_cache
    refusal = refuse_native(decoder, memory)
    sizes = (memory.num_blocks, memory.block_size, decoder.dtype, decoder.device, memory.num_host_blocks)
    if not refusal:
        return NativePages(config, scheme, *sizes), "compiled, reads pages as they are"
    reason = f"plain torch; compiled attention {refusal}"
    if scheme.is_exact:
        return ExactPages(config, *sizes), reason
    return QuantizedPages(config, scheme, *sizes), reason


def refuse_native(decoder: Decoder, memory: MemoryPlan) -> str:
    """Why compiled attention cannot serve a runner; empty when it can."""
    if memory.reach.window is not None and memory.reach.sinks:
        return "keeps no sinks of streams"
    refusal = refuse_pages(decoder.config, memory.kv_cache, memory.block_size, decoder.dtype, decoder.device)
    if not refusal and isinstance(decoder.ops, TorchOps):
        return "goes with compiled ops between linears"
    return refusal
