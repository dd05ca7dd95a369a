"""Attention of the package flashinfer-python (extra `flashinfer`) over 16-bit pages, in steps that are not captured."""

from runtime.backends.backend import BACKENDS, AttentionKernel, Backend, LayersKernel
from runtime.backends.flashinfer.attention import prepare_attention, unsupported_reason, verdict
from runtime.backends.kv_pages import make_pages
from runtime.backends.triton.layers import layers_unsupported_reason, prepare_layers

BACKENDS.register(order=20)(
    Backend(
        "flashinfer",
        "cuda",
        attention=AttentionKernel(
            "prompts by flashinfer, captured steps by Triton",
            unsupported_reason,
            make_pages,
            prepare_attention,
            verdict=verdict,
        ),
        layers=LayersKernel(
            "fused kernels between products",
            layers_unsupported_reason,
            prepare_layers,
            records=True,
        ),
    )
)
