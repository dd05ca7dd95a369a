"""`scripts/bench_speculation.py` at the smallest size that still runs every part."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_every_drafter_gets_a_row_with_its_figures(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_speculation

    sizes = ["--batch", "2", "--rounds", "1", "--tokens", "12", "--prompt", "16", "--dtype", "float32"]
    assert bench_speculation.main([*sizes, "--drafters", "ngram", "self:skip"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    tables = [lines[:5], lines[5:]]
    for table in tables:
        assert table[0] == "| drafter | accepted | per draft | tokens/s | ratio | ratio with gate |"
        assert [line.split(" | ")[0] for line in table[2:]] == ["| none", "| ngram", "| self:skip"]
        assert table[2].split(" | ")[4] == "1.00"
