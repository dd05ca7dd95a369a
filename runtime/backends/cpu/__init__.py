"""Kernels in C for CPUs, called through `compress.cpu`."""

from compress.models.mixers.gated_delta_net import GatedDeltaNet
from compress.models.mixers.mamba2 import Mamba2
from runtime.backends.backend import (
    BACKENDS,
    AdaptedKernel,
    AttentionKernel,
    Backend,
    LayersKernel,
    MixtureKernel,
    OpsKernel,
)
from runtime.backends.cpu.adapted_linear import CpuAdaptedLinear, adapted_unsupported_reason
from runtime.backends.cpu.latent import make_pages
from runtime.backends.cpu.latent_heads import heads_nbytes, heads_unsupported_reason, prepare_heads
from runtime.backends.cpu.layers import (
    CpuOps,
    attention_unsupported_reason,
    layers_unsupported_reason,
    ops_unsupported_reason,
    prepare_attention,
    prepare_layers,
)
from runtime.backends.cpu.linear import CpuLinear
from runtime.backends.cpu.linear_kernels import (
    BLOCKS,
    DENSE,
    FLOATS8,
    INT4,
    INT8,
    PACKED,
    SPARSE,
    TABLES,
    W4A8,
    is_fast,
)
from runtime.backends.cpu.mixture import CpuMixture, mixture_unsupported_reason
from runtime.backends.cpu.sampling import CpuSampling
from runtime.backends.cpu.state_step import (
    delta_unsupported_reason,
    mamba2_unsupported_reason,
    prepare_delta,
    prepare_mamba2,
)
from runtime.backends.cpu.trellis import TRELLIS
from runtime.backends.latent import LatentHeadsKernel
from runtime.backends.state_kernels import StateKernel

STATE_SUMMARY = "compiled, one pass over states"

BACKENDS.register(order=40)(
    Backend(
        "cpu",
        "cpu",
        linears=(INT8, INT4, SPARSE, PACKED, BLOCKS, TABLES, FLOATS8, W4A8, TRELLIS),
        dense=(DENSE,),
        is_fast=is_fast,
        ops=OpsKernel("compiled, one pass over each row", ops_unsupported_reason, CpuOps),
        turned=lambda linear, inputs, order, _: linear.turning(order) if isinstance(linear, CpuLinear) else None,
        adapted=AdaptedKernel(adapted_unsupported_reason, CpuAdaptedLinear),
        attention=AttentionKernel(
            "compiled, reads pages as they are", attention_unsupported_reason, make_pages, prepare_attention
        ),
        latent_heads=LatentHeadsKernel(heads_unsupported_reason, prepare_heads, heads_nbytes),
        layers=LayersKernel("all layers in one call", layers_unsupported_reason, prepare_layers, takes_adapters=True),
        mixture=MixtureKernel(
            "rows by expert, all experts in one call", mixture_unsupported_reason, CpuMixture, takes_adapters=True
        ),
        states=(
            StateKernel(GatedDeltaNet, STATE_SUMMARY, delta_unsupported_reason, prepare_delta),
            StateKernel(Mamba2, STATE_SUMMARY, mamba2_unsupported_reason, prepare_mamba2),
        ),
        sampling=CpuSampling(),
    )
)
