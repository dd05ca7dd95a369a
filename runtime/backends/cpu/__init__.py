"""Kernels in C for CPUs, called through `compress.cpu`."""

from runtime.backends.base import (
    AttentionKernel,
    Backend,
    DeltaKernel,
    LayersKernel,
    MixtureKernel,
    OpsKernel,
    register,
)
from runtime.backends.cpu.delta_step import CpuDeltaStep, delta_unsupported_reason
from runtime.backends.cpu.kv_pages import make_pages
from runtime.backends.cpu.layers import (
    CpuOps,
    CpuSampling,
    attention_unsupported_reason,
    layers_unsupported_reason,
    ops_unsupported_reason,
    prepare_attention,
    prepare_layers,
)
from runtime.backends.cpu.linear import DENSE, INT8, MXFP4, PACKED, SPARSE, W4A8, is_fast
from runtime.backends.cpu.mixture import mixture_unsupported_reason, prepare_mixture

register(
    Backend(
        "cpu",
        "cpu",
        linears=(INT8, SPARSE, PACKED, MXFP4, W4A8),
        dense=(DENSE,),
        is_fast=is_fast,
        ops=OpsKernel("compiled, one pass over each row", ops_unsupported_reason, CpuOps),
        attention=AttentionKernel(
            "compiled, reads pages as they are", attention_unsupported_reason, make_pages, prepare_attention
        ),
        layers=LayersKernel("all layers in one call", layers_unsupported_reason, prepare_layers),
        mixture=MixtureKernel("rows by expert, all experts in one call", mixture_unsupported_reason, prepare_mixture),
        delta=DeltaKernel("compiled, one pass over states", delta_unsupported_reason, CpuDeltaStep),
        sampling=CpuSampling(),
    )
)
