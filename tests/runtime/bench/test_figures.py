"""Figures against values worked out by hand."""

import random
import re
import xml.etree.ElementTree as ElementTree

import pytest

from compress.common.errors import ToolkitError
from runtime.bench.figures import Distribution, Objective, Run, facts, parse_objectives, summarize
from runtime.bench.load import Lengths, Record, Workload
from runtime.bench.plot import active_over_time, check_plots, draw, tokens_over_time

QUICK = Record(1.0, 2.0, [1.1, 1.2, 1.4], prompt_tokens=10, cached_tokens=4, output_tokens=5, status=200)
SLOW = Record(1.5, 5.0, [3.5, 4.5], prompt_tokens=20, output_tokens=2, status=200)
SINGLE = Record(2.0, 2.5, [2.5], prompt_tokens=5, output_tokens=1, status=200)
REFUSED = Record(2.0, 2.1, status=429, error="The queue is full")
BROKEN = Record(2.0, 6.0, [2.2], status=200, error="the stream broke off")
RECORDS = [QUICK, SLOW, SINGLE, REFUSED, BROKEN]


def test_distribution_of_milliseconds() -> None:
    assert Distribution.of([]) is None
    values = [each / 1000 for each in random.Random(0).sample(range(101), 101)]
    assert Distribution.of(values) == Distribution(*map(pytest.approx, (50, 50, 90, 95, 99)))
    assert Distribution.of([0.001, 0.003]) == Distribution(*map(pytest.approx, (2, 2, 2.8, 2.9, 2.98)))


def test_latencies_of_a_request() -> None:
    assert QUICK.ttft == pytest.approx(0.1)
    assert QUICK.e2e == pytest.approx(1.0)
    assert QUICK.gaps == pytest.approx([0.1, 0.2])
    assert QUICK.tpot == pytest.approx(0.3 / 4)  # five tokens came in three pieces
    assert SINGLE.gaps == []
    assert SINGLE.tpot is None


def test_summary() -> None:
    figures = summarize(RECORDS, 3, parse_objectives("ttft=1s,itl=250ms"))
    assert (figures.complete, figures.refused, figures.failed, figures.peak_concurrency) == (3, 1, 1, 3)
    assert figures.duration_s == 5.0
    assert (figures.input_tokens, figures.cached_tokens, figures.output_tokens) == (35, 4, 8)
    assert figures.pieces == 6
    assert figures.requests_per_s == pytest.approx(3 / 5)
    assert figures.output_tokens_per_s == pytest.approx(8 / 5)
    assert figures.latency_ms["itl"].mean == pytest.approx(1e3 * (0.1 + 0.2 + 1.0) / 3)
    assert figures.latency_ms["ttft"].p50 == pytest.approx(500)
    assert figures.goodput.share == pytest.approx(2 / 5)  # quick and single; a failure meets no target
    assert figures.goodput.requests_per_s == pytest.approx(2 / 5)
    assert figures.errors == {"The queue is full": 1, "the stream broke off": 1}


@pytest.mark.parametrize(
    ("text", "met"),
    [("ttft=100ms", [QUICK]), ("e2e=1s", [QUICK, SINGLE]), ("tpot=75ms", [QUICK, SINGLE]), ("itl=1s", [QUICK, SLOW])],
)
def test_objectives(text: str, met: list[Record]) -> None:
    (objective,) = parse_objectives(text)
    slack = Objective(objective.metric, objective.seconds + 1e-9)
    assert all(slack.is_met(record) for record in met)
    assert slack.is_met(SLOW) == (SLOW in met)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "speed=5s", "ttft=5s;itl=3s", "ttft=-5s"])
def test_wrong_objectives_are_refused(text: str) -> None:
    with pytest.raises(ToolkitError, match="--slo"):
        parse_objectives(text)


def test_nothing_complete_is_no_crash() -> None:
    figures = summarize([REFUSED], 1)
    assert figures.complete == 0
    assert set(figures.latency_ms.values()) == {None}
    ElementTree.fromstring(draw(run([REFUSED])))


def run(records: list[Record]) -> Run:
    workload = Workload(Lengths(5, 20), Lengths(1, 5), len(records), shared_prefix=3)
    figures = summarize(records, 3, parse_objectives("ttft=1s"))
    return Run("runtime bench", "http://x", "<demo> & co", "closed loop", workload, (), records, figures)


def test_json_has_stable_keys() -> None:
    found = run(RECORDS).as_json()
    assert {"schema", "command", "workload", "figures", "machine", "versions", "requests", "meanings"} <= found.keys()
    assert set(found["figures"]["latency_ms"]) == {"ttft", "itl", "tpot", "e2e"}
    assert set(found["figures"]["latency_ms"]["ttft"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert found["machine"]["cores"] >= 1
    assert "torch" in found["versions"]
    assert [request["status"] for request in found["requests"]] == [200, 200, 200, 429, 200]
    assert any("429" in line for line in facts(run(RECORDS)))


def test_plot_is_svg_with_every_panel_and_nothing_outside() -> None:
    drawn = draw(run(RECORDS))
    root = ElementTree.fromstring(drawn)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for title in ("Time to first token", "Between tokens", "End to end", "Output tokens per second", "Open requests"):
        assert title in texts
    assert any("<demo> & co" in text for text in texts)
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        if "id" not in path.attrib:  # those are placed where they are used
            numbers = [float(number) for number in re.findall(r"-?[\d.]+", path.get("d"))]
            assert all(-10 <= number <= 1130 for number in numbers)
    assert draw(run(RECORDS)) == drawn


def test_without_matplotlib_a_plot_is_refused_before_the_run(monkeypatch) -> None:
    check_plots()
    monkeypatch.setattr("runtime.bench.plot.has_matplotlib", lambda: False)
    with pytest.raises(ToolkitError, match=r"^--plot .*pip install"):
        check_plots()


def test_pictures_of_long_runs_stay_small() -> None:
    many = Record(0.0, 9.0, [i / 1e4 for i in range(50_000)], output_tokens=50_000, status=200)
    assert len(draw(run([many]))) < 60_000


def test_curves_over_time_add_up() -> None:
    good = [QUICK, SLOW, SINGLE]
    points = tokens_over_time(good, 4.0)
    assert sum(rate for _, rate in points) * (points[1][0] - points[0][0]) == pytest.approx(8)
    counts = [count for _, count in active_over_time(RECORDS)]
    assert min(counts) == counts[-1] == 0
    assert max(counts) == 4
