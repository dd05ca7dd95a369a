"""The comparison of the simulator with a server: what it prints, and when it fails. How near they are, only an idle
machine says."""

import re
import sys

import pytest

from compress.common.cli import demo_model_path
from runtime.simulate.costs import read_costs
from runtime.simulate.jobs import Job


def test_the_simulated_requests_are_those_of_the_server() -> None:
    from check_simulator import simulated, values

    jobs = [Job(str(number), 0.5 * number, 64, 16) for number in range(8)]
    figures = simulated(read_costs("demo"), jobs)
    assert (figures.complete, figures.output_tokens, figures.cached_tokens) == (8, 128, 0)
    assert figures.duration_s == pytest.approx(3.5, abs=0.1)
    assert all(value > 0 for value in values(figures).values())


@pytest.mark.full
@pytest.mark.parametrize(("within", "status"), [("1e9", 0), ("0", 1)])
def test_a_server_is_compared(
    within: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import check_simulator

    arguments = [str(demo_model_path()), "--num-prompts", "12", "--request-rate", "6", "--rounds", "2"]
    arguments += ["--within", within]
    monkeypatch.setattr(check_simulator, "measured", lambda model: read_costs("demo"))
    monkeypatch.setattr(sys, "argv", ["check_simulator.py", *arguments])
    assert check_simulator.main() == status
    row = r"^(\S.*?)  +[\d.]+ +[\d.]+ +-?[\d.]+% +-?[\d.]+% to -?[\d.]+%$"
    rows = re.findall(row, capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 6
