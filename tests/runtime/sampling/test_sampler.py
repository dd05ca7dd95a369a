"""Tokens follow the distribution whatever the batch, and a step is read back once."""

import pytest
import torch
from exact_sampling import chi_square, exact_distribution
from torch.overrides import TorchFunctionMode

from runtime.core.batch import SamplingMetadata
from runtime.core.request import SamplingParams
from runtime.sampling.sampler import draw_tokens, probabilities, sample_tokens

VOCAB = 20


def logits(rows: int = 1, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def draw(seed: int = 0, position: int = 0, **options) -> SamplingMetadata:
    return SamplingMetadata(SamplingParams(**options), seed, position)


CASES = {
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 2": {"temperature": 2.0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8, "temperature": 1.5},
    "min-p": {"min_p": 0.05},
    "all": {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("varying", ["position", "seed"])
@pytest.mark.parametrize("name", CASES)
def test_tokens_follow_the_distribution(name, varying):
    params = SamplingParams(**CASES[name])
    row = logits()
    tokens: list[int] = []
    for start in range(0, 20_000, 4_000):
        draws = [
            SamplingMetadata(params, *((n, 3) if varying == "seed" else (3, n))) for n in range(start, start + 4_000)
        ]
        tokens += draw_tokens(row.expand(4_000, -1), draws, truncated=True).tolist()
    assert abs(chi_square(tokens, exact_distribution(row[0], draws[0]))) < 5


def test_a_wrong_distribution_is_noticed():
    draws = [draw(seed=3, position=n) for n in range(20_000)]
    tokens = draw_tokens(logits().expand(20_000, -1), draws, truncated=False).tolist()
    assert chi_square(tokens, (logits()[0].double() / 1.2).softmax(0)) > 20


def test_truncation_that_truncates_nothing_changes_nothing():
    rows, draws = logits(50), [draw(seed=n, position=n) for n in range(50)]
    free = draw_tokens(rows, draws, truncated=False)
    assert torch.equal(draw_tokens(rows, draws, truncated=True), free)


def test_batch_composition_does_not_matter():
    rows = logits(6)
    draws = [
        draw(seed=1, position=10, logprobs=3),
        draw(temperature=0),
        draw(seed=2, position=4, top_k=3),
        draw(seed=1, position=11, top_p=0.7, logprobs=0),
        draw(seed=5, position=10, min_p=0.2, temperature=3.0),
        draw(seed=6, temperature=0.01),
    ]
    together = sample_tokens(rows, draws)
    alone = [sample_tokens(rows[n : n + 1], [draws[n]])[0] for n in range(6)]
    assert together == alone
    order = [4, 2, 0, 5, 3, 1]
    assert sample_tokens(rows[order], [draws[n] for n in order]) == [together[n] for n in order]


def test_seeds_and_positions_make_a_difference():
    rows = torch.zeros(100, VOCAB)
    tokens = [sample_tokens(rows, [draw(seed=s, position=p) for p in range(100)]) for s in (1, 1, 2)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert len({token.token_id for token in tokens[0]}) > 10


def test_greedy_takes_the_first_of_equal_logits():
    row = torch.tensor([[1.0, 5.0, 2.0, 5.0]])
    assert sample_tokens(row, [draw(temperature=0, seed=9)])[0].token_id == 1


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperatures_too_small_for_the_dtype_are_as_good_as_greedy(temperature, options, dtype):
    rows = logits(4, vocab=200).to(dtype)
    rows[0, 3] = 0.0
    draws = [draw(position=position, temperature=temperature, **options) for position in range(4)]
    assert [token.token_id for token in sample_tokens(rows, draws)] == rows.argmax(-1).tolist()
    assert torch.equal(probabilities(rows, draws).argmax(-1), rows.argmax(-1))
    assert probabilities(rows, draws).amax(-1).tolist() == [1.0] * 4


def test_logprobs_are_of_the_raw_distribution():
    row = logits()
    token = sample_tokens(row, [draw(seed=4, temperature=0.3, top_k=2, logprobs=4)])[0]
    expected = row[0].log_softmax(0)
    assert token.logprobs.logprob == pytest.approx(expected[token.token_id].item(), abs=1e-6)
    ids = [token_id for token_id, _ in token.logprobs.top]
    assert ids == expected.argsort(descending=True)[:4].tolist()
    assert [value for _, value in token.logprobs.top] == pytest.approx(expected[ids].tolist(), abs=1e-6)


def test_greedy_logprob_is_exactly_the_largest():
    token = sample_tokens(logits(), [draw(temperature=0, logprobs=1)])[0]
    assert token.logprobs.logprob == token.logprobs.top[0][1]


@pytest.mark.parametrize("number", [0, 20])
def test_number_of_alternatives(number):
    assert len(sample_tokens(logits(), [draw(logprobs=number)])[0].logprobs.top) == number
    assert sample_tokens(logits(), [draw()])[0].logprobs is None


def test_more_alternatives_than_tokens():
    assert len(sample_tokens(logits(vocab=5), [draw(logprobs=20)])[0].logprobs.top) == 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad, temperature):
    rows = logits(3)
    draws = [draw(seed=n, temperature=temperature, logprobs=1) for n in range(3)]
    good = sample_tokens(rows, draws)
    rows[1, 7] = bad
    found = sample_tokens(rows, draws)
    assert [found[0], found[2]] == [good[0], good[2]]
    assert (found[1].token_id, found[1].logprobs) == (-1, None)
    assert "not finite" in found[1].error


def test_float64_logits_stay_float64():
    row = logits().double()
    row[0, 3], row[0, 4] = 50.0, 50.0 + 1e-10
    assert sample_tokens(row, [draw(temperature=0)])[0].token_id == 4


READS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero", "unique"}
LARGE_VOCAB = 1000


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


def spread_logits(rows: int, spread: float = 4.0) -> torch.Tensor:
    """In float64, which no compiled code draws from."""
    return spread * torch.randn(rows, LARGE_VOCAB, generator=torch.Generator().manual_seed(0)).double()


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
        tokens = sample_tokens(spread_logits(len(chosen)), chosen)
    assert counter.reads == ["tolist"]
    assert all(0 <= token.token_id < LARGE_VOCAB for token in tokens)


def test_rows_beyond_the_likely_tokens_are_drawn_again_and_no_others():
    chosen = draws({"top_k": 400, "temperature": 5.0}, {"top_k": 3}, {}, {"temperature": 0}, {"top_p": 0.99999})
    rows = spread_logits(len(chosen), spread=0.1)
    with ReadCounter() as counter:
        together = sample_tokens(rows, chosen)
    assert counter.reads == ["tolist", "__bool__", "tolist"]
    assert together == [sample_tokens(rows[n : n + 1], [draw])[0] for n, draw in enumerate(chosen)]


def test_errors_come_with_the_tokens():
    chosen = [
        SamplingMetadata(SamplingParams(), 0, 1),
        SamplingMetadata(SamplingParams(top_k=200), 1, 1),
        SamplingMetadata(SamplingParams(temperature=0), 2, 1),
        SamplingMetadata(SamplingParams(), 3, 1, mask=b"\0" * (LARGE_VOCAB // 8)),
        SamplingMetadata(SamplingParams(top_p=0.5), 4, 1, mask=b"\0" * (LARGE_VOCAB // 8)),
    ]
    rows = spread_logits(5)
    rows[0, 7], rows[1, 7], rows[2, 7] = float("nan"), float("inf"), float("-inf")
    with ReadCounter() as counter:
        tokens = sample_tokens(rows, chosen)
    assert counter.reads == ["tolist"]
    assert [token.token_id for token in tokens] == [-1] * 5
    assert ["not finite" in token.error for token in tokens] == [True] * 3 + [False] * 2
    assert ["allows no token" in token.error for token in tokens] == [False] * 3 + [True] * 2
