"""Predicted decode steps on a GPU are those that were measured."""

import pytest

from compress.checkpoint.weights import Int
from compress.measured_speed import MANY, PAGES, WEIGHTS, Share, gpu_step_seconds

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


@pytest.mark.parametrize("share", WEIGHTS.values(), ids=map(str, WEIGHTS))
def test_more_sequences_read_at_no_larger_share(share: Share) -> None:
    shares = [share.at(sequences) for sequences in (1, 8, MANY, 2 * MANY)]
    assert 1 > shares[0] >= shares[1] >= shares[2] == shares[3] > 0


def test_quantized_pages_gain_less_than_their_bytes() -> None:
    assert PAGES["16bit"] > PAGES["int8"] > PAGES["int4"]
