"""The stage finish and the command: scales, norms and biases change, codes, format and size do not."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import compress, prepared, same_bytes, some_tokens
from servers import serving_demo
from typer.testing import CliRunner

from calibration.sequences import load_tokenizer
from compress.checkpoint.gguf.export import export_gguf
from compress.checkpoint.gguf.folder import folder_of
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Activations, Int, NMSparsity
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.forms import Q2K, Mxfp4, Nvfp4
from compress.checkpoint.weights.integer import INPUTS
from compress.checkpoint.writer import BlockStore, export_checkpoint
from compress.cli import make_app
from compress.common.cli import bundled_path, demo_model_path
from compress.common.errors import CheckpointError, DataError, RecipeError
from compress.common.files import REPORT_FILE
from compress.evaluate.server import Server, ServerScorer
from compress.pipeline.distillation.finished import open_model
from compress.pipeline.distillation.run import FinishedRun, FinishRequest, finish
from compress.pipeline.distillation.served_teacher import ServedTeacher
from compress.pipeline.finish import compare_with_report
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions
from compress.recipe_file import parse_recipe
from compress.stages.base import Stage
from compress.stages.factorize import FactorizeStage
from compress.stages.finish import FinishStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage

OTHER_FORMS = [
    (QuantizeStage("rtn", Nvfp4()),),
    (QuantizeStage("rtn", Mxfp4()),),
    (QuantizeStage("rtn", Q2K()),),
    (FactorizeStage(keep=0.7),),
    (FactorizeStage(keep=0.8), QuantizeStage("rtn", Int(4, None))),
    (PruneStage("wanda", pattern=NMSparsity(2, 4)),),
]
TEXT = CalibrationOptions(samples=8, length=48)
SHORT = FinishStage(steps=4, batch=2, top_k=64)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "packed"
    compress(demo_model_path(), out, QuantizeStage("gptq", Int(2, 64)), calibration=TEXT)
    return out


@pytest.fixture(scope="module")
def finished(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return finish(request(packed, tmp_path_factory.mktemp("finished") / "out"), quiet=True)


def request(packed: Path, out: Path, stage: FinishStage = SHORT, **options) -> FinishRequest:
    dense = options.pop("dense", demo_model_path())
    return FinishRequest(packed, dense, str(dense), stage, TEXT, 0, out, **{"measure": False} | options)


def assert_only_numbers_changed(before: Path, after: Path) -> None:
    left, right = PackedCheckpoint.open(before), PackedCheckpoint.open(after)
    assert (left.schemes, left.format) == (right.schemes, right.format)
    changed = 0
    for module in left.modules:
        old, new = left.packed_weight(module), right.packed_weight(module)
        assert isinstance(old, CodedWeight)
        assert isinstance(new, CodedWeight)
        assert torch.equal(old.qweight, new.qweight)
        assert torch.equal(old.zero_points, new.zero_points)
        assert old.scales.dtype == new.scales.dtype
        changed += not torch.equal(old.scales, new.scales)
    assert changed == len(left.modules)
    names = [name for name in left.dense_names() if "norm" in name]
    assert len(names) > 12
    assert all(not torch.equal(left.tensor(name), right.tensor(name)) for name in names)
    others = [name for name in left.dense_names() if "norm" not in name and not name.endswith(".bias")]
    assert all(torch.equal(left.tensor(name), right.tensor(name)) for name in others)


def test_a_checkpoint_is_finished(packed: Path, finished: FinishedRun) -> None:
    outcome, out = finished.finish, finished.out
    assert 0 < outcome.step <= 4
    assert outcome.kl_after < outcome.kl_before
    assert (outcome.trained_sequences, outcome.withheld_sequences) == (6, 2)
    assert_only_numbers_changed(packed, out)
    assert verify_structure(out, PackedCheckpoint.open(demo_model_path()).files).ok
    assert compare_with_report(out) == []
    assert json.loads((out / REPORT_FILE).read_text())["finish"]["step"] == outcome.step
    assert PackedCheckpoint.open(out).config["compression_config"]["finish"]["loss"] == "kl"
    assert not out.with_name("out.partial").exists()


def test_a_stage_gives_what_the_command_gives(finished: FinishedRun, tmp_path: Path) -> None:
    stages = QuantizeStage("gptq", Int(2, 64)), SHORT
    result = compress(demo_model_path(), tmp_path / "staged", *stages, calibration=TEXT)
    assert result.finish == finished.finish
    assert result.report["finish"]["kl_after"] == finished.finish.kl_after
    assert same_bytes(tmp_path / "staged", finished.out)
    assert compare_with_report(tmp_path / "staged") == []


def test_a_server_of_the_dense_model_is_a_teacher(packed: Path, tmp_path: Path) -> None:
    tokens = some_tokens(96).view(3, 32)
    local = open_model(demo_model_path(), torch.device("cpu"), torch.float32)
    with serving_demo() as (url, _engine, _tokenizer):
        result = finish(request(packed, tmp_path / "out", dense=Server(url)), quiet=True)
        scorer = ServerScorer(Server(url), load_tokenizer(demo_model_path()))
        served = ServedTeacher(scorer, local.skeleton.model.config.vocab_size)
        batches = [*zip(local.targets(tokens, 2, 8), served.targets(tokens, 2, 8), strict=True)]
        with pytest.raises(DataError, match="the model has 16 tokens"):
            next(replace(served, vocab_size=16).targets(tokens, 2, 8))
    assert result.finish.kl_after < result.finish.kl_before
    assert_only_numbers_changed(packed, tmp_path / "out")
    for exact, found in batches:
        torch.testing.assert_close(exact["log_probabilities"][:, :-1], found["log_probabilities"], atol=1e-4, rtol=1e-4)
        assert (exact["indices"][:, :-1] == found["indices"]).float().mean() > 0.99


def test_nothing_changes_if_no_step_is_better(packed: Path, tmp_path: Path) -> None:
    wild = FinishStage(steps=1, batch=2, learning_rate=50.0)
    result = finish(request(packed, tmp_path / "out", wild), quiet=True)
    assert (result.finish.step, result.finish.kl_after) == (0, result.finish.kl_before)
    assert "nothing changed" in result.finish.describe()
    assert same_bytes(packed, tmp_path / "out")


@contextmanager
def killed_after(writes: int) -> Iterator[None]:
    """Interrupts the code inside after this many pieces are written."""
    original, count = BlockStore.write, 0

    def counting(self: BlockStore, *args, **options) -> None:
        nonlocal count
        original(self, *args, **options)
        count += 1
        if count == writes:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockStore, "write", counting)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("writes", [2, 7])
def test_an_interrupted_run_ends_with_the_same_bytes(
    writes: int, packed: Path, finished: FinishedRun, tmp_path: Path
) -> None:
    with killed_after(writes):
        finish(request(packed, tmp_path / "out"), quiet=True)
    with pytest.raises(CheckpointError, match="another configuration"):
        finish(request(packed, tmp_path / "out", FinishStage(steps=5)), quiet=True)
    assert finish(request(packed, tmp_path / "out"), quiet=True).finish == finished.finish
    assert same_bytes(tmp_path / "out", finished.out)


@pytest.mark.full
@pytest.mark.parametrize("last", [8, 12])
def test_an_interrupted_stage_ends_with_the_same_bytes(last: int, tmp_path: Path) -> None:
    stages = QuantizeStage("rtn", Int(3, 64)), SHORT
    run(prepared(demo_model_path(), tmp_path / "whole", *stages, calibration=TEXT), quiet=True)
    with killed_after(last):
        run(prepared(demo_model_path(), tmp_path / "out", *stages, calibration=TEXT), quiet=True)
    run(prepared(demo_model_path(), tmp_path / "out", *stages, calibration=TEXT), quiet=True)
    assert same_bytes(tmp_path / "out", tmp_path / "whole")


@pytest.mark.parametrize(
    ("format", "scheme"),
    [("gptq", Int(4, 64)), ("awq", Int(4, 64, False)), ("compressed-tensors", Int(8, None))],
)
def test_formats_of_other_tools_stay(format: str, scheme: Int, tmp_path: Path) -> None:
    compress(demo_model_path(), tmp_path / "packed", QuantizeStage("rtn", scheme))
    other = export_checkpoint(tmp_path / "packed", format, tmp_path / "other")
    rough = FinishStage(steps=2, batch=2, learning_rate=1e-4)
    found = finish(request(other, tmp_path / "out", rough), quiet=True)
    after = PackedCheckpoint.open(tmp_path / "out")
    assert (after.format, after.schemes) == (format, PackedCheckpoint.open(other).schemes)
    assert found.structure.ok
    if found.finish.step == 0:
        assert same_bytes(other, tmp_path / "out")


@pytest.mark.full
@pytest.mark.parametrize("stages", OTHER_FORMS, ids=lambda stages: "-".join(stage.label for stage in stages))
def test_other_forms_are_finished(stages: tuple[Stage, ...], tmp_path: Path) -> None:
    compress(demo_model_path(), tmp_path / "packed", *stages)
    before = PackedCheckpoint.open(tmp_path / "packed")
    slow = FinishStage(steps=6, batch=2, learning_rate=2e-3)
    result = finish(request(tmp_path / "packed", tmp_path / "out", slow), quiet=True)
    after = PackedCheckpoint.open(tmp_path / "out")
    assert (after.format, after.schemes, after.files.file_bytes) == (
        before.format,
        before.schemes,
        before.files.file_bytes,
    )
    assert result.structure.ok
    assert result.finish.kl_after < result.finish.kl_before


@pytest.mark.full
@pytest.mark.parametrize("kind", ["q2_k", "q4_0"])
def test_a_gguf_file_is_finished_and_written_here(kind: str, tmp_path: Path) -> None:
    export_gguf(demo_model_path(), tmp_path / "demo.gguf", kind, None)  # with an embedding in q8_0
    before = PackedCheckpoint.open(folder_of(tmp_path / "demo.gguf"))
    result = finish(request(before.path, tmp_path / "out", replace(SHORT, learning_rate=2e-3)), quiet=True)
    assert result.finish.kl_after < result.finish.kl_before
    (note,) = result.notes
    assert "are stored in bfloat16" in note
    after = PackedCheckpoint.open(tmp_path / "out")
    assert after.schemes == before.schemes
    name = "model.layers.0.self_attn.q_proj"
    old, new = before.packed_weight(name), after.packed_weight(name)
    assert isinstance(old, CodedWeight)
    assert isinstance(new, CodedWeight)
    assert torch.equal(old.qweight, new.qweight)


@pytest.mark.full
def test_a_mixture_is_finished(tmp_path: Path) -> None:
    compress(bundled_path("demo-mixture"), tmp_path / "packed", QuantizeStage("rtn", Int(2, 64)))
    result = finish(request(tmp_path / "packed", tmp_path / "out", dense=bundled_path("demo-mixture")), quiet=True)
    assert result.finish.kl_after < result.finish.kl_before
    assert result.structure.ok


def test_inputs_are_rounded_while_it_trains(tmp_path: Path) -> None:
    found = {}
    for bits in (None, 4):
        scheme = Int(4, 64, activations=Activations.from_bits(bits, *INPUTS))
        compress(demo_model_path(), tmp_path / f"packed{bits}", QuantizeStage("rtn", scheme), calibration=TEXT)
        stage = FinishStage(steps=3, batch=2, learning_rate=2e-3)
        found[bits] = finish(request(tmp_path / f"packed{bits}", tmp_path / f"out{bits}", stage), quiet=True).finish
    assert found[4].kl_before > 2 * found[None].kl_before
    assert found[4].kl_after < found[4].kl_before


def test_one_sequence_is_too_few(packed: Path, tmp_path: Path) -> None:
    few = replace(request(packed, tmp_path / "out"), calibration=CalibrationOptions(samples=1, length=48))
    with pytest.raises(DataError, match="too few to train and to select"):
        finish(few, quiet=True)


def test_a_dense_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no quantized weights"):
        finish(request(demo_model_path(), tmp_path / "out"), quiet=True)
    assert not any(tmp_path.iterdir())


def test_updates_of_matrices_heal_a_pruned_model_and_keep_its_zeros(tmp_path: Path) -> None:
    healing = FinishStage(steps=10, batch=2, rank=8)
    pruned, healed = tmp_path / "pruned", tmp_path / "healed"
    compress(demo_model_path(), pruned, PruneStage("wanda", sparsity=0.7), calibration=TEXT)
    result = finish(request(pruned, healed, healing), quiet=True).finish
    assert result.kl_after < 0.9 * result.kl_before
    before, after = PackedCheckpoint.open(pruned), PackedCheckpoint.open(healed)
    assert after.schemes == {}
    assert before.dense_names() == after.dense_names()
    matrices = [name for name in before.dense_names() if name.endswith("_proj.weight")]
    assert len(matrices) == 42
    for name in matrices:
        old, new = before.tensor(name), after.tensor(name)
        assert torch.equal(old == 0, new == 0)
        assert not torch.equal(old, new)
        assert old.dtype == new.dtype


def test_a_recipe_needs_something_to_finish() -> None:
    with pytest.raises(RecipeError, match="no stage whose result it could train"):
        parse_recipe("stages:\n- finish: {steps: 10}\n", "r.yaml")
    with pytest.raises(RecipeError, match="steps=0"):
        parse_recipe("stages:\n- quantize: {bits: 4}\n- finish: {steps: 0}\n", "r.yaml")


def test_an_option_adds_the_stage(tmp_path: Path) -> None:
    arguments = ["--bits", "3", "--finish", "kl", "--out", str(tmp_path / "out"), "--dry-run", "--json"]
    shown = CliRunner().invoke(make_app(), ["quantize", *arguments])
    assert [each["stage"] for each in json.loads(shown.stdout)["recipe"]["stages"]] == ["quantize", "finish"]
