"""HQQ through the whole pipeline."""

from __future__ import annotations

from pathlib import Path

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scheme import Scheme
from compress.methods.hqq import quantize_hqq
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import RunResult, run
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.quantize import QuantizeStage

CALIBRATION = CalibrationOptions(samples=4, length=64)


def compress(model: Path, out: Path, *stages, **options) -> RunResult:
    recipe = Recipe(tuple(stages), CALIBRATION)
    return run(prepare(RunRequest(model, str(model), recipe, out, measure=False, **options)), quiet=True)


def test_hqq_needs_no_calibration_and_writes_its_codes(tiny_model, tmp_path: Path) -> None:
    model, scheme = tiny_model(), Scheme(3, 64, symmetric=False)
    stage = QuantizeStage("hqq", scheme)
    assert not stage.needs_calibration
    result = compress(model, tmp_path / "out", stage)
    assert {linear["method"] for block in result.report["blocks"] for linear in block["linears"]} == {"hqq"}
    packed, source = PackedCheckpoint.open(tmp_path / "out"), PackedCheckpoint.open(model)
    name = "model.layers.1.mlp.down_proj"
    expected = quantize_hqq(source.tensor(f"{name}.weight").float(), scheme)
    assert packed.weight(name).codes.equal(expected.codes)
    assert packed.weight(name).zero.equal(expected.zero)
