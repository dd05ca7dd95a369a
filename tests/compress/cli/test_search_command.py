"""`compress search` as it is typed."""

import json
import re
import sys
from pathlib import Path

import pytest

from compress.recipe_file import load_recipe

QUICK = (
    "--num-calibration-samples",
    "4",
    "--measured",
    "2",
    "--max-seq-length",
    "48",
    "--candidates",
    "w4g64,w8",
    "--method",
    "rtn",
)


@pytest.fixture
def compress(monkeypatch, capsys, tmp_path):
    """Runs `compress ARGUMENTS` in `tmp_path`, in this process; gives what it printed on standard output and error."""
    from compress.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str | Path, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["compress", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        assert (stopped.value.code or 0) == code, printed.err
        return printed.out, printed.err

    return call


def test_a_dry_run_says_what_would_be_measured(compress, tiny_model, tmp_path: Path) -> None:
    table, _ = compress("search", tiny_model(), "--target-bpw", "5", *QUICK, "--dry-run")
    assert "24 measurements over 96 tokens" in table
    assert "candidates reach 4.250 to 8." in table
    plan = json.loads(compress("search", tiny_model(), "--max-kl", "0.1", *QUICK, "--dry-run", "--json")[0])
    assert (plan["measurements"], len(plan["units"])) == (24, 12)
    assert plan["units"][0]["modules"] == [f"model.layers.0.self_attn.{each}_proj" for each in "qkv"]
    assert not list(tmp_path.iterdir())


def test_a_recipe_alone(compress, tiny_model, tmp_path: Path) -> None:
    table, _ = compress("search", tiny_model(), "--target-bpw", "5", *QUICK, "--recipe-only", "--out", "small")
    assert "Found for at most 5 bits per weight" in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.sensitivities.json", "small.yaml"]
    recipe = load_recipe(str(tmp_path / "small.yaml"))
    assert recipe.name == "search-5bpw"
    assert sum(len(stage.targets) for stage in recipe.stages) == 21
    assert "#   compress search" in (tmp_path / "small.yaml").read_text()
    _, said = compress("search", tiny_model(), "--target-bpw", "4.5", *QUICK, "--recipe-only", "--out", "small")
    assert re.search(r"24 of 24 .*small\.sensitivities\.json", said)


def test_refusals_are_one_line(compress, tiny_model) -> None:
    _, said = compress("search", tiny_model(), "--target-size", "1KB", *QUICK, code=1)
    assert said.startswith("error: at most 0.00 MB cannot be reached: the smallest candidates take 4.250 bits per")
    _, said = compress("search", tiny_model(), *QUICK, code=1)
    assert (
        said
        == "error: a search needs exactly one target, but 0 are given. Use --target-bpw, --target-size or --max-kl.\n"
    )


def test_a_recipe_that_searches(compress, tiny_model) -> None:
    table, _ = compress("run", "smallest-kl", tiny_model(), "--dry-run")
    assert "target: KL at most 0.05" in table
