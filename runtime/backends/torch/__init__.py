"""Plain torch: computes everything on every device, with PyTorch's own packed products where they are faster."""

from runtime.backends.adapted_linear import AdaptedLinear
from runtime.backends.backend import BACKENDS, AdaptedKernel, AttentionKernel, AttentionStep, Backend, OpsKernel
from runtime.backends.kv_pages import KVCache, make_pages
from runtime.backends.model import Model
from runtime.backends.torch.attention import PagedAttention, StepKeys, StreamingAttention
from runtime.backends.torch.linear import ONEDNN, PLAIN, SPARSE, is_fast
from runtime.backends.torch.ops import TorchOps
from runtime.backends.torch.quantized_linear import INT4PACK, INT8_DYNAMIC, TurnedInputs
from runtime.core.batch import Batch
from runtime.core.memory_plan import MemoryPlan


def prepare_attention(
    model: Model, cache: KVCache, windows: tuple[int | None, ...], memory: MemoryPlan
) -> AttentionStep:
    """Attention over pages that are gathered; with sinks of streams their queries stand at two positions."""
    attention_window = memory.attention_window

    def step(batch: Batch) -> PagedAttention | StreamingAttention:
        keys = StepKeys(cache, batch, cache.place(model, batch.entries))
        if attention_window.window is not None and attention_window.sinks:
            return StreamingAttention(keys, attention_window.sinks, attention_window.window, model.rotary)
        return PagedAttention(keys, windows, model.scores)

    return step


BACKENDS.register(order=50)(
    Backend(
        "torch",
        linears=(INT8_DYNAMIC, INT4PACK),
        dense=(SPARSE, ONEDNN, PLAIN),
        is_fast=is_fast,
        ops=OpsKernel("plain torch", lambda config, target: "", TorchOps),
        turned=lambda linear, inputs, order, target: TurnedInputs(linear, order),
        adapted=AdaptedKernel(lambda linear, places, target: "", AdaptedLinear),
        attention=AttentionKernel("gathers pages", lambda model, memory: "", make_pages, prepare_attention),
        is_fallback=True,
    )
)
