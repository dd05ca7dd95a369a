"""Requests of simulations: statistics of traces, arrivals and files."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pstdev

import pytest

from compress.common.errors import DataError
from runtime.bench.load import Lengths
from runtime.simulate.jobs import PERCENTS, TRACES, Piece, Workload, at_rate, make_jobs, native_rate, read_trace

MEANS = {
    "azure-conversation": (1154.7, 211.1),
    "azure-code": (2047.8, 27.9),
    "mooncake-conversation": (12035.1, 342.6),
}
"""Means of prompts and outputs in the files of the traces, as computed from them."""


@pytest.mark.parametrize("name", TRACES)
def test_drawn_lengths_have_the_statistics_of_the_trace(name: str) -> None:
    trace = TRACES[name]
    jobs = make_jobs(Workload(trace.input, trace.output, 20_000, burstiness=trace.burstiness))
    prompts, outputs = [job.prompt_tokens for job in jobs], [job.output_tokens for job in jobs]
    assert (fmean(prompts), fmean(outputs)) == pytest.approx(MEANS[name], rel=0.12)
    middle = PERCENTS.index(50)
    assert median(prompts) == pytest.approx(trace.input.tokens[middle], rel=0.05)
    assert median(outputs) == pytest.approx(trace.output.tokens[middle], rel=0.05)


@pytest.mark.parametrize("burstiness", [1.0, 0.25])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    jobs = at_rate(make_jobs(Workload(Lengths(1, 1), Lengths(1, 1), 20_001, burstiness=burstiness)), 20.0)
    gaps = [after.at - before.at for before, after in pairwise(jobs)]
    assert jobs[0].at == 0
    assert native_rate(jobs) == pytest.approx(20.0)
    assert (pstdev(gaps) / fmean(gaps)) ** -2 == pytest.approx(burstiness, rel=0.1)


def test_a_prefix_is_the_same_for_all_and_the_rest_is_not() -> None:
    first, second = make_jobs(Workload(Lengths(8, 8), Lengths(1, 1), 2, prefix=16))
    assert len(first.token_ids()) == first.prompt_tokens == 24
    assert first.token_ids()[:16] == second.token_ids()[:16]
    assert not set(first.token_ids()[16:]) & set(second.token_ids()[16:])


def test_files_in_the_formats_of_published_traces(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 7, 9]},
        {"timestamp": 1000, "input_length": 600, "output_length": 2, "hash_ids": [0, 8]},
        {"timestamp": 2000, "input_length": 10, "output_length": 0},
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    first, second = read_trace(tmp_path / "trace.jsonl")
    assert (first.at, first.prompt_tokens, first.output_tokens) == (0.0, 600, 2)
    assert (second.at, second.pieces) == (2.0, (Piece(0, 512), Piece(7, 512), Piece(9, 76)))
    assert first.token_ids()[:512] == second.token_ids()[:512]
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.2299600,3180,8\n"
    )
    azure = read_trace(tmp_path / "azure.csv", scale=0.1)
    assert [(job.at, job.prompt_tokens, job.output_tokens) for job in azure] == [(0.0, 481, 1), (0.25, 318, 1)]
    (tmp_path / "burst.csv").write_text(
        "Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n45,GPT-4,9,7"
    )
    assert [job.at for job in read_trace(tmp_path / "burst.csv")] == [0.0, 40.0]


@pytest.mark.parametrize(
    "line", ["3", '{"timestamp": 1}', '{"timestamp": 1, "input_length": "x", "output_length": 1}', ""]
)
def test_other_lines_are_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(line)
    with pytest.raises(DataError):
        read_trace(tmp_path / "trace.jsonl")
    with pytest.raises(DataError, match="azure-code"):
        read_trace(tmp_path / "none.jsonl")
