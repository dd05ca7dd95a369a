"""Whatever preempts, evicts and waits: what comes out about a prompt is joined from spans that cover it once."""

import random
from array import array

import pytest
from fake_runner import FakeRunner, expected_tokens
from fault_injection import FaultInjection

from runtime.core.config import RuntimeConfig
from runtime.core.request import Delta, FinishReason, LogprobColumns, Pooling, RequestOptions, SamplingParams
from runtime.core.step import StepOutput, StepPlan
from runtime.engine.engine import Engine

MAX_MODEL_LEN = 40


class ScoringRunner(FakeRunner):
    """A token's score and hidden state are what its slot holds: wrong when it was not computed where it belongs."""

    def execute(self, plan: StepPlan) -> StepOutput:
        output = super().execute(plan)
        for entry in plan.entries:
            sequence = entry.sequence
            if not sequence.wants_whole_prompt:
                continue
            slots = [self._slots[self._slot(entry, entry.start + i)] for i in range(entry.num_tokens)]
            if sequence.request.options.embed:
                sums = [float(sum(token for token, _ in slots)), float(sum(position for _, position in slots))]
                output.pooled[sequence.id] = sums
            else:
                followed = [slot for slot in slots if slot[1] + 1 < sequence.num_prompt_tokens]
                scores = array("d", (-float(100 * p + t) for t, p in followed))
                output.prompt_logprobs[sequence.id] = LogprobColumns(0, scores)
        return output


def check(prompt: list[int], deltas: list[Delta], kind: str, max_tokens: int, seed: int) -> None:
    first, last = deltas[0], deltas[-1]
    if last.finish_reason is FinishReason.ABORT:
        return
    if kind == "embed":
        assert len(deltas) == 1
        assert last.finish_reason is FinishReason.STOP
        mean = [sum(prompt) / len(prompt), sum(range(len(prompt))) / len(prompt)]
        assert first.embedding == pytest.approx(mean, abs=1e-12)
        return
    assert last.finish_reason is FinishReason.LENGTH
    assert first.embedding is None
    scores = [found.logprob for found in first.prompt_logprobs]
    assert scores == ([-(100 * p + t) for p, t in enumerate(prompt[:-1])] if kind == "score" else [])
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert tokens == expected_tokens(prompt, max_tokens, seed)


@pytest.mark.parametrize("seed", range(40))
def test_every_prompt_is_covered_once(seed: int) -> None:
    chance = random.Random(seed)
    config = RuntimeConfig(
        block_size=chance.choice([1, 3, 4]),
        prefill_chunk=chance.choice([1, 2, 5, 64]),
        max_num_batched_tokens=chance.choice([6, 16, 64]),
        max_num_seqs=chance.choice([2, 8]),
    )
    num_blocks = -(-MAX_MODEL_LEN // config.block_size) * chance.choice([1, 2])
    runner = ScoringRunner(num_blocks, config.block_size, MAX_MODEL_LEN, num_host_blocks=chance.choice([0, 8]))
    trouble = FaultInjection(seed, preempt=0.15, evict=0.2, abort=0.01) if seed % 2 else None
    engine = Engine(runner, None, config, before_step=trouble)
    wanted, deltas = {}, {}
    for number in range(12):
        kind = chance.choice(["embed", "score", "write"])
        shared, own = chance.randrange(20), chance.randint(1, 8)
        prompt = [i % 3 for i in range(shared)] + [chance.randrange(4) for _ in range(own)]
        max_tokens = chance.choice([0, 1, 10])
        sampling = SamplingParams(max_tokens, seed=number, prompt_logprobs=0 if kind == "score" else None)
        engine.add_request(
            prompt, sampling, str(number), RequestOptions(pooling=Pooling.MEAN if kind == "embed" else Pooling.NONE)
        )
        wanted[str(number)], deltas[str(number)] = (prompt, kind, max_tokens, number), []
        for _ in range(chance.randrange(4)):
            step(engine, deltas)
    while engine.has_work:
        step(engine, deltas)
    for name, (prompt, kind, max_tokens, number) in wanted.items():
        check(prompt, deltas[name], kind, max_tokens, number)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def step(engine: Engine, deltas: dict[str, list[Delta]]) -> None:
    for delta in engine.step():
        deltas[delta.request_id].append(delta)
    engine.scheduler.check()
