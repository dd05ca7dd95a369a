"""Windows of evaluation text; perplexity and KL against figures computed another way."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from calibration.sources import TextSource
from compress.common.errors import CheckpointError, DataError, NumericsError
from compress.evaluate import perplexity, positions
from compress.evaluate.perplexity import Windows, cut_windows, evaluate
from compress.evaluate.positions import Positions
from compress.evaluate.scorers import Scorer

VOCABULARY = 7


class TableScorer(Scorer):
    """The logits after a token are a row of a table: a bigram model."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.vocab_size = table, table.shape[-1]
        self.batches: list[int] = []
        self.logits_at_once = 0

    def states(self, tokens: Tensor) -> Tensor:
        self.batches.append(len(tokens))
        return tokens

    def head(self, states: Tensor) -> Tensor:
        logits = self.table[states]
        self.logits_at_once = max(self.logits_at_once, logits.numel())
        return logits


def random_table(seed: int, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_windows(count: int, length: int) -> Windows:
    tokens = torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0))
    return Windows(tokens, "random", "random", "")


def test_uniform_model_has_the_vocabulary_as_perplexity():
    result = evaluate(TableScorer(torch.zeros(VOCABULARY, VOCABULARY)), random_windows(3, 5))
    assert result.perplexity == pytest.approx(VOCABULARY)
    assert result.tokens == 3 * 4
    assert result.baseline_perplexity is None
    assert result.kl_mean is None


def test_perplexity_and_divergence_equal_the_sums_written_out():
    windows = random_windows(9, 6)
    model, baseline = random_table(1), random_table(2)
    result = evaluate(TableScorer(model), windows, TableScorer(baseline))
    losses, divergences, agreements, accepted = [], [], [], []
    for row in windows.tokens.tolist():
        for current, following in itertools.pairwise(row):
            q, p = model[current].softmax(0), baseline[current].softmax(0)
            losses.append(-math.log(q[following]))
            divergences.append(sum(float(p[i]) * math.log(p[i] / q[i]) for i in range(VOCABULARY)))
            agreements.append(int(p.argmax()) == int(q.argmax()))
            accepted.append(sum(min(float(p[i]), float(q[i])) for i in range(VOCABULARY)))
    assert result.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)))
    assert result.kl_mean == pytest.approx(sum(divergences) / len(divergences))
    assert result.kl_p999 == pytest.approx(max(divergences))
    assert result.top1_agreement == pytest.approx(sum(agreements) / len(agreements))
    assert result.flips == pytest.approx(1 - sum(agreements) / len(agreements))
    assert result.acceptance == pytest.approx(sum(accepted) / len(accepted))
    for error, each in (
        (result.kl_standard_error, divergences),
        (result.acceptance_standard_error, accepted),
        (result.flips_standard_error, agreements),
    ):
        per_window = torch.tensor(each, dtype=torch.float64).view(9, 5).mean(1)
        assert error == pytest.approx(float(per_window.std()) / 3)


def test_a_model_does_not_diverge_from_itself():
    table = random_table(3)
    result = evaluate(TableScorer(table), random_windows(4, 8), TableScorer(table.clone()))
    assert result.kl_mean == 0
    assert result.kl_p999 == 0
    assert result.top1_agreement == 1
    assert result.acceptance == pytest.approx(1)
    assert result.flips == result.flips_standard_error == result.kl_p999_standard_error == 0
    assert result.perplexity == result.baseline_perplexity


def test_the_quantile_leaves_out_one_position_in_a_thousand():
    # 2,000 positions: two of them follow token 1, where the models differ; 0.1 % are two positions.
    table = torch.zeros(2, 2, dtype=torch.float64)
    other = table.clone()
    other[1, 0] = 3.0
    tokens = torch.zeros(1, 2001, dtype=torch.int64)
    tokens[0, [10, 20]] = 1
    result = evaluate(TableScorer(table), Windows(tokens, "", "", ""), TableScorer(other))
    assert result.kl_p999 == 0
    tokens[0, 30] = 1
    assert evaluate(TableScorer(table), Windows(tokens, "", "", ""), TableScorer(other)).kl_p999 > 0.5


def test_batches_grow_to_the_memory_allowed_and_change_nothing(monkeypatch: pytest.MonkeyPatch):
    windows, seen = random_windows(10, 6), []
    small, large = TableScorer(random_table(1)), TableScorer(random_table(1))
    alone = evaluate(small, windows, on_progress=lambda done, total: seen.append((done, total)))
    monkeypatch.setattr(perplexity, "BATCH_LOGITS", 2 * 5 * VOCABULARY)
    pairs = evaluate(large, windows)
    assert small.batches == [1, 9]
    assert large.batches == [1, 2, 2, 2, 2, 1]
    assert seen == [(1, 10), (10, 10)]
    assert pairs.perplexity == pytest.approx(alone.perplexity, rel=1e-12)


def test_logits_of_one_window_are_made_a_slice_at_a_time(monkeypatch: pytest.MonkeyPatch):
    windows = random_windows(3, 33)
    whole = evaluate(TableScorer(random_table(1)), windows, TableScorer(random_table(2)))
    monkeypatch.setattr(perplexity, "BATCH_LOGITS", 5 * VOCABULARY)
    model, baseline = TableScorer(random_table(1)), TableScorer(random_table(2))
    assert evaluate(model, windows, baseline).to_dict() == pytest.approx(whole.to_dict(), rel=1e-12)
    assert model.batches == [1, 1, 1]
    assert model.logits_at_once == baseline.logits_at_once == 5 * VOCABULARY


def test_one_window_has_no_standard_error():
    result = evaluate(TableScorer(random_table(1)), random_windows(1, 9), TableScorer(random_table(2)))
    errors = {value for name, value in result.to_dict().items() if name.endswith("standard_error")}
    assert errors == {None}


def test_the_error_of_the_quantile_is_its_spread_over_samples_of_windows():
    """Windows of one value each, by rank: the quantile of a resample is one of the largest values."""
    values = torch.arange(400, dtype=torch.float64).unsqueeze(1)
    draws = torch.randint(400, (4000, 400), generator=torch.Generator().manual_seed(5))
    expected = torch.stack([values[each].flatten().kthvalue(400).values for each in draws]).std()
    found = positions.summarize(Positions(*[values] * 5), True).kl_p999_standard_error
    assert found == pytest.approx(float(expected), rel=0.2)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_figures_of_a_head_at_another_temperature_have_a_closed_form(temperature: float):
    """p is proportional to exp(l), q to exp(l / t): KL is the mean of l (1 - 1/t) under p, and a difference of
    log-sums; the order of tokens stays."""
    table, windows = random_table(4), random_windows(6, 12)
    found = evaluate(TableScorer(table / temperature), windows, TableScorer(table))
    p, sums = table.softmax(-1), (table / temperature).logsumexp(-1) - table.logsumexp(-1)
    expected = (p * table).sum(-1) * (1 - 1 / temperature) + sums
    assert found.kl_mean == pytest.approx(float(expected[windows.tokens[:, :-1]].mean()), abs=1e-12)
    assert found.flips == 0
    assert (found.acceptance < 1 - 1e-3) == (temperature != 1)


def test_vocabularies_that_differ_by_padding_are_compared_on_the_common_part():
    table, windows = random_table(1), random_windows(4, 8)
    padded = torch.cat((table, torch.full((VOCABULARY, 2), 3.0, dtype=torch.float64)), 1)
    known = replace(windows, vocabulary=VOCABULARY)
    for model, baseline in ((table, padded), (padded, table)):
        found = evaluate(TableScorer(model), known, TableScorer(baseline))
        assert found.kl_mean == pytest.approx(0, abs=1e-12)
        assert found.acceptance == pytest.approx(1)
    with pytest.raises(CheckpointError, match=r" 7 .* 9"):
        evaluate(TableScorer(table), replace(windows, vocabulary=8), TableScorer(padded))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("who", ["model", "baseline"])
def test_logits_that_are_not_numbers_are_an_error(bad: float, who: str):
    broken, good = random_table(1), random_table(2)
    broken[:, 3] = bad
    model, baseline = (broken, good) if who == "model" else (good, broken)
    with pytest.raises(NumericsError, match=f"{who} .*NaN .*compress verify"):
        evaluate(TableScorer(model), random_windows(2, 4), TableScorer(baseline))


def test_another_vocabulary_is_no_baseline():
    with pytest.raises(CheckpointError, match=r" 7 .* 9\. .*--baseline") as caught:
        evaluate(TableScorer(random_table(1)), random_windows(2, 4), TableScorer(random_table(2, vocabulary=9)))
    assert "--baseline" in caught.value.remedy


BOS = 1


class Letters:
    """One token per letter; `adds_bos` decides whether a text gets a beginning token by itself."""

    eos_token_id = 2
    chat_template = None

    def __init__(self, adds_bos: bool) -> None:
        self.bos_token_id = BOS
        self.adds_bos = adds_bos

    def __len__(self) -> int:
        return 256

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        beginning = [BOS] if self.adds_bos and add_special_tokens else []
        return {"input_ids": beginning + [ord(letter) for letter in text]}


def source_of(*documents: str) -> TextSource:
    return TextSource("test", documents, "test text")


def test_windows_are_the_joined_text_in_order():
    windows = cut_windows(source_of("abc", "defg"), Letters(adds_bos=False), length=4)
    assert ["".join(map(chr, row)) for row in windows.tokens.tolist()] == ["abc\n", "\ndef"]
    assert windows.num_predicted == 2 * 3
    assert "the first 2 of 2 non-overlapping windows of 4 tokens, no BOS" in windows.protocol


def test_every_window_begins_with_bos_where_the_tokenizer_adds_one():
    windows = cut_windows(source_of("abcdefgh"), Letters(adds_bos=True), length=4)
    assert windows.tokens.tolist() == [[BOS, *map(ord, "abc")], [BOS, *map(ord, "def")]]
    assert f"token {BOS} before each window" in windows.protocol


def test_max_tokens_keeps_the_first_windows():
    windows = cut_windows(source_of("abcdefghij"), Letters(adds_bos=False), length=2, max_tokens=5)
    assert ["".join(map(chr, row)) for row in windows.tokens.tolist()] == ["ab", "cd"]
    assert "the first 2 of 5" in windows.protocol
    assert len(cut_windows(source_of("abcdefghij"), Letters(adds_bos=False), length=4, max_tokens=1).tokens) == 1


@pytest.mark.parametrize("adds_bos", [False, True])
def test_too_short_a_text_is_refused_with_a_length_that_works(adds_bos: bool):
    tokenizer = Letters(adds_bos)
    with pytest.raises(DataError, match=r"\b5 .*\b16\b") as caught:
        cut_windows(source_of("abcde"), tokenizer, length=16)
    advised = 6 if adds_bos else 5
    assert f"--max-seq-length {advised}" in caught.value.remedy
    assert len(cut_windows(source_of("abcde"), tokenizer, length=advised).tokens) == 1


def test_a_window_that_predicts_nothing_is_refused():
    with pytest.raises(DataError, match=r" 1 .*--max-seq-length 2 "):
        cut_windows(source_of("abc"), Letters(adds_bos=False), length=1)
    with pytest.raises(DataError, match="--tokens 0"):
        cut_windows(source_of("abc"), Letters(adds_bos=False), length=2, max_tokens=0)
