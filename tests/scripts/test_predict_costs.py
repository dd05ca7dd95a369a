"""The tables of docs/choosing.md are those that the script prints, and times follow from the given speed."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.full

DOCUMENT = Path(__file__).parents[2] / "docs" / "choosing.md"


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_document_has_the_tables_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    import predict_costs

    predict_costs.main([])
    printed = rows(capsys.readouterr().out)
    assert len(printed) == 3 * 2 + len(predict_costs.FORMS) + len(predict_costs.MACHINES) + len(predict_costs.PASSES)
    document = rows(DOCUMENT.read_text(encoding="utf-8"))
    assert document[: len(printed)] == printed


def test_twice_the_speed_takes_half_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    import predict_costs

    minutes = []
    for speed in ("100", "200"):
        predict_costs.main(["--models", "1B", "--methods", "gptq", "--gflops", speed])
        minutes.append(int(rows(capsys.readouterr().out)[-1].split()[-3]))
    assert abs(minutes[0] - 2 * minutes[1]) <= 1
