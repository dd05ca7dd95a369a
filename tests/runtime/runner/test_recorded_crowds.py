"""Engines whose steps are recorded answer like those without: crowds whose prompts arrive while others draft. The
recording is the function itself, so no GPU is needed."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from constraints import NoRepeats, constrain
from covering import sample
from engines import Tokens, answer_all
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model
from unrecorded_steps import capture_nothing, runner_on_cpu

from runtime.core.batch import SamplingMetadata, slots_of
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.core.step import StepPlan
from runtime.engine.engine import Engine
from runtime.model.loader import load_model
from runtime.runner.runner import ModelRunner
from runtime.sampling.logits_processors import adjust_logits
from runtime.speculative.build import build_speculator
from runtime.speculative.proposer import DraftRequest

SIZES = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 6, "prefill_chunk": 8, "num_state_slots": 30}
PLAIN = (
    {"temperature": 0},
    {"temperature": 0.8, "n": 2},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.3, "min_p": 0.05},
)

CHANGED = (
    *PLAIN,
    {"temperature": 0.7, "repetition_penalty": 1.3, "n": 2},
    {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logprobs": 1},
    {"temperature": 0.9, "logit_bias": ((5, 3.0), (6, -100.0)), "top_k": 7},
    {"temperature": 1.0, "repetition_penalty": 0.8, "logit_bias": ((9, 2.0),), "min_p": 0.02},
)

FILTERED = (
    *PLAIN[:3],
    {"temperature": 1.1, "top_n_sigma": 1.5, "dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"temperature": 0.9, "typical_p": 0.7, "xtc_probability": 0.5, "xtc_threshold": 0.05},
)


def crowd(count: int, wishes: tuple[dict, ...], max_tokens: int = 24) -> list[tuple[str, list[int], SamplingParams]]:
    """Prompts that repeat themselves, as texts do, so that n-grams are drafted."""
    chance, requests = random.Random(count), []
    for index in range(count):
        phrase = [chance.randrange(3, 60) for _ in range(3)]
        prompt = phrase * chance.randint(1, 5) + phrase[: chance.randint(0, 2)]
        sampling = SamplingParams(seed=index, max_tokens=max_tokens - index % 5, ignore_eos=True)
        requests.append((str(index), prompt, replace(sampling, **wishes[index % len(wishes)])))
    return requests


class Watch:
    """A runner whose plans are looked at: how many entries are captured, by the number of their drafts."""

    def __init__(self, runner: ModelRunner) -> None:
        self.captured: Counter[int] = Counter()
        self.block_size = runner.block_size
        submit = runner.submit

        def watch(plan: StepPlan):
            self.check(plan)
            if runner.graphs is not None and not runner.graphs.unsupported_reason(plan.entries):
                self.captured.update(entry.num_draft_tokens for entry in plan.entries)
            return submit(plan)

        runner.submit = watch

    def check(self, plan: StepPlan) -> None:
        """No entry reads a block, or a state, that another one writes: they may be computed one after the other."""
        for entry in plan.entries:
            written = {slot // self.block_size for slot in slots_of(entry, self.block_size)}
            states = {slot for _, slot in entry.state_writes}
            for other in plan.entries:
                if other is not entry:
                    assert written.isdisjoint(other.sequence.block_ids)
                    assert states.isdisjoint({other.state_read, *(slot for _, slot in other.state_writes)})


class Guesses:
    """Drafts what is known to follow, with a wrong token now and then."""

    def __init__(self, requests: list, answers: Tokens) -> None:
        self.known = [
            [*prompt, *tokens] for name, prompt, _ in requests for (of, _), tokens in answers.items() if of == name
        ]
        self.chance = random.Random(0)

    def propose(self, wishes: list[DraftRequest]) -> None:
        for sequence, number in wishes:
            tokens, count = sequence.token_ids, sequence.num_tokens
            known = next((each for each in self.known if each[:count] == tokens), [])
            draft = known[count : count + self.chance.randint(0, number)]
            sequence.draft_token_ids = [3 if self.chance.random() < 0.2 else token for token in draft]


def serve(
    decoder, folder, requests, capture=None, guesses=None, constraint=None, **options
) -> tuple[Tokens, Engine, Watch]:
    config = RuntimeConfig(**(SIZES | options))
    runner = runner_on_cpu(decoder, config, capture, draws=capture is not None)
    speculator = build_speculator(folder, decoder, runner, config)
    if speculator is not None:
        speculator.gate = None
        speculator.drafter = guesses or speculator.drafter
    engine, watch = Engine(runner, None, config, speculator=speculator), Watch(runner)
    if constraint is not None:
        constrain(engine, constraint)
    return answer_all(engine, requests, gap=1), engine, watch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=4)


@pytest.fixture(scope="module")
def target(folder):
    return load_model(folder, dtype="float64")


@pytest.mark.full
@pytest.mark.parametrize("speculate", ["ngram-tree", "ngram", "self:skip", "self:skip rejection", ""])
def test_drafts_are_verified_in_recorded_steps(target, folder, speculate, monkeypatch) -> None:
    monkeypatch.setattr("runtime.memory.plan.MOST_PROMPT_ROWS", 12)
    speculate, _, verify = speculate.partition(" ")
    options = {"speculative_model": speculate, "spec_verify": verify or "exact", "num_speculative_tokens": 5}
    requests = crowd(9, PLAIN)
    expected, _, _ = serve(target, folder, requests, **options)
    found, engine, watch = serve(target, folder, requests, capture_nothing, **options)
    assert found == expected
    assert watch.captured[0] > 0
    assert bool(speculate) == any(watch.captured[number] for number in range(1, 6))
    paths = engine.metrics.steps_by_path_total
    assert paths["recorded"] > 0 < paths["prompts are computed"]
    if speculate:
        assert engine.metrics.spec_decode_num_accepted_tokens_total > 0


@pytest.mark.parametrize("speculate", sample(["ngram", "self:skip", ""]))
def test_requests_that_change_logits_are_drawn_within_recorded_steps(target, folder, speculate, monkeypatch) -> None:
    """Biases, masks and penalties, with drafts and preemption."""
    options, requests = {"speculative_model": speculate, "num_blocks": 24}, crowd(10, CHANGED, max_tokens=16)
    expected, ordinary, _ = serve(target, folder, requests, constraint=NoRepeats, **options)
    assert ordinary.scheduler.stats.num_preemptions > 0
    drawn: list[SamplingMetadata] = []
    adjust = "runtime.sampling.sampler.adjust_logits"
    monkeypatch.setattr(adjust, lambda logits, draws: drawn.extend(draws) or adjust_logits(logits, draws))
    found, engine, watch = serve(target, folder, requests, capture_nothing, constraint=NoRepeats, **options)
    assert found == expected
    assert bool(speculate) == any(watch.captured[number] for number in range(1, 5))
    assert engine.metrics.steps_by_path_total["recorded"] > 10
    # Only entries outside of recorded steps are adjusted by themselves: those with the ends of prompts.
    assert len(drawn) < sum(watch.captured.values())


@pytest.mark.full
@pytest.mark.parametrize("speculate", ["ngram", ""])
def test_filtered_requests_are_drawn_outside_of_recorded_steps(target, folder, speculate) -> None:
    requests = crowd(8, FILTERED)
    expected, _, _ = serve(target, folder, requests, speculative_model=speculate)
    found, _, watch = serve(target, folder, requests, capture_nothing, speculative_model=speculate)
    assert found == expected
    assert sum(watch.captured.values()) > 0


@pytest.mark.full
@pytest.mark.parametrize("block_size", [1, 2])
def test_drafts_look_back_as_far_as_windows_reach(tmp_path, block_size) -> None:
    folder = save_tiny_model(tmp_path / "windowed", "mistral", sliding_window=6)
    decoder, requests = load_model(folder, dtype="float64"), crowd(7, PLAIN)
    options = {"speculative_model": "ngram", "block_size": block_size, "prefill_chunk": 2, "num_blocks": 200}
    expected, _, _ = serve(decoder, folder, requests, **options)
    found, _, watch = serve(decoder, folder, requests, capture_nothing, Guesses(requests, expected), **options)
    assert found == expected
    assert all(watch.captured[number] for number in range(1, 4))


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
@pytest.mark.parametrize("num_state_slots", [60, 14])
def test_states_of_drafts_are_written_in_recorded_steps(tmp_path, family, num_state_slots) -> None:
    folder = save_tiny_model(tmp_path / "hybrid", family, **VARIANTS[family])
    decoder, requests = load_model(folder, dtype="float64"), crowd(7, PLAIN)
    options = {"speculative_model": "ngram", "num_state_slots": num_state_slots}
    expected, _, _ = serve(decoder, folder, requests, **options)
    guesses = Guesses(requests, expected)
    found, engine, watch = serve(decoder, folder, requests, capture_nothing, guesses, **options)
    assert found == expected
    assert all(watch.captured[number] for number in range(1, 4))
    if num_state_slots == 14:
        assert any("states of drafts are left out" in path for path in engine.metrics.steps_by_path_total)
