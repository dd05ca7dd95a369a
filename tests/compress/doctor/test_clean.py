"""Whole checkpoints give no findings: shipped, freshly packed, and exported."""

from pathlib import Path

import pytest
import runs

from compress.checkpoint.gguf.export import export_gguf
from compress.checkpoint.weights import Fp8, Int, Nvfp4
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import BUNDLED, bundled_path, demo_model_path, draft_model_path
from compress.doctor.examine import examine
from compress.stages.quantize import QuantizeStage

STAGES = {
    "gptq": QuantizeStage("gptq", Int(4, 32)),
    "awq": QuantizeStage("awq", Int(4, 32)),
    "hqq": QuantizeStage("hqq", Int(4, 32, symmetric=False)),
    "2 bits": QuantizeStage("rtn", Int(2, 32)),
    "8 bits per channel": QuantizeStage("rtn", Int(8, None)),
    "nvfp4": QuantizeStage("rtn", Nvfp4()),
    "fp8": QuantizeStage("rtn", Fp8()),
}


@pytest.mark.parametrize("folder", [*map(bundled_path, BUNDLED), draft_model_path()], ids=lambda path: path.name)
def test_shipped_models_are_clean(folder: Path) -> None:
    found = examine(folder)
    assert not found.findings
    assert found.facts["container"] == "dense"


def test_a_packed_model_is_clean_and_says_what_it_is(packed_demo: Path) -> None:
    found = examine(packed_demo, against=demo_model_path())
    assert not found.findings
    assert found.facts["weight forms"] == "42 x w4a16 g32 sym"
    assert found.facts["loaded by"] == "this runtime, transformers, vLLM"
    assert found.facts["not known of"] == "SGLang"
    assert "w4a16 g32 sym 0.0" in found.facts["median relative error"]


@pytest.mark.full
@pytest.mark.parametrize("name", STAGES)
def test_other_methods_and_forms_are_clean(tmp_path: Path, name: str) -> None:
    runs.compress(demo_model_path(), tmp_path / "packed", STAGES[name])
    assert not examine(tmp_path / "packed").findings


@pytest.mark.full
@pytest.mark.parametrize("format", ["gptq", "awq", "dense", "compress-runtime"])
def test_exports_are_clean(packed_demo: Path, tmp_path: Path, format: str) -> None:
    export_checkpoint(packed_demo, format, tmp_path / "out")
    found = examine(tmp_path / "out")
    assert not found.findings
    assert found.facts["container"] == format


@pytest.mark.full
@pytest.mark.parametrize("kind", ["q8_0", "q4_k", "q2_k"])
def test_gguf_files_are_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    export_gguf(demo_model_path(), tmp_path / "model.gguf", kind)
    found = examine(tmp_path / "model.gguf")
    assert not found.findings
    assert found.facts["container"] == "gguf"
