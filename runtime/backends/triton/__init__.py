"""Triton kernels for NVIDIA GPUs. Triton is imported when the first kernel is prepared."""

from runtime.backends.backend import (
    BACKENDS,
    AttentionKernel,
    AttentionStep,
    Backend,
    LayersKernel,
    MixtureKernel,
    OpsKernel,
)
from runtime.backends.kv_pages import KVCache, make_pages
from runtime.backends.model import Model
from runtime.backends.torch.attention import StepKeys
from runtime.backends.triton.attention import TritonAttention, attention_unsupported_reason
from runtime.backends.triton.compilation import TritonCompiler
from runtime.backends.triton.latent import TritonLatentAttention
from runtime.backends.triton.layers import (
    TritonOps,
    TritonSampling,
    layers_unsupported_reason,
    ops_unsupported_reason,
    prepare_layers,
)
from runtime.backends.triton.linear import KERNELS, turned
from runtime.backends.triton.mixture import TritonMixture, mixture_unsupported_reason
from runtime.backends.triton.states import STATE_KERNELS
from runtime.core.batch import Batch
from runtime.core.memory_plan import MemoryPlan


def prepare_attention(
    model: Model, cache: KVCache, windows: tuple[int | None, ...], memory: MemoryPlan
) -> AttentionStep:
    """Attention over pages in the layouts of plain torch, read in place."""
    sinks, scores = memory.attention_window.sinks, model.scores

    def step(batch: Batch) -> TritonAttention | TritonLatentAttention:
        keys = StepKeys(cache, batch, cache.place(model, batch.entries))
        if scores.latents:
            return TritonLatentAttention(keys, windows, scores)
        return TritonAttention(keys, windows, scores, sinks, model.rotary if sinks else None)

    return step


BACKENDS.register(order=30)(
    Backend(
        "triton",
        "cuda",
        linears=KERNELS,
        turned=turned,
        ops=OpsKernel("one launch for each step over rows", ops_unsupported_reason, TritonOps),
        mixture=MixtureKernel("grouped products over all experts", mixture_unsupported_reason, TritonMixture),
        attention=AttentionKernel(
            "reads pages as they are", attention_unsupported_reason, make_pages, prepare_attention
        ),
        states=STATE_KERNELS,
        layers=LayersKernel("fused kernels between products", layers_unsupported_reason, prepare_layers, records=True),
        fused_sampling=TritonSampling(),
        compiler=TritonCompiler(),
    )
)
