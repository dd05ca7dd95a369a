"""The search section of a report: read with every field checked, and drawn with what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compress.common.errors import CheckpointError
from compress.reporting.report_data import Fields, SearchRecord, read_search


def written(tmp_path: Path, **changes) -> Fields:
    section = {
        "target": "KL at most 0.05",
        "measured_tokens": 4096,
        "predicted": 0.03,
        "units": [
            {"modules": ["b.0.q", "b.0.k"], "chosen": "w4g128", "sensitivity": {"w3g64": 0.05, "w4g128": 0.02}},
            {"modules": ["b.1.o"], "chosen": "w3g64", "sensitivity": {"w3g64": 0.01, "w4g128": 0.004, "w8": 0.0}},
        ],
        "tries": [{"predicted": 0.03, "measured": 0.04, "bytes": 1000}],
    }
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"search": section | changes}))
    return Fields.load(path).child("search")


def test_what_a_search_says(tmp_path: Path) -> None:
    found = read_search(written(tmp_path))
    assert isinstance(found, SearchRecord)
    assert found.uniform == pytest.approx({"w3g64": 0.06, "w4g128": 0.024})
    assert found.typical in ("w3g64", "w4g128")
    assert found.units[0].modules == ("b.0.q", "b.0.k")
    assert found.tries[0].bytes == 1000


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"units": []}, "search.units is empty"),
        ({"units": [{"modules": ["a"], "chosen": "w4", "sensitivity": {}}]}, "sensitivity is empty"),
        ({"units": [{"modules": ["a"], "chosen": "w4", "sensitivity": {"w4": "x"}}]}, "w4 is not a finite number"),
        ({"predicted": None}, "search.predicted is missing"),
        ({"tries": [{}]}, r"tries\[0\].predicted is missing"),
    ],
)
def test_damage_is_named(tmp_path: Path, changes: dict, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_search(written(tmp_path, **changes))
