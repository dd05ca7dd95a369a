"""kill -9 at any moment: the same request continues and ends with the same bytes."""

import multiprocessing
import os
import re
import signal
from pathlib import Path

import pytest
from covering import sample
from killed_runs import killed_after_block
from runs import compress, same_bytes

from compress.checkpoint.weights import Exl3, Int
from compress.checkpoint.writer import BlockStore
from compress.common.errors import CheckpointError
from compress.methods.signround import SignRoundOptions
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.factorize import FactorizeStage
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate import RotateStage

# A fresh process that has torch loaded already, and no threads yet when it forks.
SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload(
    [
        "compress.pipeline.run",
        "accelerate",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
    ]
)


def make_request(model: Path, out: Path, method: str = "awq", **options) -> RunRequest:
    tuning = SignRoundOptions(steps=4, lr=0.002, batch=2) if method == "signround" else None
    recipe = Recipe((QuantizeStage(method, Int(4, 64), options=tuning),), CalibrationOptions(samples=4, length=48))
    return RunRequest(model, str(model), recipe, out, measure=False, **options)


def run_and_die(request: RunRequest, write: int, moment: str) -> None:
    """Runs until the `write`-th piece of this process is about to be, or just was, written; then SIGKILLs itself."""
    count = 0
    original = BlockStore.write

    def counting(self, *args, **kwargs) -> None:
        nonlocal count
        count += 1
        if count == write and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, *args, **kwargs)
        if count == write and moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    BlockStore.write = counting
    run(prepare(request), quiet=True)


def killed(request: RunRequest, write: int, moment: str) -> bool:
    """Whether the run in a child process was killed (and not finished)."""
    child = SPAWN.Process(target=run_and_die, args=(request, write, moment))
    child.start()
    child.join(120)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "compression_report.json"
    }


@pytest.fixture
def uninterrupted(tiny_model, tmp_path):
    def finish(method: str) -> dict[str, bytes]:
        child = SPAWN.Process(target=run_and_die, args=(make_request(tiny_model(), tmp_path / "whole", method), 0, ""))
        child.start()
        child.join(120)
        assert child.exitcode == 0
        return files_of(tmp_path / "whole")

    return finish


# (write, moment) at which each process dies; the next one continues from what it left. A calibrated run of three blocks
# writes: inputs 1, block 0, inputs 2, block 1, block 2, the rest. A plain one writes three blocks and the rest.
DEATHS = [
    ("gptq", [(3, "after")]),
    ("gptq", [(4, "before"), (3, "after"), (1, "after")]),
    ("awq", [(1, "before"), (2, "before"), (2, "after"), (1, "after"), (3, "before"), (1, "after"), (1, "before")]),
    ("signround", [(2, "after"), (2, "before")]),
    ("rtn", [(2, "before"), (1, "after"), (2, "before"), (1, "after")]),
]


@pytest.mark.parametrize("case", sample(DEATHS), ids=lambda case: f"{case[0]}, {len(case[1])} times")
def test_killed_again_and_again(tiny_model, tmp_path, uninterrupted, case) -> None:
    method, deaths = case
    expected = uninterrupted(method)
    request = make_request(tiny_model(), tmp_path / "packed", method)
    for write, moment in deaths:
        assert killed(request, write, moment)
        assert not (tmp_path / "packed").exists()
    assert not killed(request, 0, "never")
    assert files_of(tmp_path / "packed") == expected
    assert not (tmp_path / "packed.partial").exists()


@pytest.mark.parametrize(
    ("options", "stages", "last"),
    [
        ({}, [FactorizeStage("svd-llm", 0.6)], 0),
        ({"tie_word_embeddings": True}, [RotateStage(), QuantizeStage("gptq", Int(3, None))], 1),
        ({}, [QuantizeStage("gptaq", Int(2, 64)), QuantizeStage("gptaq", Int(3, 64), targets=("down_proj",))], 1),
        pytest.param(
            {}, [QuantizeStage("trellis", Exl3(2, "mul1"), targets=("v_proj", "down_proj"))], 1, marks=pytest.mark.full
        ),
        pytest.param({"family": "gemma4_text"}, [QuantizeStage("awq", Int(4, 64))], 1, marks=pytest.mark.full),
        pytest.param({"family": "glm_moe_dsa"}, [QuantizeStage("awq", Int(4, 16))], 0, marks=pytest.mark.full),
        pytest.param(
            {"family": "glm_moe_dsa"},
            [QuantizeStage("signround", Int(4, 16), options=SignRoundOptions(steps=4))],
            0,
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"family": "gemma4_text"},
            [QuantizeStage("signround", Int(4, 64), options=SignRoundOptions(steps=4))],
            1,
            marks=pytest.mark.full,
        ),
    ],
    ids=[
        "svd-llm",
        "rotate",
        "gptaq",
        "trellis",
        "shared keys",
        "shared choice",
        "shared choice, learned",
        "shared keys, learned",
    ],
)
def test_an_interrupted_run_goes_on_to_the_same_bytes(tiny_model, tmp_path, options, stages, last) -> None:
    model = tiny_model(**options)
    compress(model, tmp_path / "whole", *stages)
    with killed_after_block(last):
        compress(model, tmp_path / "parts", *stages)
    compress(model, tmp_path / "parts", *stages)
    assert same_bytes(tmp_path / "whole", tmp_path / "parts")


def stop_at_third_write(request: RunRequest) -> None:
    with pytest.raises(KeyboardInterrupt):
        _interrupted_run(request)


def _interrupted_run(request: RunRequest) -> None:
    original, count = BlockStore.write, 0

    def interrupting(self, *args, **kwargs) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockStore, "write", interrupting)
        run(prepare(request), quiet=True)


def test_progress_of_another_configuration_is_refused_with_what_differs(tiny_model, tmp_path) -> None:
    stop_at_third_write(make_request(tiny_model(), tmp_path / "packed"))
    with pytest.raises(CheckpointError) as caught:
        run(prepare(make_request(tiny_model(), tmp_path / "packed", "gptq")), quiet=True)
    assert re.search(r"recipe\.stages\.0\.method .*awq.*gptq", caught.value.problem)
    assert "--restart" in caught.value.remedy
    assert "--restart" in caught.value.remedy


def test_resuming_under_other_conditions_is_noted(tiny_model, tmp_path, capsys, monkeypatch) -> None:
    stop_at_third_write(make_request(tiny_model(), tmp_path / "packed"))
    monkeypatch.setattr("torch.__version__", "9.9")
    run(prepare(make_request(tiny_model(), tmp_path / "packed")))
    said = capsys.readouterr().err
    assert "block 1 of 3" in said
    assert "now 9.9" in said


def test_restart_throws_the_progress_away(tiny_model, tmp_path) -> None:
    stop_at_third_write(make_request(tiny_model(), tmp_path / "packed"))
    result = run(prepare(make_request(tiny_model(), tmp_path / "packed", "gptq", restart=True)), quiet=True)
    assert result.structure.ok
    assert not (tmp_path / "packed.partial").exists()


def test_a_changed_source_is_noticed(tiny_model, tmp_path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny_model().iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    stop_at_third_write(make_request(source, tmp_path / "packed"))
    os.utime(source / "model.safetensors", (1, 1))
    with pytest.raises(CheckpointError, match=r"weights.model.safetensors"):
        run(prepare(make_request(source, tmp_path / "packed")), quiet=True)


def test_two_runs_cannot_write_one_output(tiny_model, tmp_path) -> None:
    from compress.pipeline.resume import only_one_run

    with only_one_run(tmp_path / "packed"), pytest.raises(CheckpointError, match=r"\bprocess .*--out"):
        run(prepare(make_request(tiny_model(), tmp_path / "packed", "rtn")), quiet=True)
    assert list(tmp_path.iterdir()) == []
