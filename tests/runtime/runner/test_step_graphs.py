"""Recorded steps give what ordinary steps give; here the recording is the function itself, so no GPU is needed."""

import random
import weakref
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from covering import sample
from engines import answer_all
from poisoned_memory import poison_states
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model
from unrecorded_steps import capture_nothing, runner_on_cpu

from runtime.backends.registry import records_by_layer
from runtime.core.config import RuntimeConfig
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import SampledToken, ScheduledSequence, StepPlan
from runtime.engine.engine import Engine
from runtime.model.loader import load_model
from runtime.runner.runner import ModelRunner
from runtime.runner.step_graphs import batch_sizes
from runtime.speculative.build import build_speculator

GREEDY = SamplingParams(temperature=0, max_tokens=200)
SIZES = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 6, "prefill_chunk": 8}


class Recorder:
    """Counts what is recorded; refuses after a while, as a GPU whose memory is full."""

    def __init__(self, limit: int = 100) -> None:
        self.limit, self.count = limit, 0

    def __call__(self, compute):
        if self.count == self.limit:
            raise torch.OutOfMemoryError("no memory for one more")
        self.count += 1
        return compute


def make_runner(decoder, capture=None, **options) -> ModelRunner:
    return runner_on_cpu(decoder, RuntimeConfig(**(SIZES | options)), capture)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("models") / "windowed", "mistral", sliding_window=6)
    return load_model(folder, dtype="float64")


def sequences(runner: ModelRunner, lengths: list[int]) -> list[Sequence]:
    """With all tokens but the last one computed by ordinary steps, blocks in no order."""
    chance, graphs = random.Random(0), runner.graphs
    runner.graphs = None
    blocks = chance.sample(range(runner.num_blocks), runner.num_blocks)
    found = []
    for index, length in enumerate(lengths):
        tokens = [chance.randrange(112) for _ in range(length)]
        sequence = Sequence(Request(f"s{index}", tuple(tokens), GREEDY, seed=7), tokens)
        sequence.block_ids = [blocks.pop() for _ in range(8)]
        if length > 1:
            runner.execute(StepPlan((ScheduledSequence(sequence, 0, length - 1),)))
        found.append(sequence)
    runner.graphs = graphs
    return found


@pytest.fixture
def few_prompt_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with more than 6 tokens are recorded only if all of their sequences decode."""
    monkeypatch.setattr("runtime.memory.plan.MOST_PROMPT_ROWS", 6)


def last_tokens(found: list[Sequence]) -> tuple[ScheduledSequence, ...]:
    return tuple(ScheduledSequence(sequence, sequence.num_tokens - 1, 1) for sequence in found)


def run_again(runner: ModelRunner, entries: tuple[ScheduledSequence, ...]) -> torch.Tensor:
    """Logits of a recorded step."""
    return runner.graphs.run(entries).logits.clone()


def test_sizes_hold_every_batch_and_less_than_half_is_padding():
    assert batch_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert batch_sizes(1) == (1,)
    assert batch_sizes(3) == (1, 2, 3)
    assert batch_sizes(257)[-5:] == (96, 128, 192, 256, 257)
    for smaller, larger in pairwise(batch_sizes(1000)):
        assert larger <= 2 * smaller


@pytest.mark.parametrize("model", ["tiny", "windowed"])
@pytest.mark.parametrize("lengths", [[9], [1, 30], [5, 17, 29], [3, 4, 5, 6, 7, 8]])
def test_logits_are_those_of_ordinary_steps(model, lengths, request):
    runner = make_runner(request.getfixturevalue(model), capture_nothing)
    found = sequences(runner, lengths)
    logits = run_again(runner, last_tokens(found))
    for entry, row in zip(last_tokens(found), logits, strict=True):
        ordinary: list[torch.Tensor] = []
        runner.sample = lambda entries, rows, drawn, kept=ordinary: kept.append(rows) or {}
        runner.graphs, graphs = None, runner.graphs
        runner.execute(StepPlan((entry,)))
        runner.graphs = graphs
        torch.testing.assert_close(row, ordinary[0][0], rtol=0, atol=1e-10)


def test_padding_changes_nothing(tiny):
    """Three sequences in rows for four: the same bits whatever stood in the fourth row before, and nothing is written
    but the three slots."""
    runner = make_runner(tiny, capture_nothing)
    found = sequences(runner, [5, 17, 29, 11])
    first = run_again(runner, last_tokens(found[:3]))
    runner.graphs.run(last_tokens(found))
    before = {name: tensor.clone() for name, tensor in runner.pages.memory.tensors.items()}
    assert torch.equal(run_again(runner, last_tokens(found[:3])), first)
    for name, tensor in runner.pages.memory.tensors.items():
        assert torch.equal(tensor, before[name]), name
    runner.graphs.run(last_tokens(found[1:3]))
    assert torch.equal(run_again(runner, last_tokens(found[:3])), first)


def test_shapes_and_lengths_depend_on_the_size_only(tiny):
    """So does the number of splits, which follows from them: a launch is the same for every step of a size."""
    runner = make_runner(tiny, capture_nothing)
    seen = []
    compute = runner.graphs._compute

    def watch(batch):
        (group,) = batch.groups
        seen.append((batch.token_ids.data_ptr(), group.blocks.data_ptr(), len(group.blocks), group.num_keys))
        return compute(batch)

    runner.graphs._compute = watch
    for lengths in ([5, 2, 3], [30, 1, 1], [1, 2, 3, 4]):
        runner.graphs.run(last_tokens(sequences(runner, lengths)))
    recorded_in_one_size = {each for each in seen if each[2] == seen[-1][2]}
    assert len(recorded_in_one_size) == 1
    assert seen[-1][2:] == (4 * runner.memory.blocks_per_sequence, runner.memory.blocks_per_sequence * 4)


def test_sizes_are_recorded_when_they_are_needed_and_once(tiny):
    capture = Recorder()
    runner = make_runner(tiny, capture)
    found = sequences(runner, [5, 6, 7])
    assert capture.count == 0
    for count, recorded in ((1, 1), (3, 2), (2, 3), (3, 3), (1, 3)):
        output = runner.execute(StepPlan(last_tokens(found[:count])))
        assert (output.path, capture.count) == ("recorded", recorded)
        assert output.tokens.keys() == {sequence.id for sequence in found[:count]}


def test_what_is_not_recorded_says_why(tiny, few_prompt_tokens):
    runner = make_runner(tiny, capture_nothing)
    found = sequences(runner, [5, 6, 7, 8, 9, 10])
    entries = last_tokens(found)

    def reason(*entries: ScheduledSequence) -> str:
        return runner.graphs.unsupported_reason(entries)

    assert not reason(*entries)
    assert reason(*entries, entries[0]) == "too many sequences"
    prompt = ScheduledSequence(found[5], 4, 6)
    assert not reason(prompt)
    assert reason(entries[0], prompt) == "prompts are computed", "seven tokens"
    assert not reason(*entries[1:], ScheduledSequence(found[0], 3, 1)), "the middle of a prompt"
    found[0].draft_token_ids = [3]
    assert reason(ScheduledSequence(found[0], 4, 2)) == "too many drafts", "none are planned for"
    assert reason(ScheduledSequence(found[0], 4, 2), replace(prompt, num_tokens=3)) == "drafts and prompts are computed"
    scored = replace(found[1].request, sampling=SamplingParams(prompt_logprobs=0))
    assert reason(ScheduledSequence(Sequence(scored, found[1].token_ids), 1, 1)) == "prompts are looked at"


def test_drafts_are_recorded_where_padding_does_not_outweigh_them(tiny):
    """A sequence with a long draft among many without is not."""
    runner = make_runner(tiny, capture_nothing, speculative_model="ngram", num_speculative_tokens=15, max_num_seqs=20)
    assert runner.graphs.draft_sizes == (0, 1, 2, 4, 8, 15)
    found = sequences(runner, [5] * 7)
    found[0].draft_token_ids = [3] * 15
    (drafted, *singles) = last_tokens(found)
    drafted = replace(drafted, num_tokens=16)
    assert not runner.graphs.unsupported_reason((drafted, *singles[:3]))
    assert runner.execute(StepPlan((drafted, *singles))).path == "too many drafts"
    for sequence in found:
        sequence.draft_token_ids = [3] * 15
    assert not runner.graphs.unsupported_reason([replace(entry, num_tokens=16) for entry in (drafted, *singles)])


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("model", ["tiny", "windowed"])
def test_decodes_beside_a_prompt_run_in_one_pass_with_it(model, draws, is_recorded, request, monkeypatch):
    """In any order, recorded or not, and every sequence gets the token it gets alone."""
    monkeypatch.setattr("runtime.memory.plan.MOST_PROMPT_ROWS", 9 if is_recorded else 8)
    runner = runner_on_cpu(request.getfixturevalue(model), RuntimeConfig(**SIZES), capture_after_warm_ups, draws=draws)
    found = sequences(runner, [5, 6, 7, 8])
    prompt, whole = ScheduledSequence(found[0], 2, 3), ScheduledSequence(found[1], 1, 4)
    entries = (prompt, *last_tokens(found[2:]), whole)
    expected = {entry.sequence.id: tokens_alone(runner, entry) for entry in entries}
    output = runner.execute(StepPlan(entries))
    assert output.path == ("recorded" if is_recorded else "prompts are computed")
    passes = count_passes(runner)
    assert runner.execute(StepPlan(entries)).tokens == output.tokens
    assert len(passes) == 1
    assert output.tokens == {name: tokens for name, tokens in expected.items() if tokens}
    assert output.tokens.keys() == {"s0", "s2", "s3"}


def count_passes(runner: ModelRunner) -> list[int]:
    """Tokens of each forward pass from now on."""
    passes: list[int] = []
    forward = runner._forward
    runner._forward = lambda batch: passes.append(len(batch.token_ids)) or forward(batch)
    return passes


def tokens_alone(runner: ModelRunner, entry: ScheduledSequence) -> list[SampledToken]:
    """Tokens of an entry in an ordinary step of its own."""
    runner.graphs, graphs = None, runner.graphs
    output = runner.execute(StepPlan((entry,)))
    runner.graphs = graphs
    return output.tokens.get(entry.sequence.id, [])


def test_padding_of_a_step_with_prompts_changes_nothing(tiny):
    """Whatever stood in the rows before, and nothing is written but the slots of the tokens."""
    runner = make_runner(tiny, capture_nothing)
    found = sequences(runner, [5, 17, 29, 11])
    entries = (ScheduledSequence(found[0], 1, 4), *last_tokens(found[1:3]), ScheduledSequence(found[3], 2, 6))
    first = run_again(runner, entries)
    assert len(first) == 3, "the middle of a prompt has no logits"
    runner.graphs.run((*last_tokens(found[:2]), ScheduledSequence(found[2], 3, 26)))
    before = {name: tensor.clone() for name, tensor in runner.pages.memory.tensors.items()}
    torch.testing.assert_close(run_again(runner, entries), first, rtol=0, atol=1e-10)
    for name, tensor in runner.pages.memory.tensors.items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-10, msg=name)


def test_steps_with_prompts_are_recorded_by_their_number_of_tokens(tiny):
    capture = Recorder()
    runner = make_runner(tiny, capture)
    assert runner.graphs.prompt_sizes == (32, 48, 64, 96, 128, 192, 256, 384, 512)
    assert make_runner(tiny, capture, max_num_batched_tokens=7).graphs.prompt_sizes == (7,)
    (first, second) = sequences(runner, [31, 20])
    for length, recorded in ((31, 1), (12, 1), (2, 1)):
        runner.execute(StepPlan((ScheduledSequence(first, 0, length),)))
        assert capture.count == recorded
    runner.execute(StepPlan((ScheduledSequence(first, 0, 28), ScheduledSequence(second, 15, 5))))
    assert capture.count == 2


def test_where_recording_fails_the_step_runs_all_the_same(tiny, caplog):
    capture = Recorder(limit=1)
    runner = make_runner(tiny, capture)
    found = sequences(runner, [5, 6, 7])
    expected = make_runner(tiny)
    copies = sequences(expected, [5, 6, 7])
    assert runner.execute(StepPlan(last_tokens(found[:1]))).path == "recorded"
    for _ in range(2):
        output = runner.execute(StepPlan(last_tokens(found)))
        assert output.path == "capture failed"
        assert output.tokens == expected.execute(StepPlan(last_tokens(copies))).tokens
    assert "no memory for one more" in caplog.text
    assert runner.execute(StepPlan(last_tokens(found[:1]))).path == "recorded", "its size was recorded before"


@pytest.mark.parametrize("kv_cache", ["16bit", "int8"])
def test_answers_of_an_engine_are_the_same(tiny, kv_cache, few_prompt_tokens):
    """With prompts between decode steps, sequences that come and go, preemption, seeds and grammar-free sampling."""

    chance, options = random.Random(3), {"num_blocks": 30, "kv_cache": kv_cache}
    prompts = [[chance.randrange(112) for _ in range(1 + 3 * index)] for index in range(12)]

    def answers(capture) -> tuple[list[list[int]], Engine]:
        engine = Engine(make_runner(tiny, capture, **options), None, RuntimeConfig(**SIZES | options))
        requests = [
            (str(i), prompt, SamplingParams(temperature=i % 3 / 2, top_p=0.9, seed=i, max_tokens=5 + 2 * i))
            for i, prompt in enumerate(prompts)
        ]
        found = answer_all(engine, requests)
        return [found[str(index), 0] for index in range(12)], engine

    expected, ordinary = answers(None)
    assert [len(tokens) for tokens in expected] == [5 + 2 * index for index in range(12)]
    found, recorded = answers(capture_nothing)
    assert found == expected
    assert not ordinary.metrics.steps_by_path_total
    paths = recorded.metrics.steps_by_path_total
    assert paths["recorded"] > 20
    assert paths["prompts are computed"] > 0
    assert 'runtime_steps_by_path_total{path="recorded"}' in recorded.render_metrics()


@pytest.fixture(scope="module", params=sample(["qwen3_5_text", "mamba2"]))
def hybrid(tmp_path_factory, request):
    """A model with recurrent layers, some or all."""
    folder = save_tiny_model(tmp_path_factory.mktemp("models") / "hybrid", request.param, **VARIANTS[request.param])
    return load_model(folder, dtype="float64")


def capture_after_warm_ups(compute):
    """Computes the step twice before it is recorded, as a capture on a GPU does."""
    compute()
    compute()
    return compute


def capture_addresses(compute):
    """Keeps nothing alive, as a graph, which has the addresses of tensors."""
    computation = weakref.ref(compute)
    return lambda: computation()()


def test_what_recordings_read_stays_allocated(tiny):
    runner = make_runner(tiny, capture_addresses)
    found = sequences(runner, [5, 6, 7])
    for _ in range(2):
        assert runner.execute(StepPlan(last_tokens(found))).path == "recorded"


def test_layers_with_a_state_are_recorded_one_by_one(tiny, hybrid):
    assert records_by_layer(hybrid)
    assert not records_by_layer(tiny)
    layers = [SimpleNamespace(experts=SimpleNamespace(kernel=None))]
    assert not records_by_layer(SimpleNamespace(config=hybrid.config, layers=layers))


@pytest.mark.parametrize("speculative_model", sample(["", "ngram"]))
def test_recurrent_states_advance_once_per_step(hybrid, speculative_model):
    """Saved ones are left alone, and rows of padding write where nothing reads."""
    options = {"num_blocks": 60, "num_state_slots": 14, "speculative_model": speculative_model}
    requests = [
        (str(i), [3 + i % 2, *range(20, 24 + 2 * i)], SamplingParams(temperature=i % 2, seed=i, max_tokens=6 + 2 * i))
        for i in range(4)
    ]

    def answers(capture):
        runner = make_runner(hybrid, capture, **options)
        poison_states(runner.states)
        config = RuntimeConfig(**SIZES | options)
        speculator = build_speculator("", hybrid, runner, config)
        engine = Engine(runner, None, config, speculator=speculator)
        found = [answer_all(engine, requests) for _ in range(2)]
        assert found[0] == found[1]
        assert engine.scheduler.stats.num_prefix_hits > 0
        for fields in runner.states.tensors.values():
            assert all(not tensor[14].any() for tensor in fields.values())
        return found[0], engine

    expected, _ = answers(None)
    found, recorded = answers(capture_after_warm_ups)
    assert found == expected
    assert recorded.metrics.steps_by_path_total["recorded"] > 10
