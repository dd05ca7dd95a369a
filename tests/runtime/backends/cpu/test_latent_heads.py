"""Packed weights between latents and heads: products from both sides against float64, and models that are served so."""

from pathlib import Path

import pytest
import torch
from covering import covering
from runs import foreseen_bytes
from tiny_configs import VARIANTS
from tiny_models import pack_model, random_weight, save_tiny_model

from compress.checkpoint.weights import BlockFp8, Int
from compress.cpu.binding import best_instruction_set, library, set_threads
from runtime.backends.base import Target
from runtime.backends.cpu.latent_heads import CpuLatentHeads, heads_nbytes, heads_unsupported_reason
from runtime.backends.latent import LatentShape
from runtime.model.loader import load_model
from runtime.model.scoring import score

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
SETS = range(best_instruction_set() + 1)
SCHEMES = [Int(4, 32), Int(3, None, False), Int(8, 64), Int(4, 96, False)]
SHAPES = [LatentShape(5, 12, 7, 192), LatentShape(2, 40, 33, 192)]
TARGET = Target(torch.device("cpu"), torch.bfloat16)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(
    ("scheme", "shape", "rows", "instruction_set"), covering(SCHEMES, SHAPES, [1, 17, 40], SETS), ids=str
)
def test_products_against_float64(scheme: Int, shape: LatentShape, rows: int, instruction_set: int) -> None:
    weight = random_weight((shape.heads * (shape.own + shape.value_dim), shape.rank), scheme)
    heads = CpuLatentHeads(weight, shape, 0.1, instruction_set)
    assert heads.nbytes == heads_nbytes(scheme, *weight.shape)
    exact = weight.dequantize(torch.float64).view(shape.heads, -1, shape.rank)
    key, value = exact.split((shape.own, shape.value_dim), 1)
    query, attended = normal(rows, shape.heads, shape.own + 9), normal(shape.heads, rows, shape.rank, seed=2)
    absorbed, rotated = heads.split(query)
    assert torch.equal(rotated, query[..., shape.own :])
    expected = torch.einsum("nho,hor->hnr", query[..., : shape.own].double(), key)
    assert (absorbed.double() - expected).norm() < 0.004 * expected.norm()
    expected = torch.einsum("hnr,hvr->nhv", attended.double(), value)
    assert (heads.values(attended).double() - expected).norm() < 0.004 * expected.norm()
    dense = heads.unpacked()
    assert torch.equal(torch.cat((dense.key, dense.value), 1), weight.dequantize(torch.bfloat16).view(exact.shape))


def test_rows_and_threads_change_no_bit() -> None:
    shape = SHAPES[0]
    heads = CpuLatentHeads(random_weight((5 * 19, 192), Int(4, 32)), shape, 0.1)
    query, attended = normal(40, 5, 12), normal(5, 40, 192)
    together = heads.split(query)[0], heads.values(attended)
    try:
        set_threads(3)
        assert torch.equal(heads.split(query[38:])[0], together[0][:, 38:])
        assert torch.equal(heads.values(attended[:, 38:]), together[1][38:])
    finally:
        set_threads(0)


def test_what_it_cannot_take_it_refuses() -> None:
    assert not heads_unsupported_reason(Int(4, 32), 512, TARGET)
    refused = [(Int(4, 16), 64), (Int(4, None), 48), (Int(8, None), 544), (BlockFp8(), 512)]
    assert all(heads_unsupported_reason(scheme, rank, TARGET) for scheme, rank in refused)
    assert heads_unsupported_reason(Int(4, 32), 512, Target(torch.device("cpu"), torch.float32))
    with pytest.raises(ValueError, match="set 99"):
        CpuLatentHeads(random_weight((5 * 19, 192), Int(4, 32)), SHAPES[0], 0.1, 99).values(normal(5, 1, 192))


@pytest.mark.full
def test_a_packed_model_keeps_its_expansions_packed(tmp_path: Path) -> None:
    dense = save_tiny_model(tmp_path / "dense", "youtu", **VARIANTS["youtu"])
    pack_model(dense, tmp_path / "packed", lambda module: Int(4, 32))
    loaded = load_model(tmp_path / "packed", dtype="bfloat16")
    assert all(isinstance(layer.attention.latent_heads, CpuLatentHeads) for layer in loaded.layers)
    assert foreseen_bytes(tmp_path / "packed") == loaded.nbytes
    tokens = torch.randint(0, 112, (2, 40), generator=torch.Generator().manual_seed(3))
    expected = score(load_model(tmp_path / "packed", dtype="float64"), tokens)
    found, others = (
        score(load_model(tmp_path / "packed", dtype="bfloat16", kernels=kernels), tokens)
        for kernels in ("auto", "reference")
    )
    errors = [float((each.double() - expected).norm() / expected.norm()) for each in (found, others)]
    assert errors[0] < max(1.5 * errors[1], 0.02)
