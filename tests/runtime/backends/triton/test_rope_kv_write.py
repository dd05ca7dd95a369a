"""Head norm, rotary embedding, turn and quantization in one kernel, against the same steps in plain torch: queries and
keys as exact, of these the same bytes in the pages, and nothing else touched."""

from dataclasses import dataclass, replace

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
from runtime.backends.torch.ops import TorchOps, rms_norm, rotate
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


FORMATS, HEAD_DIMS = ["16bit", "fp8", "int8", "k8v4", "int4"], [32, 64, 128, 256]
DTYPES = [torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Step:
    """Heads `[T, HEADS + 2 * KV_HEADS, D]` of a step, weights of the norm of queries and keys or None, and angles."""

    heads: Tensor
    head_norm: Tensor | None
    cos: Tensor
    sin: Tensor
    slots: Tensor

    @classmethod
    def random(cls, head_dim: int, dtype: torch.dtype, device: torch.device) -> "Step":
        heads = numbers(len(SLOTS), HEADS + 2 * KV_HEADS, head_dim, seed=1).to(device, dtype)
        heads[0, :, 1] = 40  # an outlier, as keys have them
        heads[2, -1] = 0
        angles = numbers(len(SLOTS), 1, head_dim, seed=2)
        cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
        norm = numbers(HEADS + KV_HEADS, head_dim, seed=3).to(device, dtype) if head_dim != 64 else None
        return cls(heads, norm, cos, sin, torch.tensor(SLOTS, device=device))

    def keys_first(self) -> "Step":
        """The same step with the keys where the first queries are, so that the kernel returns them."""
        count = HEADS + KV_HEADS
        heads = torch.cat((self.heads[:, :count].roll(KV_HEADS, 1), self.heads[:, count:]), 1)
        return replace(
            self, heads=heads, head_norm=None if self.head_norm is None else self.head_norm.roll(KV_HEADS, 0)
        )

    def by_torch(self, hadamard: bool, dtype: torch.dtype) -> Tensor:
        """Queries and keys of plain torch in `dtype`."""
        norm = None if self.head_norm is None else self.head_norm.to(dtype)
        heads = self.heads[:, : HEADS + KV_HEADS].to(dtype, copy=True)
        return by_torch(heads, norm, self.cos.to(dtype), self.sin.to(dtype), hadamard)

    def most_error(self, hadamard: bool) -> Tensor:
        """The most that queries and keys may be off: half a unit in the last place for each rounding."""
        exact, heads = self.by_torch(hadamard, torch.float64), self.heads[:, : HEADS + KV_HEADS].double()
        if self.head_norm is not None:
            heads = rms_norm(heads, self.head_norm.double(), EPS)
        products = rotate(heads.abs(), self.cos.double().abs(), self.sin.double().abs())
        roundings = 2 if self.head_norm is None else 4  # two of the norm, of each product, and of their sum
        found = roundings * products
        if hadamard:
            found = found.sum(-1, keepdim=True) / found.shape[-1] ** 0.5 + exact.abs()
        numbers = torch.finfo(self.heads.dtype)
        return numbers.eps * (found / 2 * 1.01 + numbers.smallest_normal)

    def written(self, scheme: KVCacheScheme) -> tuple[Tensor, KVPages]:
        return written(finished(self.heads.flatten(1)), scheme, self.head_norm, self.cos, self.sin, self.slots)


@pytest.mark.parametrize(("format", "head_dim", "dtype"), covering(["16bit", "int4"], HEAD_DIMS, DTYPES), ids=str)
def test_queries_and_keys_are_as_exact_as_those_of_plain_torch(gpu, format, head_dim, dtype) -> None:
    """Not the same bits: a GPU adds the product with cosines to the other one without rounding it first."""
    step, scheme = Step.random(head_dim, dtype, gpu), KVCacheScheme.named(format)
    queries, keys = step.written(scheme)[0], step.keys_first().written(scheme)[0][:, :KV_HEADS]
    assert queries.dtype == dtype
    exact, of_torch = (step.by_torch(scheme.rotate, each).double() for each in (torch.float64, dtype))
    errors = (torch.cat((queries, keys), 1).double() - exact).abs()
    assert bool((errors <= step.most_error(scheme.rotate)).all())
    assert errors.mean() <= 1.05 * (of_torch - exact).abs().mean()


@pytest.mark.parametrize(("format", "head_dim", "dtype"), covering(FORMATS, HEAD_DIMS, DTYPES), ids=str)
def test_pages_hold_the_bytes_of_keys_and_values(gpu, format: str, head_dim: int, dtype: torch.dtype) -> None:
    step, scheme = Step.random(head_dim, dtype, gpu), KVCacheScheme.named(format)
    kept, keys = step.slots >= 0, step.keys_first().written(scheme)[0][:, :KV_HEADS]
    expected = make_pages(scheme, head_dim, dtype, gpu)
    expected.write(1, step.slots[kept], keys[kept], step.heads[kept, HEADS + KV_HEADS :])
    check_pages(step.written(scheme)[1], expected, step.slots[kept])


def check_pages(found: KVPages, expected: KVPages, slots: Tensor) -> None:
    """The same bytes; of codes and scales on a GPU all but a few of those written to layer 1."""
    for name, wanted in expected.memory.tensors.items():
        differing = bits(found.memory.tensors[name]) != bits(wanted)
        written, is_moved = differing[1].flatten(0, 1)[slots], name in ("keys", "values")
        few = FEW + 2 / written.numel() if wanted.is_cuda and not is_moved else 0
        assert written.float().mean() <= few, name
        assert int(differing.sum()) == int(written.sum()), name


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
