"""Packed linears in plain C on CPUs (`compress.cpu`): exact codes, scales and zero points, float32 or int32 sums.

Four kernels over one layout. `native` multiplies by activations as they come, `native_sparse` does so and reads only
what 2:4 sparsity keeps, `native_int8` multiplies by the 8-bit activations that the checkpoint asks for. `native_w4a8`
rounds activations to 8 bits although the checkpoint does not ask for it: faster for many rows, and a little further
from the model, so it serves only the mode `w4a8`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights.integer import IntegerWeight
from compress.cpu.binding import INSTRUCTION_SETS, absence, best_instruction_set
from compress.cpu.linear import INPUT_MULTIPLE, Activations, NativeLinear
from compress.cpu.linear import refuse_sparse as refuse_words
from runtime.backends.base import Kernel, Linear, Target


def prepare(weight: IntegerWeight, bias: Tensor | None, target: Target) -> Linear:
    return NativeLinear(weight, bias)


def prepare_sparse(weight: IntegerWeight, bias: Tensor | None, target: Target) -> Linear:
    return NativeLinear(weight, bias, sparse=True)


def prepare_int8(weight: IntegerWeight, bias: Tensor | None, target: Target) -> Linear:
    return NativeLinear(weight, bias, activations=Activations.INT8_ROW)


def prepare_w4a8(weight: IntegerWeight, bias: Tensor | None, target: Target) -> Linear:
    return NativeLinear(weight, bias, activations=Activations.INT8_GROUP)


def _refuse(scheme: Scheme, in_features: int, target: Target) -> str:
    if target.device.type != "cpu":
        return "runs on CPUs"
    if absence():
        return f"is not there: {absence()}"
    if target.dtype not in (torch.bfloat16, torch.float32):
        return "computes in bfloat16 and float32"
    if (scheme.group_size or in_features) % INPUT_MULTIPLE:
        return f"takes groups that are a multiple of {INPUT_MULTIPLE}"
    return ""


def refuse(scheme: Scheme, in_features: int, target: Target) -> str:
    return "keeps activations in 16 bits" if scheme.activation_bits else _refuse(scheme, in_features, target)


def refuse_int8(scheme: Scheme, in_features: int, target: Target) -> str:
    return _refuse(scheme, in_features, target) if scheme.activation_bits else "needs 8-bit activations"


def refuse_sparse(scheme: Scheme, in_features: int, target: Target) -> str:
    return refuse(scheme, in_features, target) or refuse_words(scheme)


KERNEL = Kernel("native", "packed codes in C, float32 sums: exact weights", refuse, prepare)
SPARSE = Kernel("native_sparse", "kept codes alone in C, float32 sums: exact weights", refuse_sparse, prepare_sparse)
INT8 = Kernel("native_int8", "packed codes in C, 8-bit activations, exact int32 sums", refuse_int8, prepare_int8)
W4A8 = Kernel("native_w4a8", "packed codes in C, activations rounded to 8 bits by groups", refuse, prepare_w4a8)


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
