"""Mixtures as users write them, and the number of sequences of each part."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.parts import Part, check_parts, parse_parts, share_out
from compress.common.errors import DataError


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("bundled", [("bundled", 1)]),
        ("org/name:config:train", [("org/name:config:train", 1)]),
        ("bundled:0.5,a.jsonl:0.25", [("bundled", 0.5), ("a.jsonl", 0.25)]),
        ("bundled, pydoc", [("bundled", 1), ("pydoc", 1)]),
        ("org/name:config:train:3,self:1", [("org/name:config:train", 3), ("self", 1)]),
        ("org/name:config:train,self", [("org/name:config:train", 1), ("self", 1)]),
    ],
)
def test_what_a_spec_means(spec: str, parts: list[tuple[str, float]]):
    assert parse_parts(spec) == tuple(Part(*part) for part in parts)


def test_a_path_that_exists_is_itself(tmp_path: Path):
    path = tmp_path / "a,b:2"
    path.write_text("x")
    assert parse_parts(str(path)) == (Part(str(path)),)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("bundled:0.5,pydoc", "'pydoc'"),
        ("bundled:0,pydoc:1", "weight 0"),
        ("bundled:-1,pydoc:1", "-1"),
        ("bundled:nan,pydoc:1", "the weight nan of bundled"),
        ("bundled:inf,pydoc:1", "the weight inf of bundled"),
        ("bundled,", "has no name"),
        ("bundled:1,bundled:2", "bundled is named twice"),
    ],
)
def test_bad_mixtures_are_refused_with_an_example(spec: str, problem: str):
    with pytest.raises(DataError, match=problem) as caught:
        parse_parts(spec)
    assert caught.value.remedy


def test_no_parts_are_refused():
    with pytest.raises(DataError, match="no parts"):
        check_parts([])


weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@given(weights, st.integers(1, 300))
def test_shares_add_up_and_follow_the_weights(values: list[float], samples: int):
    parts = [Part(f"text{index}", value) for index, value in enumerate(values)]
    samples += math.ceil(sum(values) / min(values))
    counts = share_out(parts, samples)
    assert sum(counts) == samples
    for count, value in zip(counts, values, strict=True):
        assert count >= 1
        assert abs(count - samples * value / sum(values)) < 1


def test_a_part_without_a_sequence_is_refused_with_the_number_that_is_enough():
    parts = [Part("a", 0.99), Part("b", 0.01)]
    with pytest.raises(DataError, match="8 calibration") as caught:
        share_out(parts, 8)
    assert caught.value.remedy == "Use --num-calibration-samples 100"
    assert share_out(parts, 100) == [99, 1]
