"""The search section of a report: read with every field checked, and drawn with what it says."""

import pytest
from pydantic import ValidationError

from compress.reporting.report_data import SearchRecord


def section(**changes) -> dict:
    return {
        "target": "KL at most 0.05",
        "measured_tokens": 4096,
        "predicted": 0.03,
        "units": [
            {"modules": ["b.0.q", "b.0.k"], "chosen": "w4g128", "sensitivity": {"w3g64": 0.05, "w4g128": 0.02}},
            {"modules": ["b.1.o"], "chosen": "w3g64", "sensitivity": {"w3g64": 0.01, "w4g128": 0.004, "w8": 0.0}},
        ],
        "tries": [{"predicted": 0.03, "measured": 0.04, "bytes": 1000}],
    } | changes


def test_sums_and_the_typical_scheme() -> None:
    found = SearchRecord.model_validate(section())
    assert found.uniform == pytest.approx({"w3g64": 0.06, "w4g128": 0.024})
    assert found.typical in ("w3g64", "w4g128")
    assert found.units[0].modules == ("b.0.q", "b.0.k")
    assert found.tries[0].bytes == 1000


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"units": []}, ("units",)),
        ({"units": [{"modules": ["a"], "chosen": "w4", "sensitivity": {}}]}, ("units", 0, "sensitivity")),
        (
            {"units": [{"modules": ["a"], "chosen": "w4", "sensitivity": {"w4": "x"}}]},
            ("units", 0, "sensitivity", "w4"),
        ),
        ({"predicted": None}, ("predicted",)),
        ({"tries": [{}]}, ("tries", 0, "predicted")),
    ],
)
def test_damage_is_named(changes: dict, place: tuple) -> None:
    with pytest.raises(ValidationError) as refused:
        SearchRecord.model_validate(section(**changes))
    assert refused.value.errors()[0]["loc"] == place
