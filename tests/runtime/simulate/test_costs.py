"""Costs of steps: the fit against costs that are known, the curve, and files that are not costs."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from compress.common.errors import DataError
from runtime.simulate.costs import StepSize, bundled_names, fit, read_costs, span_size, total_size

KNOTS = (1, 4, 16, 64, 256)
CURVE = (0.001, 0.0012, 0.002, 0.006, 0.02)


def test_a_fit_finds_the_costs_that_made_the_steps() -> None:
    known = replace(read_costs("demo"), tokens=KNOTS, seconds=CURVE, answer=3e-5, decode_context=2e-7, prompt_pair=4e-8)
    generator = random.Random(0)
    sizes = []
    for _ in range(300):
        decodes = [
            span_size(generator.randrange(1000), 1, samples=True) for _ in range(generator.choice((0, 1, 7, 40)))
        ]
        prompt = span_size(generator.randrange(500), generator.randrange(2, 250), samples=generator.random() < 0.5)
        sizes.append(total_size([*decodes, *([prompt] if generator.random() < 0.5 or not decodes else [])]))
    # A fifth of the steps was interrupted.
    seconds = [known.of_step(size) * (3 if number % 5 == 0 else 1) for number, size in enumerate(sizes)]
    found = fit(sizes, seconds, KNOTS)
    assert found.seconds == pytest.approx(CURVE, rel=0.05)
    assert found.rest[:3] == pytest.approx((3e-5, 2e-7, 4e-8), rel=0.1)
    assert found.error < 0.02


def test_the_curve_is_linear_between_measured_sizes_and_goes_on() -> None:
    costs = replace(read_costs("demo"), tokens=KNOTS, seconds=CURVE)
    assert costs.of_tokens(0) == 0
    assert costs.of_tokens(0.5) == CURVE[0]
    assert [costs.of_tokens(tokens) for tokens in KNOTS] == pytest.approx(CURVE)
    assert costs.of_tokens(40) == pytest.approx(0.004)
    assert costs.of_tokens(448) == pytest.approx(0.034)


def test_sizes_count_what_attention_reads() -> None:
    assert span_size(100, 1, samples=True) == StepSize(1, 1, 100)
    assert span_size(10, 3, samples=False) == StepSize(3, 0, 0, 10 + 11 + 12, 1)
    assert total_size([]) == StepSize()


def test_costs_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert "demo" in bundled_names()
    costs = read_costs("demo")
    costs.save(tmp_path / "costs.json")
    assert read_costs(str(tmp_path / "costs.json")) == costs
    assert costs.error < 0.15
    assert sorted(costs.seconds) == [*costs.seconds]


@pytest.mark.parametrize("change", [{"answer": None}, {"seconds": [1]}, {"answer": -1}, {"model": 3}, {"more": 1}])
def test_other_files_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    read_costs("demo").save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError):
        read_costs(str(file))
    with pytest.raises(DataError, match="--measure"):
        read_costs(str(tmp_path / "none.json"))
