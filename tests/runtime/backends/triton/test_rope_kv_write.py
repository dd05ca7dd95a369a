"""Head norm, rotary embedding, turn and quantization in one kernel, against the same steps in plain torch: the same
queries and the same bytes in the pages, and nothing else touched."""

import pytest
import torch
from covering import covering
from decoder_configs import decoder_config
from poisoned_memory import poison, poisoned_allocations
from rounding import FEW, assert_same_bits, bits
from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.kv_quant import rotate_heads
from runtime.backends.kv_pages import KVPages, TokenPages
from runtime.backends.torch.ops import TorchOps
from runtime.backends.triton.attention import layer_pages
from runtime.backends.triton.fused_linear import PartialSums, finished

HEADS, KV_HEADS, BLOCK_SIZE, NUM_BLOCKS, EPS = 4, 2, 8, 3, 1e-6
SLOTS = (17, -1, 3, 20, -1)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_pages(scheme: KVCacheScheme, head_dim: int, dtype: torch.dtype, device: torch.device) -> KVPages:
    config = decoder_config(HEADS, KV_HEADS, head_dim, num_layers=2)
    sizes = NUM_BLOCKS, BLOCK_SIZE, dtype, device
    pages = TokenPages(config, scheme, *sizes)
    poison(pages.memory)
    return pages


def by_torch(heads: Tensor, head_norm: Tensor | None, cos: Tensor, sin: Tensor, hadamard: bool) -> Tensor:
    rotated = TorchOps().rotate(heads, head_norm, EPS, cos, sin)
    return rotate_heads(rotated) if hadamard else rotated


def written(qkv: PartialSums, scheme: KVCacheScheme, head_norm, cos, sin, slots) -> tuple[Tensor, KVPages]:
    from runtime.backends.triton.kernels.rope_kv_write import qk_norm_rope_kv_write

    pages = make_pages(scheme, cos.shape[-1], cos.dtype, cos.device)
    with poisoned_allocations():
        query = qk_norm_rope_kv_write(qkv, head_norm, EPS, cos, sin, slots, layer_pages(pages, scheme, 1))
    return query, pages


FORMATS = ["16bit", "fp8", "int8", "k8v4", "int4"]
DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("format", "head_dim", "dtype"), covering(FORMATS, [32, 64, 128, 256], DTYPES), ids=str)
def test_the_same_bytes_as_plain_torch(gpu, format: str, head_dim: int, dtype: torch.dtype) -> None:
    scheme, slots = KVCacheScheme.named(format), torch.tensor(SLOTS, device=gpu)
    normed = head_dim != 64
    heads = numbers(len(SLOTS), HEADS + 2 * KV_HEADS, head_dim, seed=1).to(gpu, dtype)
    heads[0, :, 1] = 40  # an outlier, as keys have them
    heads[2, -1] = 0
    angles = numbers(len(SLOTS), 1, head_dim, seed=2)
    cos, sin = angles.cos().to(gpu, dtype), angles.sin().to(gpu, dtype)
    head_norm = numbers(HEADS + KV_HEADS, head_dim, seed=3).to(gpu, dtype) if normed else None
    rotated = by_torch(heads[:, : HEADS + KV_HEADS].clone(), head_norm, cos, sin, scheme.rotate)
    expected = make_pages(scheme, head_dim, dtype, gpu)
    kept = slots >= 0
    expected.write(1, slots[kept], rotated[kept, HEADS:], heads[kept, HEADS + KV_HEADS :])
    query, pages = written(finished(heads.flatten(1)), scheme, head_norm, cos, sin, slots)
    assert query.dtype == dtype
    if not normed:
        assert_same_bits(query, rotated[:, :HEADS])
    assert torch.allclose(query.double(), rotated[:, :HEADS].double(), rtol=1e-2, atol=2e-2)
    check_pages(pages, expected, slots[kept], 2e-3 if normed else 0)  # of the norm, squares are added in another order


def check_pages(found: KVPages, expected: KVPages, slots: Tensor, apart: float = 0) -> None:
    """The same bytes except a share of all; on a GPU a share of those written to layer 1, and no others."""
    for name, wanted in expected.memory.tensors.items():
        differing = bits(found.memory.tensors[name]) != bits(wanted)
        if wanted.is_cuda:
            written = differing[1].flatten(0, 1)[slots]
            assert written.float().mean() <= FEW + 2 / written.numel(), name
            assert int(differing.sum()) == int(written.sum()), name
        else:
            assert differing.float().mean() <= apart, name


@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_heads_that_are_no_numbers_are_not_hidden(gpu, format: str) -> None:
    scheme, dtype = KVCacheScheme.named(format), torch.bfloat16
    heads = numbers(5, HEADS + 2 * KV_HEADS, 32, seed=1).to(gpu, dtype)
    heads[0, -1, 3], heads[2, -1, 3], heads[3, -1, 3] = float("nan"), float("inf"), float("-inf")
    heads[4] *= 1e30
    cos, sin = torch.ones(5, 1, 32, dtype=dtype, device=gpu), torch.zeros(5, 1, 32, dtype=dtype, device=gpu)
    slots = torch.arange(5, device=gpu)
    expected = make_pages(scheme, 32, dtype, gpu)
    rotated = by_torch(heads[:, : HEADS + KV_HEADS].clone(), None, cos, sin, scheme.rotate)
    expected.write(1, slots, rotated[:, HEADS:], heads[:, HEADS + KV_HEADS :])
    pages = written(finished(heads.flatten(1)), scheme, None, cos, sin, slots)[1]
    check_pages(pages, expected, slots)


@pytest.mark.parametrize("scaled", [False, True])
def test_parts_are_added_up_first(gpu, scaled: bool) -> None:
    from runtime.backends.triton.kernels.norm_act import split_k_reduce

    scheme, dtype, width = KVCacheScheme.named("int4"), torch.bfloat16, (HEADS + 2 * KV_HEADS) * 32
    parts, scales = numbers(3, len(SLOTS), width + 64, seed=1), None
    parts[..., width:] = float("nan")
    if scaled:
        parts, scales = (
            (numbers(2, len(SLOTS), width, seed=2) * 1000).int(),
            (numbers(5, seed=3), numbers(width, seed=4)),
        )
        scales = scales[0].to(gpu) * 1e-3, scales[1].to(gpu, dtype)
    qkv = PartialSums(parts.to(gpu), width, numbers(width, seed=5).to(gpu, dtype), scales)
    angles, slots = numbers(len(SLOTS), 1, 32, seed=6), torch.tensor(SLOTS, device=gpu)
    cos, sin = angles.cos().to(gpu, dtype), angles.sin().to(gpu, dtype)
    found = written(qkv, scheme, None, cos, sin, slots)
    expected = written(finished(split_k_reduce(qkv, dtype)), scheme, None, cos, sin, slots)
    assert_same_bits(found[0], expected[0])
    check_pages(found[1], expected[1], slots[slots >= 0])
