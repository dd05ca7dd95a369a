"""Weights whose inputs are rotated as they come, from a checkpoint to a served one."""

from functools import partial
from pathlib import Path

import pytest
import runs
import torch
from runs import compared_with
from torch import nn

from calibration.statistics import InputStatistics
from compress.checkpoint.dequantized import open_source
from compress.checkpoint.gguf.export import export_gguf
from compress.checkpoint.gguf.folder import folder_of
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scale_search import round_tokens
from compress.checkpoint.weights import Activations, Int
from compress.checkpoint.weights.rotated_inputs import RotatedInputs, rotate
from compress.common.cli import demo_model_path
from compress.common.errors import SchemeError
from compress.methods.shared.hessian import HessianCache
from compress.pipeline.block import LoadedBlock
from compress.pipeline.smoothing import activations_quantized
from compress.recipe import CalibrationOptions
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate import RotateStage
from compress.stages.rotate_inputs import RotateInputsStage

W4A4 = Int(4, 64, activations=Activations.INT4)
DOWN = RotateInputsStage(targets=("down_proj",))
MODULE = "model.layers.0.mlp.down_proj"
compress = partial(runs.compress, calibration=CalibrationOptions(samples=16, length=256), dtype="float32")


def test_statistics_are_those_of_rotated_inputs() -> None:
    inputs, scale = torch.randn(300, 96, generator=torch.Generator().manual_seed(0)), torch.linspace(0.5, 2, 96)
    statistics, rotated = (InputStatistics(96, sample_rows=16) for _ in range(2))
    statistics.update(inputs)
    rotated.update(rotate(inputs / scale, 32))
    found = HessianCache(statistics, scale).rotated(32)
    torch.testing.assert_close(found.hessian, rotated.hessian)
    torch.testing.assert_close(found.sample(8), rotated.sample(8).float())
    torch.testing.assert_close(found.mean_square, rotated.mean_square, rtol=0.3, atol=0)
    cache = HessianCache(statistics, scale)
    assert cache.rotated(32) is cache.rotated(32)


def test_calibration_rounds_rotated_inputs() -> None:
    linear = nn.Linear(64, 8, bias=False)
    block = LoadedBlock("block", nn.ModuleDict({"linear": linear}))
    x, scheme = torch.randn(5, 64), RotatedInputs(W4A4, 32)
    with activations_quantized(block, {"linear": scheme}):
        y = linear(x)
    expected = round_tokens(rotate(x, 32), Activations.INT4) @ rotate(linear.weight, 32).T
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def test_a_run_writes_exports_and_keeps_the_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scheme = Int(4, 64)
    assert compress(demo_model_path(), tmp_path / "packed", QuantizeStage("rtn", scheme), DOWN).structure.ok
    packed = PackedCheckpoint.open(tmp_path / "packed")
    rotated = {name for name, found in packed.schemes.items() if found == RotatedInputs(scheme, 128)}
    assert {name.rpartition(".")[2] for name in rotated} == {"down_proj"}
    runs.assert_served_as_exported(tmp_path / "packed", tmp_path / "dense")
    files, _ = open_source(tmp_path / "packed")
    assert files[f"{MODULE}.weight"].scheme == packed.schemes[MODULE]
    with pytest.raises(SchemeError, match="no type of GGUF holds w4a16 g64 sym rotated h128"):
        export_gguf(tmp_path / "packed", tmp_path / "a.gguf")
    export_gguf(tmp_path / "packed", tmp_path / "b.gguf", "q8_0")
    found = PackedCheckpoint.open(folder_of(tmp_path / "b.gguf")).values(MODULE, torch.float32)
    expected = packed.values(MODULE, torch.float32)
    assert float((found - expected).abs().max()) < 0.01 * float(expected.abs().max())


@pytest.mark.full
@pytest.mark.parametrize("method", ["rtn", "gptq", "gptaq", "awq", "hqq", "smoothquant"])
def test_rotated_inputs_of_4_bits_are_nearer_to_the_dense_model(method: str, tmp_path: Path) -> None:
    kl = {}
    for name, stages in (("plain", ()), ("rotated", (DOWN,))):
        compress(demo_model_path(), tmp_path / name, RotateStage(), QuantizeStage(method, W4A4), *stages)
        kl[name] = compared_with(demo_model_path(), tmp_path / name, tokens=4096).kl_mean
    assert kl["rotated"] < 0.85 * kl["plain"]
