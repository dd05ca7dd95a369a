"""Captured steps that are submitted before the last one is read give the same answers, here without a GPU: what is
computed late there is computed at once, into the same tensors."""

from collections.abc import Callable

import pytest
import torch
from engines import drain
from tiny_configs import DELTA_NET
from tiny_models import save_tiny_model
from unrecorded_steps import PlainSampling, runner_on_cpu

from runtime.backends.backend import INFINITE, UNDECIDED
from runtime.core.config import RuntimeConfig
from runtime.core.request import Delta, Request, SamplingParams, Sequence, TokenLogprobs
from runtime.core.step import ScheduledSequence, StepPlan
from runtime.engine.engine import Engine
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model
from runtime.runner.pending_step import PendingStep, TokenCopies
from runtime.sampling.sampler import RowLogprobs

SIZES = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 6, "prefill_chunk": 8}


class HesitantSampling(PlainSampling):
    """Leaves tokens of one request to a second look."""

    def sample(self, logits, scores, tensors, tokens) -> None:
        super().sample(logits, scores, tensors, tokens)
        tokens.masked_fill_((tensors.seeds == 5) & (tensors.positions % 3 == 0), UNDECIDED)


def capture_after_a_warm_up(compute):
    """Computes a step once before it is recorded, which replaces what the step before has left."""
    compute()
    return compute


def requests() -> list[tuple[str, list[int], SamplingParams]]:
    """Greedy, random and truncated ones, most with log-probabilities, penalties or a bias, of many lengths."""
    return [
        (
            str(number),
            [(7 * number + place) % 100 for place in range(1 + 2 * number)],
            SamplingParams(
                logit_bias=((number, 3.5),) if number == 4 else (),
                max_tokens=4 + 3 * number,
                temperature=number % 3 / 2,
                top_p=0.9 if number % 4 == 3 else 1,
                seed=number,
                logprobs=(None, 2, 0, 5)[number % 4],
                presence_penalty=(0, 0, 1)[number % 3],
                frequency_penalty=(0, 0.5)[number % 2],
                repetition_penalty=(1, 1.3)[number % 5 == 0],
                ignore_eos=number % 2 == 0,
            ),
        )
        for number in range(10)
    ]


def serve(
    decoder, sampling: PlainSampling, *, captures: bool = True, **options: object
) -> tuple[dict[str, list[Delta]], Engine]:
    config = RuntimeConfig(**SIZES, **options)
    runner = runner_on_cpu(decoder, config, None, draws=True)
    runner.sampler.fused.sample = sampling.sample
    if captures:
        runner.capture_steps(capture_after_a_warm_up)
    engine = Engine(runner, None, config)
    for name, prompt, params in requests():
        engine.add_request(prompt, params, name)
    return drain(engine), engine


@pytest.mark.parametrize("sampling", [pytest.param(PlainSampling(), marks=pytest.mark.full), HesitantSampling()])
def test_answers_are_those_of_steps_that_are_read_at_once(tiny, sampling: PlainSampling, monkeypatch):
    monkeypatch.setattr("runtime.memory.plan.MOST_PROMPT_ROWS", 8)  # some steps with prompts have more
    expected, serial = serve(tiny, sampling, overlap=False)
    found, overlapped = serve(tiny, sampling, overlap=True)
    if isinstance(sampling, HesitantSampling):
        assert overlapped.metrics.steps_by_overlap_total["a token was not decided"]
    else:
        paths = overlapped.metrics.steps_by_path_total
        assert paths.keys() == serial.metrics.steps_by_path_total.keys() == {"recorded", "prompts are computed"}
    compare(found, expected)
    assert overlapped.metrics.steps_by_overlap_total["overlapped"] > 10
    assert not serial.metrics.steps_by_overlap_total


def compare(found: dict[str, list[Delta]], expected: dict[str, list[Delta]]) -> None:
    """Log-probabilities may differ by roundings: a sequence that ends keeps its row for one step more."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert [d.token_ids for d in found[name] if d.token_ids] == [d.token_ids for d in expected[name] if d.token_ids]
        assert found[name][-1].finish_reason == expected[name][-1].finish_reason
        logprobs = [[each for delta in deltas[name] for each in delta.logprobs] for deltas in (found, expected)]
        assert [each.logprob for each in logprobs[0]] == pytest.approx([each.logprob for each in logprobs[1]])
        assert [[i for i, _ in each.top] for each in logprobs[0]] == [[i for i, _ in each.top] for each in logprobs[1]]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Three recurrent layers and one of attention, in float64."""
    folder = save_tiny_model(tmp_path_factory.mktemp("models") / "hybrid", "qwen3_5_text", **DELTA_NET)
    return load_model(folder, dtype="float64")


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize(
    ("options", "has_states"),
    [
        ({}, False),
        ({"attention_window": 6}, False),
        ({"kv_offload_bytes": 2**20}, False),
        ({}, True),
        ({"kv_offload_bytes": 2**20, "num_state_slots": 6}, True),
    ],
    ids=["plain", "window", "offload", "states", "states-offload"],
)
def test_only_the_end_of_all_and_open_truncation_over_states_leave_a_gap(
    tiny, hybrid, options: dict, has_states: bool, captures: bool
):
    """Log-probabilities, penalties, windows, blocks in host memory and recurrent states do not, twice in a row."""
    answers, decoder = [], hybrid if has_states else tiny
    for overlap in (False, True):
        found, engine = serve(decoder, PlainSampling(), overlap=overlap, captures=captures, **options)
        for name, prompt, params in requests():
            engine.add_request(prompt, params, name)
        answers.append((found, drain(engine)))
    for found, expected in zip(*reversed(answers), strict=True):
        compare(found, expected)
    reasons = dict(engine.metrics.steps_by_overlap_total)
    assert reasons.pop("overlapped") > (15 if has_states else 60)
    assert reasons.keys() <= {"every sequence ends", *(["a token may not be decided"] if has_states else [])}
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def entries(*ids: str) -> list[ScheduledSequence]:
    return [ScheduledSequence(Sequence(Request(name, (1,), SamplingParams(), 0), [1]), 0, 1) for name in ids]


def test_a_late_step_leaves_out_what_is_not_decided_and_says_what_is_not_finite():
    def read(*chosen: int, is_late: bool) -> dict[str, object]:
        sample: Callable[[torch.Tensor], dict] = lambda tokens: {"looked at": tokens.tolist()}  # noqa: E731
        logprobs = lambda: [RowLogprobs([0, 2], torch.tensor([-0.5, 0]), torch.zeros(2, 0), torch.zeros(2, 0))]  # noqa: E731
        step = PendingStep(entries("a", "b", "c"), lambda: torch.tensor(chosen), sample, "recorded", logprobs)
        if is_late:
            step.leave()
        return step.result().tokens

    found = read(7, INFINITE, UNDECIDED, is_late=True)
    assert found.keys() == {"a", "b"}
    assert [found["a"][0].token_id, found["b"][0].token_id] == [7, -1]
    assert (found["a"][0].logprobs, found["b"][0].logprobs) == (TokenLogprobs(-0.5), None)
    assert "not finite" in found["b"][0].error
    assert read(7, 8, UNDECIDED, is_late=False) == {"looked at": [7, 8, UNDECIDED]}


def test_tokens_of_two_steps_are_kept():
    copies, tokens = TokenCopies(4, torch.device("cpu")), torch.tensor([1, 2, 3])
    first = copies.send(tokens)
    tokens += 10
    second = copies.send(tokens[:2])
    tokens += 10
    assert (first().tolist(), second().tolist()) == ([1, 2, 3], [11, 12])


@pytest.mark.parametrize("most_rows", [0, 11, 512])
@pytest.mark.parametrize("prompts", [(False, False), (True, False), (False, True), (True, True)])
def test_a_step_takes_its_tokens_from_the_rows_of_the_one_before(
    tiny, prompts: tuple[bool, bool], most_rows: int, monkeypatch
):
    """Also where that had more rows, where its kind is captured in between, and where a prompt before the others
    changes the order of one of them, or of both, in captured and in eager steps."""
    monkeypatch.setattr("runtime.memory.plan.MOST_PROMPT_ROWS", most_rows)
    config = RuntimeConfig(**SIZES)

    def sequences() -> list[Sequence]:
        texts = [[3, 1, 2], [4, 1], [5, 9, 2, 6], list(range(8)), list(range(10, 17))]
        made = [Sequence(Request(str(p), tuple(p), SamplingParams(temperature=0), 0), list(p)) for p in texts]
        for index, sequence in enumerate(made):
            sequence.block_ids = [3 * index, 3 * index + 1, 3 * index + 2]
        return made

    def prompt_of(found: list[Sequence], step: int) -> list[ScheduledSequence]:
        return [ScheduledSequence(found[3 + step], 0, found[3 + step].num_tokens)] * prompts[step]

    def prepare(found: list[Sequence]):
        runner = runner_on_cpu(tiny, config, None, draws=True)
        runner.capture_steps(capture_after_a_warm_up)
        for sequence in found[:3]:
            runner.execute(StepPlan((ScheduledSequence(sequence, 0, sequence.num_tokens - 1),)))
        last = [ScheduledSequence(sequence, sequence.num_tokens - 1, 1) for sequence in found[:3]]
        return runner, runner.submit(StepPlan((*prompt_of(found, 0), *last)))

    def append(found: list[Sequence], tokens: dict) -> None:
        for sequence in found:
            sequence.token_ids += [token.token_id for token in tokens.get(sequence.id, [])]

    known, unknown = sequences(), sequences()
    runner, step = prepare(known)
    append(known, step.result().tokens)
    order = [2, 0, *[3] * prompts[0]]
    again = [ScheduledSequence(known[n], known[n].num_tokens - 1, 1) for n in order]
    expected = runner.execute(StepPlan((*prompt_of(known, 1), *again))).tokens

    runner, step = prepare(unknown)
    assert step.feeds_next
    row_of = {2: 2 + prompts[0], 0: prompts[0], 3: 0}
    again = [ScheduledSequence(unknown[n], unknown[n].num_tokens, 1, source_row=row_of[n]) for n in order]
    following = runner.submit(StepPlan((*prompt_of(unknown, 1), *again)))
    append(unknown, step.result().tokens)
    assert [s.token_ids for s in unknown] == [s.token_ids for s in known]
    assert following.result().tokens == expected
