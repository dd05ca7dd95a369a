"""Bit packing against the published golden vectors, a slow per-element packer and compressed-tensors itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from compress.checkpoint.formats.awq import deinterleave_awq, interleave_awq
from compress.checkpoint.weights.packing import num_words, pack_bits, unpack_bits
from compress.common.errors import SchemeError


def words(*values: int) -> list[int]:
    return [value - 2**32 if value >= 2**31 else value for value in values]


def slow_pack(row: list[int], bits: int) -> list[int]:
    """One element at a time through a Python integer: the definition itself."""
    stream = sum(code << (index * bits) for index, code in enumerate(row))
    return words(*[(stream >> (32 * word)) & 0xFFFFFFFF for word in range(-(-len(row) * bits // 32))])


@pytest.mark.parametrize(
    ("bits", "signed", "expected"),
    [
        (4, range(-8, 0), (0x76543210,)),
        (4, range(8), (0xFEDCBA98,)),
        (8, (-128, -1, 0, 127), (0xFF807F00,)),
        (2, [(i % 4) - 2 for i in range(16)], (0xE4E4E4E4,)),
        (3, [(i % 8) - 4 for i in range(32)], (0x88FAC688, 0xC688FAC6, 0xFAC688FA)),
    ],
)
def test_golden_compressed_tensors(bits, signed, expected):
    codes = torch.tensor([[value + 2 ** (bits - 1) for value in signed]])
    assert pack_bits(codes, bits, 1).tolist() == [words(*expected)]
    assert unpack_bits(pack_bits(codes, bits, 1), bits, codes.shape[1], 1).tolist() == codes.tolist()


def test_golden_zero_point_shape():
    zeros = torch.full((16, 2), 8, dtype=torch.uint8)
    assert pack_bits(zeros, 4, 0).shape == (2, 2)


def test_golden_gptq():
    column = torch.arange(8).view(8, 1)
    assert pack_bits(column, 4, 0).tolist() == [words(0x76543210)]
    three = torch.tensor([(i % 8) for i in range(32)]).view(32, 1)
    assert pack_bits(three, 3, 0).flatten().tolist() == words(0x88FAC688, 0xC688FAC6, 0xFAC688FA)
    assert pack_bits(torch.full((1, 8), 7), 4, 1).item() == 0x77777777
    assert pack_bits(torch.full((1, 8), 8), 4, 1).tolist() == [words(0x88888888)]


def test_golden_awq():
    assert pack_bits(interleave_awq(torch.arange(8).view(1, 8)), 4, 1).item() == 0x75316420
    outputs = torch.arange(24).view(1, 24)
    assert torch.equal(deinterleave_awq(interleave_awq(outputs)), outputs)


@examples(60)
@given(bits=st.integers(1, 8), rows=st.integers(1, 5), columns=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_roundtrip_and_definition(bits, rows, columns, seed):
    codes = torch.randint(0, 2**bits, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack_bits(codes, bits, 1)
    assert packed.dtype == torch.int32
    assert packed.shape == (rows, num_words(columns, bits))
    assert packed.tolist() == [slow_pack(row, bits) for row in codes.tolist()]
    assert torch.equal(unpack_bits(packed, bits, columns, 1), codes)
    assert torch.equal(pack_bits(codes.T, bits, 0), packed.T)
    assert torch.equal(unpack_bits(packed.T, bits, columns, 0), codes.T)


@pytest.mark.parametrize("bits", range(2, 9))
def test_equals_the_compressed_tensors_package(bits):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(0, 2**bits, (6, 77), dtype=torch.uint8)
    signed = (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(pack_bits(codes, bits, 1), helpers.pack_to_int32(signed, bits))


def test_refusals():
    with pytest.raises(SchemeError, match=r"16.*4 bits"):
        pack_bits(torch.tensor([[16]]), 4, 1)
    with pytest.raises(SchemeError, match=r"2 words.*1"):
        unpack_bits(torch.zeros(3, 1, dtype=torch.int32), 4, 9, 1)
