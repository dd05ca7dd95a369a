"""A stored form that this file alone defines goes all the way: planned, rounded, written, verified, read, served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import change_tensors
from runs import compress, foreseen_bytes
from torch import Tensor

from compress.checkpoint.formats import format_for
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scheme import FORMS, register
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Scheme
from compress.checkpoint.weights.base import StoredTensors, Weight, cast_exactly, digest, scale_problems
from compress.checkpoint.weights.packing import num_words, pack_bits, unpack_bits
from compress.checkpoint.writer import export_checkpoint
from compress.common.errors import CheckpointError, SchemeError
from compress.evaluate.scorers import open_scorer
from compress.pipeline.finish import compare_with_report
from compress.stages.quantize import QuantizeStage
from runtime.model.loader import load_model

KEY = "ternary"


@dataclass(frozen=True, slots=True)
class Ternary(Scheme):
    """`W ~ codes * scale` with codes -1, 0 and 1 and one scale per row."""

    suffixes = (".ternary_codes", ".ternary_scale")
    mark = ".ternary_codes"
    bits = 2

    def check(self, shape: tuple[int, int]) -> None:
        if shape[1] % 16:
            raise SchemeError(f"{shape[1]} ternary codes do not fill words", "Leave the layer out")

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        return out_features * (in_features * self.bits + scale_bits)

    def __str__(self) -> str:
        return "ternary"

    def fields(self) -> dict[str, Any]:
        return {"bits": self.bits, KEY: True}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Ternary:
        return cls()

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        rows, words = stored[".ternary_codes"].shape
        return rows, words * 16

    def read(self, stored: StoredTensors) -> TernaryWeight:
        words, scale = stored[".ternary_codes"], stored[".ternary_scale"]
        codes = unpack_bits(words, self.bits, words.shape[1] * 16, 1).to(torch.int8) - 1
        return TernaryWeight(codes, scale, self)

    def round(
        self, weight: Tensor, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None
    ) -> TernaryWeight:
        scale = weight.abs().mean(1, keepdim=True).to(scale_dtype or torch.bfloat16)
        codes = (weight / scale.float()).round_().clamp_(-1, 1).to(torch.int8)
        return TernaryWeight(codes, scale, self)


@dataclass(frozen=True, slots=True)
class TernaryWeight(Weight):
    """`codes` int8 `[O, I]` and `scale [O, 1]`."""

    codes: Tensor
    scale: Tensor
    scheme: Ternary

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return (self.codes.float() * self.scale.float()).to(dtype or torch.float32)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        codes = pack_bits((self.codes + 1).to(torch.uint8), self.scheme.bits, 1)
        return {".ternary_codes": codes, ".ternary_scale": cast_exactly(self.scale, dtype)}

    def problems(self, module: str) -> Iterator[str]:
        if int(self.codes.max()) > 1:
            yield f"{module} has ternary codes above 1"
        yield from scale_problems(module, self.scale)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register(KEY)(Ternary)
    yield
    FORMS.pop(KEY)


@pytest.fixture
def packed(tiny_model, tmp_path) -> Path:
    """A model that the pipeline rounded to ternary weights."""
    return compress(tiny_model("llama"), tmp_path / "packed", QuantizeStage("rtn", Ternary())).out


def test_it_is_written_verified_and_read(packed) -> None:
    report = verify_structure(packed)
    assert report.ok
    assert compare_with_report(packed) == []
    checkpoint = PackedCheckpoint.open(packed)
    assert checkpoint.format == "compress-runtime"
    assert checkpoint.modules
    assert set(checkpoint.schemes.values()) == {Ternary()}
    for module in checkpoint.modules:
        weight = checkpoint.packed_weight(module)
        assert weight.codes.unique().tolist() == [-1, 0, 1]
        assert checkpoint.shape(module) == weight.shape
        assert 8 * checkpoint.weight_bytes(module) == weight.scheme.stored_bits(*weight.shape)
        assert checkpoint.files.shape(f"{module}.ternary_codes") == (weight.shape[0], num_words(weight.shape[1], 2))


@pytest.mark.parametrize(
    ("suffix", "value", "problem"),
    [(".ternary_codes", -1, "has ternary codes above 1"), (".ternary_scale", float("nan"), "1 scales that are not")],
)
def test_its_problems_are_found(packed, suffix, value, problem) -> None:
    module = PackedCheckpoint.open(packed).modules[0]
    change_tensors(packed, lambda tensors: tensors[f"{module}{suffix}"].__setitem__((0, 0), value))
    report = verify_structure(packed)
    assert [each for each in report.problems if module in each and problem in each]
    assert compare_with_report(packed)


def test_a_missing_tensor_is_found(packed) -> None:
    module = PackedCheckpoint.open(packed).modules[0]
    change_tensors(packed, lambda tensors: tensors.pop(f"{module}.ternary_scale"))
    with pytest.raises(CheckpointError, match="ternary_scale"):
        PackedCheckpoint.open(packed).packed_weight(module)
    assert not verify_structure(packed).ok


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_it_is_served_dequantized(packed, tmp_path, kernels) -> None:
    decoder = load_model(packed, device="cpu", dtype="float32", kernels=kernels)
    name = "dequantized" if kernels == "auto" else "reference"
    lines = [line for line in decoder.description if ": ternary, kernel " in line]
    assert lines
    assert all(f"kernel {name} " in line for line in lines)
    assert decoder.nbytes == foreseen_bytes(packed, torch.float32, kernels)
    tokens = torch.randint(10, 4000, (1, 24), generator=torch.Generator().manual_seed(0))
    dense = open_scorer(export_checkpoint(packed, "dense", tmp_path / "dense"), dtype="float32").logits(tokens)
    torch.testing.assert_close(open_scorer(packed, dtype="float32").logits(tokens), dense, rtol=1e-4, atol=1e-4)


def test_formats_of_other_tools_refuse_it(packed, tmp_path) -> None:
    for format in ("compressed-tensors", "gptq", "awq"):
        with pytest.raises(SchemeError, match=f"^.*{format} .*ternary.*--format dense"):
            export_checkpoint(packed, format, tmp_path / format)
    assert format_for({"a": Ternary()}).name == "compress-runtime"


def test_descriptions_name_one_form() -> None:
    assert Scheme.from_dict(Ternary().to_dict()) == Ternary()
    with pytest.raises(SchemeError, match=f"fp8 .*{KEY}"):
        Scheme.from_dict({"bits": 8, "fp8": True, KEY: True})
    FORMS.pop(KEY)
    with pytest.raises(TypeError, match=KEY):
        Scheme.from_dict({"bits": 2, KEY: True})
    register(KEY)(Ternary)


def test_equal_values_have_equal_digests() -> None:
    weight = Ternary().round(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)))
    assert digest(weight) == digest(TernaryWeight(weight.codes.clone(), weight.scale.float(), weight.scheme))
    other = weight.codes.clone()
    other[0, 0] = -other[0, 0] or 1
    assert digest(weight) != digest(TernaryWeight(other, weight.scale, weight.scheme))
