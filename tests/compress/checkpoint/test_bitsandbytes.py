"""Checkpoints of bitsandbytes: NF4, FP4, double quantization and LLM.int8(), with the numbers of that library."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import runs
import torch
from bitsandbytes_files import CASES, pack_4bit, pack_int8, pack_model_as
from folders import change_tensors, private_copy
from tiny_models import save_tiny_model

from compress.checkpoint.formats.base import CONTAINERS
from compress.checkpoint.formats.bitsandbytes import BITSANDBYTES, STATES
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Bnb4, Int, Scheme
from compress.checkpoint.weights.base import StoredTensors, digest
from compress.checkpoint.weights.forms import BNB_TABLES
from compress.checkpoint.writer import export_checkpoint
from compress.common.errors import CheckpointError, SchemeError
from compress.cpu.binding import library
from compress.stages.quantize import QuantizeStage
from runtime.model.loader import load_model
from runtime.model.scoring import score

TOKENS = torch.randint(0, 112, (2, 21), generator=torch.Generator().manual_seed(5))
SIZES = {"hidden_size": 128, "intermediate_size": 192}
MODULE = "model.layers.0.mlp.up_proj"


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()


@dataclass(frozen=True)
class Headers:
    tensors: dict[str, torch.Tensor]

    def __contains__(self, name: object) -> bool:
        return str(name).removeprefix(MODULE) in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name.removeprefix(MODULE)].shape)

    def tensor_nbytes(self, name: str) -> int:
        return self.tensors[name.removeprefix(MODULE)].nbytes


def decoded(tensors: dict[str, torch.Tensor], scheme: Scheme):
    def get(name: str) -> torch.Tensor:
        suffix = name.removeprefix(MODULE)
        if suffix not in tensors:
            raise CheckpointError(f"no {suffix}")
        return tensors[suffix]

    return BITSANDBYTES.decode(MODULE, get, scheme.found(MODULE, Headers(tensors)))


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    dense = save_tiny_model(tmp_path / "dense", dtype=torch.bfloat16, vocab_size=8192, **SIZES)
    return pack_model_as(request.param, dense, tmp_path / "source")


every_case = pytest.mark.parametrize("source", CASES, indirect=True)


@pytest.mark.parametrize("kind", BNB_TABLES)
@pytest.mark.parametrize("block", [32, 64, 128, 4096])
def test_codes_are_those_of_the_first_half_of_a_byte_first(kind: str, block: int) -> None:
    table, scales = torch.tensor(BNB_TABLES[kind]), torch.rand(8192 // block * 2) + 0.5
    codes = torch.arange(2 * 8192).remainder(16).to(torch.uint8)
    tensors = pack_4bit(torch.randn(2, 8192), kind, block)
    tensors |= {".weight": codes[::2] << 4 | codes[1::2], ".weight.absmax": scales}
    weight = decoded(tensors, Bnb4(kind))
    assert weight.scheme == Bnb4(kind, block)
    expected = table[codes.int()].view(-1, block) * scales.unsqueeze(1)
    assert torch.equal(weight.dequantize(), expected.view(2, 8192))


@pytest.mark.parametrize("storage", [torch.int8, torch.bfloat16, torch.float16, torch.float32])
def test_bytes_of_codes_may_be_stored_as_another_dtype(storage: torch.dtype) -> None:
    """Training with FSDP asks for the dtype of the other parameters (`bnb_4bit_quant_storage`)."""
    tensors = pack_4bit(numbers(6, 64))
    expected = decoded(tensors, Bnb4("nf4"))
    stored = tensors[".weight"].flatten().view(storage).unsqueeze(1)
    found = decoded(tensors | {".weight": stored}, Bnb4("nf4"))
    assert found.scheme == Bnb4("nf4", 64)
    assert torch.equal(found.dequantize(), expected.dequantize())


def test_scales_of_scales() -> None:
    """600 blocks of scales are three of 256 at most, the last one shorter; the offset is added at last."""
    tensors = pack_4bit(numbers(600, 64), is_nested=True)
    outer, table = tensors[".weight.nested_absmax"], tensors[".weight.nested_quant_map"]
    offset = json.loads(bytes(tensors[STATES["nf4"]].tolist()))["nested_offset"]
    found = decoded(tensors, Bnb4("nf4")).scales.flatten()
    for block in (0, 255, 256, 511, 512, 599):
        code = int(tensors[".weight.absmax"][block])
        assert found[block] == table[code] * outer[block // 256] + torch.tensor(offset)


def test_8_bit_integers() -> None:
    tensors = pack_int8(numbers(6, 64))
    weight = decoded(tensors, Int(8, None))
    expected = tensors[".weight"].double() * tensors[".SCB"].double().unsqueeze(1) / 127
    torch.testing.assert_close(weight.dequantize(torch.float64), expected, rtol=2**-23, atol=0)


needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="no bitsandbytes")


@needs_bitsandbytes
@pytest.mark.parametrize("kind", BNB_TABLES)
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_4_bit_numbers_are_those_of_the_library(kind: str, is_nested: bool, block: int, dtype: torch.dtype) -> None:
    """Bit for bit."""
    from bitsandbytes import functional

    dense = numbers(384, 512).to(dtype)
    packed, state = functional.quantize_4bit(
        dense, blocksize=block, compress_statistics=is_nested, quant_type=kind, quant_storage=torch.uint8
    )
    tensors = {f".weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()} | {".weight": packed}
    found = decoded(tensors, Bnb4(kind)).dequantize(dtype)
    assert torch.equal(found, functional.dequantize_4bit(packed, state))


@needs_bitsandbytes
def test_8_bit_numbers_are_those_of_the_library() -> None:
    """The library rounds twice, products with the magnitude and with 1 / 127: an ulp of float32 each."""
    from bitsandbytes import functional

    codes, largest, _ = functional.int8_vectorwise_quant(numbers(96, 256).half())
    found = decoded({".weight": codes, ".SCB": largest}, Int(8, None)).dequantize()
    torch.testing.assert_close(found, functional.int8_vectorwise_dequant(codes, largest), rtol=2**-22, atol=0)


@every_case
def test_it_is_served_as_its_values_are(source: Path, tmp_path: Path) -> None:
    packed = PackedCheckpoint.open(source)
    assert len(packed.modules) == 2 * 7
    assert verify_structure(source).ok
    assert export_checkpoint(source, "dense", tmp_path / "exported").is_dir()
    values = {f"{module}.weight": packed.values(module, torch.float32) for module in packed.modules}
    dense = private_copy(tmp_path / "dense", tmp_path / "values")
    change_tensors(
        dense, lambda tensors: tensors.update({name: each.float() for name, each in tensors.items()} | values)
    )
    expected = score(load_model(dense, dtype="float64"), TOKENS)
    torch.testing.assert_close(score(load_model(source, dtype="float64"), TOKENS), expected, rtol=0, atol=1e-3)
    served = load_model(source, dtype="float32")
    torch.testing.assert_close(score(served, TOKENS).double(), expected, rtol=0, atol=1e-2)
    kernels = [line for line in served.description if "_proj" in line]
    assert library() is None or not any("dequantized" in line.partition(";")[0] for line in kernels)


@pytest.mark.parametrize("source", ["nf4 twice", "fp4 twice"], indirect=True)
def test_the_memory_is_known_beforehand(source: Path) -> None:
    """Scales that bfloat16 does not represent exactly."""
    assert load_model(source, dtype="bfloat16").nbytes == runs.foreseen_bytes(source, torch.bfloat16)


@every_case
def test_layers_that_are_left_out_keep_their_codes(source: Path, tmp_path: Path) -> None:
    runs.compress(source, tmp_path / "out", QuantizeStage("rtn", Int(4, 32), ignore=("*.mlp.*",)))
    before, after = PackedCheckpoint.open(source), PackedCheckpoint.open(tmp_path / "out")
    for module in before.modules:
        kept = ".mlp." in module
        assert (digest(after.packed_weight(module)) == digest(before.packed_weight(module))) == kept
    assert verify_structure(tmp_path / "out").ok


def test_the_own_layout_of_blocks() -> None:
    weight = decoded(pack_4bit(numbers(6, 256), "fp4", 128), Bnb4("fp4"))
    stored = CONTAINERS.find("compress-runtime").encode(MODULE, weight, torch.float32)
    again = weight.scheme.read(StoredTensors(MODULE, stored.__getitem__))
    assert torch.equal(again.dequantize(), weight.dequantize())
    assert Scheme.from_dict(weight.scheme.to_dict()) == weight.scheme


@pytest.mark.parametrize(
    ("case", "suffix", "value", "problem"),
    [
        ("nf4", ".weight.quant_map", torch.linspace(-1, 1, 16), "another table"),
        ("nf4", ".weight.absmax", torch.ones(100), "has 100 scales for"),
        ("nf4 twice", ".weight.nested_absmax", torch.ones(9), "has 9 outer scales"),
        ("nf4", STATES["nf4"], torch.tensor(list(b'{"quant_type": "fp4"}'), dtype=torch.uint8), "not that of nf4"),
        ("nf4", STATES["nf4"], torch.zeros(9, dtype=torch.uint8), "contradict each other"),
        ("int8", ".weight_format", torch.tensor(2, dtype=torch.uint8), "row by row"),
        ("int8", ".SCB", torch.ones(3), "a scale per row"),
    ],
)
def test_contradictions_are_refused(case: str, suffix: str, value: torch.Tensor, problem: str, tmp_path: Path) -> None:
    dense = save_tiny_model(tmp_path / "dense", dtype=torch.bfloat16, num_hidden_layers=1, **SIZES)
    source = pack_model_as(case, dense, tmp_path / "source")
    change_tensors(source, lambda tensors: tensors.update({MODULE + suffix: value}))
    with pytest.raises(CheckpointError, match=problem):
        PackedCheckpoint.open(source).packed_weight(MODULE)


def test_blocks_that_cross_the_ends_of_rows_are_refused() -> None:
    with pytest.raises(SchemeError, match="groups of 64 do not divide 96"):
        decoded(pack_4bit(numbers(6, 96)), Bnb4("nf4"))


def test_it_is_not_written() -> None:
    for refused in (
        lambda: BITSANDBYTES.check(Bnb4(), (64, 64)),
        lambda: BITSANDBYTES.encode(MODULE, None, torch.float32),
        lambda: BITSANDBYTES.quantization_config({}, ()),
    ):
        with pytest.raises(SchemeError, match="are read, not written"):
            refused()
