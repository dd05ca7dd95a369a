"""Numbers of requests that are kept in columns equal the objects that they stand for."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from compress.common.errors import RequestError
from runtime.core.logit_bias import MAX_BIAS, LogitBias
from runtime.core.request import LogprobColumns, SamplingParams, TokenLogprobs

PAIRS = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.floats(-MAX_BIAS, MAX_BIAS)), unique_by=lambda pair: pair[0]
).map(tuple)


@given(pairs=PAIRS)
@examples(40)
def test_a_bias_is_its_pairs(pairs: tuple[tuple[int, float], ...]) -> None:
    sampling = SamplingParams(logit_bias=pairs)
    assert tuple(sampling.logit_bias) == pairs
    assert sampling.logit_bias == pairs
    assert len(sampling.logit_bias) == len(pairs)
    assert hash(sampling) == hash(SamplingParams(logit_bias=pairs))
    assert sampling == SamplingParams(logit_bias=LogitBias.of(pairs))


def test_values_of_the_same_token_are_added_up() -> None:
    assert SamplingParams(logit_bias=((7, 1.5), (3, 2.0), (7, -4.0))).logit_bias == ((7, -2.5), (3, 2.0))


@pytest.mark.parametrize("value", [MAX_BIAS + 0.5, -MAX_BIAS - 0.5, float("nan"), float("inf")])
def test_a_bias_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias=((1, 0.0), (2, value)))


LOGPROBS = st.floats(max_value=0, allow_nan=False)


@given(data=st.data(), num_top=st.integers(0, 3), lengths=st.lists(st.integers(0, 4), max_size=4))
@examples(40)
def test_columns_are_their_rows(data: st.DataObject, num_top: int, lengths: list[int]) -> None:
    alternative = st.tuples(st.integers(0, 99), LOGPROBS)
    row = st.builds(TokenLogprobs, LOGPROBS, st.lists(alternative, min_size=num_top, max_size=num_top).map(tuple))
    columns, rows = LogprobColumns(), []
    for length in lengths:
        part = data.draw(st.lists(row, min_size=length, max_size=length))
        columns.extend(columns_of(part, num_top if part else 0))
        rows += part
    assert list(columns) == rows
    assert bool(columns) == bool(rows)
    assert columns[1:] == rows[1:]
    if rows:
        assert columns[-1] == rows[-1]
    with pytest.raises(IndexError):
        columns[len(rows)]


def columns_of(rows: list[TokenLogprobs], num_top: int) -> LogprobColumns:
    top = [pair for row in rows for pair in row.top]
    ids, logprobs = array("q", [token for token, _ in top]), array("d", [logprob for _, logprob in top])
    return LogprobColumns(num_top, array("d", [row.logprob for row in rows]), ids, logprobs)
