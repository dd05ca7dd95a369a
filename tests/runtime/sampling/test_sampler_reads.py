"""Number of device-to-host reads in sampling: a GPU waits at each."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from runtime.core.batch import SamplingMetadata
from runtime.core.request import SamplingParams
from runtime.sampling.sampler import sample_tokens

READS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero", "unique"}
VOCAB = 1000


class ReadCounter(TorchFunctionMode):
    """Counts what a program asks tensors for."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in READS:
            self.reads.append(name)
        return function(*args, **(kwargs or {}))


def logits(rows: int, spread: float = 4.0) -> torch.Tensor:
    """In float64, which no compiled code draws from."""
    return spread * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)).double()


def draws(*options: dict) -> list[SamplingMetadata]:
    return [SamplingMetadata(SamplingParams(**each), seed, 10 + seed) for seed, each in enumerate(options)]


COMMON = {
    "greedy": [{"temperature": 0}] * 4,
    "random": [{"temperature": 0.7}, {}, {"temperature": 2.0}],
    "truncated": [{"top_k": 40}, {"top_p": 0.5}, {"min_p": 0.1, "top_k": 100}],
    "mixed": [{"temperature": 0}, {}, {"top_k": 3}, {"temperature": 0}],
    "biased": [{"logit_bias": ((3, 5.0),)}, {"temperature": 0}],
}


@pytest.mark.parametrize("name", COMMON)
def test_one_read_for_a_step(name):
    chosen = draws(*COMMON[name])
    with ReadCounter() as counter:
        tokens = sample_tokens(logits(len(chosen)), chosen)
    assert counter.reads == ["tolist"]
    assert all(0 <= token.token_id < VOCAB for token in tokens)


def test_rows_beyond_the_likely_tokens_are_drawn_again_and_no_others():
    chosen = draws({"top_k": 400, "temperature": 5.0}, {"top_k": 3}, {}, {"temperature": 0}, {"top_p": 0.99999})
    rows = logits(len(chosen), spread=0.1)
    with ReadCounter() as counter:
        together = sample_tokens(rows, chosen)
    assert counter.reads == ["tolist", "__bool__", "tolist"]
    assert together == [sample_tokens(rows[n : n + 1], [draw])[0] for n, draw in enumerate(chosen)]


def test_errors_come_with_the_tokens():
    chosen = [
        SamplingMetadata(SamplingParams(), 0, 1),
        SamplingMetadata(SamplingParams(top_k=200), 1, 1),
        SamplingMetadata(SamplingParams(temperature=0), 2, 1),
        SamplingMetadata(SamplingParams(), 3, 1, mask=b"\0" * (VOCAB // 8)),
        SamplingMetadata(SamplingParams(top_p=0.5), 4, 1, mask=b"\0" * (VOCAB // 8)),
    ]
    rows = logits(5)
    rows[0, 7], rows[1, 7], rows[2, 7] = float("nan"), float("inf"), float("-inf")
    with ReadCounter() as counter:
        tokens = sample_tokens(rows, chosen)
    assert counter.reads == ["tolist"]
    assert [token.token_id for token in tokens] == [-1] * 5
    assert ["not finite" in token.error for token in tokens] == [True] * 3 + [False] * 2
    assert ["grammar" in token.error for token in tokens] == [False] * 3 + [True] * 2
