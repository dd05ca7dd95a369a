"""The check after compression, for models that do not fit in memory twice."""

from pathlib import Path

import pytest
from runs import num_forms, prepared

from compress.checkpoint.weights import Int
from compress.evaluate import session
from compress.pipeline.run import run
from compress.stages.quantize import QuantizeStage
from runtime.model import streamed

STAGE = QuantizeStage("rtn", Int(4, 32))
STEPS = (1 + num_forms()) * 3 * 3
"""Models of three layers, which windows pass through in three parts."""


@pytest.fixture
def with_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "available_bytes", lambda device: 1 << 20)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the forward passes through one layer; interrupts the eighth."""
    taken: list[int] = []
    advance = streamed.advance

    def count(*arguments: object) -> None:
        taken.append(1)
        if len(taken) == 8:
            raise KeyboardInterrupt
        advance(*arguments)

    monkeypatch.setattr(streamed, "advance", count)
    return taken


def figures(quality: dict) -> dict:
    return {name: value for name, value in quality.items() if name not in ("model", "baseline")}


def test_it_streams_and_continues_after_an_interruption(
    tiny_model, tmp_path: Path, with_little_memory: None, steps: list[int], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    source, out = tiny_model(), tmp_path / "packed"
    with pytest.raises(KeyboardInterrupt):
        run(prepared(source, out, STAGE, measure=True))
    assert not out.exists()
    found = run(prepared(source, out, STAGE, measure=True))
    assert len(steps) == STEPS + 1
    lines = capsys.readouterr().err
    assert "free on cpu: one layer at a time" in lines
    assert "quality check: baseline, layer 3 of 3" in lines
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]
    monkeypatch.undo()
    assert figures(found.quality) == figures(session.quick_check(out, source))


@pytest.mark.full
def test_progress_on_another_checkpoint_is_thrown_away(
    tiny_model, tmp_path: Path, with_little_memory: None, steps: list[int]
) -> None:
    source, out = tiny_model(), tmp_path / "packed"
    with pytest.raises(KeyboardInterrupt):
        run(prepared(source, out, STAGE, measure=True))
    (tmp_path / "packed.partial" / "quality" / "progress.json").write_text('{"model": "another"}')
    found = run(prepared(source, out, STAGE, measure=True))
    assert found.quality["kl_mean"] > 0
    assert len(steps) == STEPS + 8
