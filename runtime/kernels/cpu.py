"""What this CPU computes at full speed. Everything else is refused or avoided: slow paths are never silent."""

from __future__ import annotations

import torch

from compress.native.binding import INSTRUCTION_SETS, best_instruction_set


def is_fast(dtype: torch.dtype) -> bool:
    """Whether matrix products in this dtype have a vectorized path; 16-bit ones are over ten times slower without."""
    return has_fast_torch_products(dtype) or (dtype == torch.bfloat16 and has_native_vectors())


def has_native_vectors() -> bool:
    """Whether the compiled kernels have vectors for this CPU."""
    return best_instruction_set() > INSTRUCTION_SETS.index("scalar")


def has_matrix_tiles() -> bool:
    """Whether this CPU multiplies tiles of bfloat16 numbers (AMX), as oneDNN does and the compiled kernels do not."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def has_fast_torch_products(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies matrices of this dtype in vectors, be it in a wider one."""
    if dtype in (torch.float32, torch.float64):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    check = operators._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else operators._is_mkldnn_fp16_supported
    return bool(check())


def has_vector_nibbles() -> bool:
    """Whether the packed 4-bit product is vectorized (AVX2 or AVX-512)."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def has_byte_products() -> bool:
    """Whether one instruction sums byte products in 32 bits (VNNI), so that nothing saturates on the way."""
    return torch.backends.mkldnn.is_available() and bool(torch.cpu._is_vnni_supported())
