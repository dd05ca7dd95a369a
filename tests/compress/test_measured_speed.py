"""Predicted decode steps on a GPU are those that were measured, and every form of `compress fit` has a share."""

import pytest

from compress.checkpoint.weights import Int
from compress.measured_loss import KEYS, WEIGHTS
from compress.measured_speed import MANY, gpu_step_seconds

H200 = 4.8e12
INT4 = Int(4, 128)
TOKENS = 160
"""Tokens of a sequence whose keys and values the benchmark counts."""


@pytest.mark.parametrize(
    ("scheme", "kv_cache", "weight_bytes", "token_bytes", "measured"),
    [
        (None, "16bit", 15_009_849_344, 131_072, {1: 4.598, 8: 4.604, 64: 5.510}),
        (INT4, "16bit", 4_141_002_256, 131_072, {1: 2.224, 8: 2.362, 64: 5.465}),
        (INT4, "int4", 4_141_002_256, 34_816, {1: 2.319, 8: 2.447, 64: 5.312}),
    ],
)
def test_measured_steps_are_predicted(scheme, kv_cache: str, weight_bytes: int, token_bytes: int, measured) -> None:
    for sequences, milliseconds in measured.items():
        pages = kv_cache, token_bytes * TOKENS * sequences
        found = gpu_step_seconds([(scheme, weight_bytes)], pages, sequences, H200)
        assert found == pytest.approx(milliseconds / 1e3, rel=0.06)


@pytest.mark.parametrize("form", WEIGHTS, ids=str)
@pytest.mark.parametrize("kv_cache", KEYS)
def test_every_form_takes_longer_than_its_bytes(form, kv_cache: str) -> None:
    sizes = [gpu_step_seconds([(form.scheme, 10**9)], (kv_cache, 10**9), users, H200) for users in (1, MANY, 2 * MANY)]
    assert 2e9 / H200 < sizes[0] <= sizes[1] == sizes[2]
