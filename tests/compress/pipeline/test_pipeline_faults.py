"""Faults in a run: one clear error, nothing half-written, and a shortage of memory is not an error."""

import errno
import os
from pathlib import Path

import pytest
import runs
import torch
from folders import change_tensors, private_copy

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.common.errors import CheckpointError, DataError, NumericsError, ToolkitError, is_out_of_memory
from compress.evaluate.kv_cache import measured_windows
from compress.pipeline.memory import with_smaller_batches
from compress.pipeline.run import RunResult
from compress.recipe import CalibrationOptions
from compress.stages.quantize import QuantizeStage


def compress(model: Path, out: Path, method: str = "gptq", **options) -> RunResult:
    calibration = CalibrationOptions(samples=4, length=48)
    return runs.compress(model, out, QuantizeStage(method, Int(4, 64)), calibration=calibration, **options)


@pytest.fixture
def source(tiny_model, tmp_path) -> Path:
    return private_copy(tiny_model(), tmp_path / "source")


def damage(source: Path, name: str, change) -> None:
    change_tensors(source, lambda tensors: change(tensors[name]))


def assert_nothing_written(tmp_path: Path) -> None:
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_nan_weights_are_named_before_anything_is_written(source, tmp_path, method, name) -> None:
    damage(source, name, lambda tensor: tensor.view(-1)[7].fill_(float("nan")))
    with pytest.raises(NumericsError, match=rf"^{name} .*\b1 NaN"):
        compress(source, tmp_path / "packed", method)
    assert_nothing_written(tmp_path)


def test_activations_that_overflow_are_named_and_leave_nothing(source, tmp_path) -> None:
    damage(source, "model.layers.1.mlp.down_proj.weight", lambda tensor: tensor.fill_(6e4))
    with pytest.raises(NumericsError, match=r"model.layers.1"):
        compress(source, tmp_path / "packed", dtype="float16")
    assert_nothing_written(tmp_path)


def test_existing_output_is_never_touched(source, tmp_path) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/packed exists"):
        compress(source, tmp_path / "packed")
    assert (tmp_path / "packed" / "mine.txt").read_text() == "mine"


def test_a_disk_too_small_is_refused_at_once(source, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(CheckpointError, match=r" 0\.0 MB .* \d+\.\d MB .*--out"):
        compress(source, tmp_path / "packed")
    assert_nothing_written(tmp_path)


def test_a_disk_that_fills_up_keeps_finished_blocks(source, tmp_path, monkeypatch) -> None:
    import compress.checkpoint.writer as writer

    original, calls = writer.tensor_bytes, []

    def full_later(tensor):
        calls.append(tensor)
        if len(calls) == 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "tensor_bytes", full_later)
        with pytest.raises(CheckpointError, match=rf"\({os.strerror(errno.ENOSPC)}\).*--out"):
            compress(source, tmp_path / "packed", "rtn")
    assert not (tmp_path / "packed").exists()
    assert (tmp_path / "packed.partial" / "pieces" / "block-00000.safetensors").exists()
    assert compress(source, tmp_path / "packed", "rtn").structure.ok


class LittleMemory:
    """Stands before the blocks' forward passes and refuses batches above a size, as an allocator would."""

    def __init__(self, most: int, kind: type[BaseException] = RuntimeError) -> None:
        self.most, self.kind, self.refused = most, kind, []

    def __call__(self, original):
        def run(call, module, hidden):
            if len(hidden) > self.most:
                self.refused.append(len(hidden))
                raise self.kind("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 4 bytes")
            return original(call, module, hidden)

        return run


def starve(monkeypatch, most: int, kind: type[BaseException] = RuntimeError) -> LittleMemory:
    from compress.pipeline.capture import Call

    memory = LittleMemory(most, kind)
    monkeypatch.setattr(Call, "run", memory(Call.run))
    return memory


@pytest.mark.parametrize(
    "kind",
    [
        torch.cuda.OutOfMemoryError,
        pytest.param(RuntimeError, marks=pytest.mark.full),
        pytest.param(MemoryError, marks=pytest.mark.full),
    ],
)
def test_out_of_memory_halves_the_micro_batch(source, tmp_path, monkeypatch, kind) -> None:
    whole = compress(source, tmp_path / "plenty", dtype="float32")
    memory = starve(monkeypatch, 1, kind)
    result = compress(source, tmp_path / "scarce", dtype="float32")
    assert memory.refused[0] == 4
    assert [block["micro_batch"] for block in result.report["blocks"]] == [1, 1, 1]
    assert [block["micro_batch"] for block in whole.report["blocks"]] == [4, 4, 4]
    one, other = PackedCheckpoint.open(tmp_path / "plenty"), PackedCheckpoint.open(tmp_path / "scarce")
    # Sums in another order may move a code that lies on a tie, and the blocks after it are calibrated on what it gives.
    first = [module for module in one.modules if module.startswith("model.layers.0.")]
    assert len(first) == 7
    for module in first:
        assert (one.weight(module).qweight != other.weight(module).qweight).float().mean() < 0.02


def test_not_even_one_sequence_fits(source, tmp_path, monkeypatch) -> None:
    starve(monkeypatch, 0)
    with pytest.raises(ToolkitError, match="--max-seq-length") as caught:
        compress(source, tmp_path / "packed")
    assert "--max-seq-length" in caught.value.remedy
    assert_nothing_written(tmp_path)


def test_other_errors_are_not_taken_for_memory() -> None:
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        with_smaller_batches(lambda size: (_ for _ in ()).throw(RuntimeError(f"size mismatch {size}")), 8)


def test_a_dead_layer_falls_back_and_the_report_says_so(source, tmp_path) -> None:
    damage(source, "model.layers.1.input_layernorm.weight", lambda tensor: tensor.zero_())
    report = compress(source, tmp_path / "packed").report
    fallen = {record["module"]: record["recovery"] for record in report["recovered"]}
    assert set(fallen) == {f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"}
    assert all("every calibration input was zero" in reason for reason in fallen.values())


def test_a_tokenizer_with_tokens_that_the_model_lacks(tiny_model, tmp_path) -> None:
    source = tiny_model(vocab_size=300)
    with pytest.raises(DataError, match="300 tokens"):
        compress(source, tmp_path / "calibrated")
    with pytest.raises(DataError, match="300 tokens"):
        measured_windows(source, data="pydoc", tokens=256, length=64)
    # The result of a long run is not lost to its check.
    assert "300 tokens" in compress(source, tmp_path / "packed", "rtn", measure=True).quality["not_measured"]
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_missing_tokenizer_is_one_line(source, tmp_path) -> None:
    for file in source.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        compress(source, tmp_path / "packed")
    assert_nothing_written(tmp_path)
