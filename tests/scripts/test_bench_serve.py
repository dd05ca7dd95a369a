"""`scripts/bench_serve.py` at the smallest sizes that still run every part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def table(printed: str) -> list[list[str]]:
    """Cells of the Markdown lines that were printed, without the rules below the heads."""
    lines = [line for line in printed.splitlines() if line.startswith("| ") and "---" not in line]
    return [line.strip("| ").split(" | ") for line in lines]


@pytest.mark.full
def test_every_drafter_gets_a_row_with_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    import bench_serve

    sizes = ["--batch", "2", "--rounds", "1", "--tokens", "12", "--prompt", "16", "--dtype", "float32"]
    assert bench_serve.main(["speculation", *sizes, "--drafters", "ngram", "self:skip"]) == 0
    rows = table(capsys.readouterr().out)
    for head, *drafters in (rows[:4], rows[4:]):
        assert head == ["drafter", "accepted", "per draft", "tokens/s", "ratio", "ratio with gate"]
        assert [row[0] for row in drafters] == ["none", "ngram", "self:skip"]
        assert drafters[0][4] == "1.00"


def test_the_scheduler_is_timed_with_and_without_text(capsys: pytest.CaptureFixture[str]) -> None:
    import bench_serve
    from benchmarking import step_cost

    assert bench_serve.main(["scheduler", "--sequences", "2"]) == 0
    assert f" {step_cost.NEW_TOKENS - 1} " in capsys.readouterr().out


def test_latency_has_a_row_for_every_way_to_prefill(capsys: pytest.CaptureFixture[str]) -> None:
    import bench_serve

    sizes = ["--prefix", "64", "--long", "96", "--questions", "2", "--rounds", "1"]
    assert bench_serve.main(["latency", *sizes]) == 0
    rows = table(capsys.readouterr().out)
    assert [row[0] for row in rows if row[0].startswith(("chunks", "whole"))] == [
        "chunks of 256 (default)",
        "chunks of 64",
        "whole prompts",
    ]


@pytest.mark.full
def test_throughput_compares_the_dense_and_the_packed_model(tmp_path: Path) -> None:
    import bench_serve

    figures = tmp_path / "figures.json"
    sizes = ["--requests", "2", "--shortest", "4", "--longest", "8", "--batch", "2", "--rounds", "1"]
    few = ["--contenders", "engine", "--json", str(figures)]
    assert bench_serve.main(["throughput", "--shape", "tiny", *sizes, *few]) == 0
    (timed,) = json.loads(figures.read_text())["rounds"]
    assert [run["name"] for run in timed] == ["engine, dense", "engine, int4"]
    assert all(len(run["outputs"]) == 2 and run["seconds"] > 0 for run in timed)


@pytest.mark.full
def test_starts_with_and_without_prepared_weights(capsys: pytest.CaptureFixture[str]) -> None:
    import bench_serve

    assert bench_serve.main(["start", "--rounds", "1"]) == 0
    rows = [row for row in table(capsys.readouterr().out) if row[0] != "start"]
    ways = ["runtime generate", "runtime serve, first answer"]
    assert [row[0] for row in rows] == ["import torch alone", *ways, *(f"{way}, prepared" for way in ways)]
    assert all(float(row[4]) > 0.1 for row in rows)


@pytest.mark.full
def test_a_stream_waits_about_as_long_as_a_step_may_take(capsys: pytest.CaptureFixture[str]) -> None:
    """With 64 prompts of another client, by a real server: the median wait is not that of whole steps."""
    import bench_serve

    rows = ["--rows", "alone", "64 prompts at once", "prompt_logprobs"]
    assert bench_serve.main(["neighbours", *rows, "--seconds", "3", "--warm-up", "2"]) == 0
    found = {row[0]: row for row in table(capsys.readouterr().out)}
    for name in rows[2:]:
        assert float(found[name][4]) <= 60
    assert float(found["64 prompts at once, no stream"][7].replace(",", "")) > 0


@pytest.mark.full
@pytest.mark.parametrize("placement", [[], ["--api-process"]], ids=["thread", "process"])
def test_streaming_counts_the_cost_of_http(capsys: pytest.CaptureFixture[str], placement: list[str]) -> None:
    import bench_serve

    work = ["--clients", "2", "--requests", "4", "--tokens", "8", "--launch", "1"]
    assert bench_serve.main(["streaming", *work, *placement]) == 0
    rows = [row for row in table(capsys.readouterr().out) if row[0] != "run"]
    assert [row[0] for row in rows] == ["engine alone", "/v1/completions"] * 4
    assert all(float(row[6]) > 1 for row in rows[1::2])  # a chunk per token, the reason and the end
