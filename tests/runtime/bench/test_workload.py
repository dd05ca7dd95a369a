"""Workloads: exact lengths, the same for a seed, and arrivals that are a Poisson process."""

import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from compress.common.errors import DataError
from runtime.bench.load import Lengths, Workload, python_manual, read_prompts

TEXT = list(range(1000))


@pytest.mark.parametrize(("text", "low", "high"), [("128", 128, 128), ("32:256", 32, 256), ("1:1", 1, 1)])
def test_lengths(text: str, low: int, high: int) -> None:
    assert Lengths.parse(text) == Lengths(low, high)
    assert Lengths.parse(str(Lengths(low, high))) == Lengths(low, high)


@pytest.mark.parametrize("text", ["", "0", "9:3", "a", "3:x", "-4", "1:2:3"])
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(ValueError, match=f"{text[-1:]}'"):
        Lengths.parse(text)


def test_prompts_have_the_lengths_asked_for_and_share_the_prefix() -> None:
    workload = Workload(Lengths(5, 40), Lengths(3, 9), 200, shared_prefix=17, seed=4)
    jobs = workload.from_text(TEXT)
    prompts = [job.body["prompt"] for job in jobs]
    assert {len(prompt) - 17 for prompt in prompts} == set(range(5, 41))
    assert {job.body["max_tokens"] for job in jobs} == set(range(3, 10))
    assert len({tuple(prompt[:17]) for prompt in prompts}) == 1
    assert len({tuple(prompt[17:22]) for prompt in prompts}) > 100
    assert all(job.body["ignore_eos"] and job.path == "/v1/completions" for job in jobs)


def test_a_seed_gives_the_same_jobs_and_the_warm_up_gives_others() -> None:
    workload = Workload(Lengths(5, 40), Lengths(3, 9), 20, shared_prefix=16, seed=1)
    assert workload.from_text(TEXT) == workload.from_text(TEXT)
    other = Workload(Lengths(5, 40), Lengths(3, 9), 20, shared_prefix=16, seed=2)
    assert other.from_text(TEXT) != workload.from_text(TEXT)
    warm_up = workload.from_text(TEXT, 4, seed_offset=1)
    assert len(warm_up) == 4
    assert warm_up[0].body["prompt"][:16] != workload.from_text(TEXT)[0].body["prompt"][:16]


def test_text_shorter_than_a_prompt_is_repeated() -> None:
    job = Workload(Lengths(50, 50), Lengths(1, 1), 1).from_text([1, 2, 3])[0]
    assert len(job.body["prompt"]) == 50
    assert set(job.body["prompt"]) == {1, 2, 3}
    with pytest.raises(DataError, match="--prompts FILE"):
        Workload(Lengths(5, 5), Lengths(1, 1), 1).from_text([])


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = Workload(Lengths(1, 1), Lengths(1, 1), 4001, seed=3).arrivals(20.0)
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert arrivals[0] == 0
    assert len(arrivals) == 4001
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.1)  # of an exponential: its mean
    assert arrivals == Workload(Lengths(1, 1), Lengths(1, 1), 4001, seed=3).arrivals(20.0)


def test_prompt_files(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}], "max_tokens": 3}\n')
    jobs = Workload(Lengths(1, 1), Lengths(8, 8), 3).from_prompts(read_prompts(file))
    assert [job.path for job in jobs] == ["/v1/completions", "/v1/chat/completions", "/v1/completions"]
    assert [job.body["max_tokens"] for job in jobs] == [8, 3, 8]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", r'prompts\.jsonl .*{"prompt":'),
        ('{"prompt": "a"}\n{', ":2"),
        ('{"text": "a"}', ":1"),
        ('{"prompt": "a", "messages": []}', ":1"),
        ('{"prompt": "a", "n": 2}', "'n'"),
    ],
)
def test_wrong_prompt_files_are_refused_by_line(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=words):
        read_prompts(file)
    with pytest.raises(DataError, match=r"nothing.*--prompts"):
        read_prompts(tmp_path / "nothing")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(DataError, match="UTF-8"):
        read_prompts(tmp_path / "bytes")


def test_the_manual_is_real_text() -> None:
    assert len(python_manual()) > 200_000
