"""docs/checkpoint-format.md is true: its loader reads what this toolkit writes, its examples are what packing gives."""

import re
from pathlib import Path

import pytest
import torch

from compress.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.checkpoint.scale_search import FP8
from compress.checkpoint.weights import Fp8, Int
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.packing import pack_bits

PAGE = Path(__file__).parents[3] / "docs" / "checkpoint-format.md"


@pytest.mark.parametrize("scheme", [Int(4, 64), Int(3, 32, False), Int(5, None), Int(8, 128, False)], ids=str)
def test_the_loader_in_the_page(scheme, dense_folder, pack, tmp_path):
    weights = pack(dense_folder, tmp_path / "packed", lambda module: scheme)
    loader: dict = {}
    exec(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1], loader)
    assert loader["scheme"](tmp_path / "packed") == (scheme.bits, scheme.symmetric)
    for module, weight in weights.items():
        loaded = loader["load_weight"](tmp_path / "packed", module, scheme.bits, scheme.symmetric, torch.bfloat16)
        assert torch.equal(loaded, weight.dequantize(torch.bfloat16))


def test_the_floats_in_the_page():
    codes = torch.tensor([[0x38, 0xB8, 0x7E, 0x01], [0x00, 0x80, 0x40, 0x3C]], dtype=torch.uint8).view(FP8)
    weight = CodedWeight(codes, torch.tensor([[0.5], [0.25]]), Fp8())
    assert weight.dequantize().tolist() == [[0.5, -0.5, 224.0, 0.0009765625], [0.0, 0.0, 0.5, 0.375]]
    stored = COMPRESSED_TENSORS.encode("m", weight, torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        "m.weight": FP8,
        "m.weight_scale": torch.bfloat16,
    }


def test_the_examples_in_the_page():
    three = pack_bits(torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4]]), 3, 1)
    assert three.tolist() == [[0x77FAC688, 0x00000009]]
    codes = torch.tensor([[8, 9, 10, 11, 12, 13, 14, 15], [7, 6, 5, 4, 3, 2, 1, 0]], dtype=torch.uint8)
    scale, zero = torch.tensor([[0.5], [0.25]]), torch.tensor([[3], [7]], dtype=torch.uint8)
    weight = Int(4, None, symmetric=False).weight(codes, scale, zero)
    stored = COMPRESSED_TENSORS.encode("m", weight, torch.bfloat16)
    assert stored["m.weight_packed"].tolist() == [[0xFEDCBA98 - 2**32], [0x01234567]]
    assert stored["m.weight_zero_point"].tolist() == [[0x73]]
    assert weight.dequantize()[0].tolist() == [2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0]
    assert weight.dequantize()[1].tolist() == [0.0, -0.25, -0.5, -0.75, -1.0, -1.25, -1.5, -1.75]
