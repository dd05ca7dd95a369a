"""Every block type against the `gguf` package, bit for bit, on random bytes."""

import numpy as np
import pytest
import torch

from compress.checkpoint.gguf import types
from compress.checkpoint.gguf.types import UNREAD, dequantize, find_type
from compress.checkpoint.gguf.types.base import BLOCK_TYPES, BlockType, join_planes, planes
from compress.checkpoint.weights import Int
from compress.common.errors import CheckpointError

gguf = pytest.importorskip("gguf")

CODES = {kind.code for kind in BLOCK_TYPES.values()}
BLOCKED = [kind for kind in BLOCK_TYPES.values() if kind.name != "f64"]


def random_rows(kind: BlockType, seed: int, rows: int = 40, blocks: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, blocks * kind.nbytes), dtype=torch.uint8, generator=generator)


def same_bits(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    """Whether all values are equal bit for bit, any NaN being equal to any other."""
    other = torch.from_numpy(np.ascontiguousarray(theirs, dtype=np.float32))
    both_nan = ours.isnan() & other.isnan()
    return bool(((ours.view(torch.int32) == other.view(torch.int32)) | both_nan).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", BLOCKED, ids=lambda kind: kind.name)
def test_random_bytes_have_the_values_that_gguf_gives_them(kind):
    rows = random_rows(kind, kind.code)
    stored = gguf.GGMLQuantizationType(kind.code)
    numpy_rows = rows.numpy()
    if kind.size == 1 and kind.name != "bf16":
        numpy_rows = numpy_rows.view(np.float32 if kind.name == "f32" else np.float16)
    assert same_bits(dequantize(rows, kind), gguf.quants.dequantize(numpy_rows, stored))


@pytest.mark.parametrize("kind", BLOCKED, ids=lambda kind: kind.name)
def test_names_and_sizes_are_those_of_gguf(kind):
    stored = gguf.GGMLQuantizationType(kind.code)
    assert (stored.name.lower(), gguf.GGML_QUANT_SIZES[stored]) == (kind.name, (kind.size, kind.nbytes))


@pytest.mark.parametrize(
    "kind", [kind for kind in BLOCK_TYPES.values() if isinstance(kind.scheme, Int)], ids=lambda kind: kind.name
)
def test_integer_codes_fit_their_width_and_scales_their_groups(kind):
    weight = kind.read(random_rows(kind, 1))
    assert int(weight.qweight.max()) <= weight.scheme.max_code
    assert weight.shape[1] // weight.scales.shape[1] == kind.scheme.group_size


@pytest.mark.parametrize(("run", "width"), [(16, 4), (32, 2), (8, 4), (1, 1), (64, 4), (32, 1)])
def test_joining_planes_undoes_taking_them_apart(run, width):
    data = torch.randint(0, 256, (7, 128), dtype=torch.uint8)
    assert torch.equal(join_planes(planes(data, run, width), run, width), data)


def test_every_type_that_gguf_dequantizes_is_read_or_named_in_the_refusal():
    known = {int(kind) for kind in gguf.quants._type_traits}
    assert known - CODES <= set(UNREAD)
    with pytest.raises(CheckpointError, match=r"q1_0 \(number 41\)"):
        find_type(41)
    with pytest.raises(CheckpointError, match="number 99"):
        find_type(99)


def test_vector_codebooks_are_refused_without_the_package(monkeypatch):
    assert find_type(16).name == "iq2_xxs"
    monkeypatch.setattr(types, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="type iq2_xxs are read by the package gguf, which is missing") as refusal:
        find_type(16)
    assert refusal.value.remedy == "pip install 'compress-runtime[gguf]'"
    assert find_type(20).name == "iq4_nl"


def test_tables_are_disjoint():
    assert not set(UNREAD) & CODES
    assert len(CODES) == len(BLOCK_TYPES)
