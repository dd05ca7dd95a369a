"""Only on a GPU: recorded steps against the same steps kernel by kernel, what is read back, and memory that is kept."""

import random
from dataclasses import replace

import pytest
import torch
from constraints import NoRepeats, constrain
from engines import answer_all
from tiny_models import save_tiny_model
from unrecorded_steps import capture_nothing

from compress.common.cli import demo_model_path
from runtime.core.batch import SamplingMetadata
from runtime.core.config import RuntimeConfig
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import ScheduledSequence, StepPlan
from runtime.engine.engine import Engine
from runtime.model.loader import load_model
from runtime.runner.capture import CudaCapture
from runtime.runner.runner import ModelRunner, build_runner, sample_and_match
from runtime.sampling.sampler import sample_tokens
from runtime.speculative.build import build_speculator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

GIB = 2**30


@pytest.fixture(scope="module")
def demo():
    return load_model(demo_model_path(), device="cuda", dtype="bfloat16")


def make_runner(decoder, capture=None, **options) -> ModelRunner:
    config = {"num_blocks": 2000, "max_num_seqs": 32} | options
    runner = build_runner(decoder, RuntimeConfig(device="cuda", **config))
    assert not runner.graphs_reason, runner.graphs_reason
    if capture is not None:
        runner.capture_steps(capture)
    return runner


def begin(runner: ModelRunner, count: int, num_drafts: int = 0) -> tuple[ScheduledSequence, ...]:
    """Sequences of many lengths, all but their last tokens computed; drafts follow some of the last tokens."""
    chance, entries = random.Random(count), []
    blocks = chance.sample(range(runner.num_blocks), runner.num_blocks)
    for index in range(count):
        length = chance.randint(2, 300)
        tokens = [chance.randrange(runner.vocab_size) for _ in range(length)]
        request = Request(f"s{index}", tuple(tokens), SamplingParams(temperature=0), seed=index)
        sequence = Sequence(request, tokens, block_ids=[blocks.pop() for _ in range(-(-length // 16))])
        runner.execute(StepPlan((ScheduledSequence(sequence, 0, length - 1),)))
        sequence.draft_token_ids = [chance.randrange(runner.vocab_size) for _ in range(index % (1 + num_drafts))]
        sequence.block_ids += [blocks.pop()]
        entries.append(ScheduledSequence(sequence, length - 1, 1 + len(sequence.draft_token_ids)))
    return tuple(entries)


@pytest.mark.parametrize("kv_cache", ["16bit", "fp8", "int8", "int4"])
@pytest.mark.parametrize("count", [1, 3, 20, 32])
def test_a_graph_gives_the_bits_of_its_kernels(demo, kv_cache, count):
    runner = make_runner(demo, CudaCapture(torch.device("cuda")), kv_cache=kv_cache)
    entries = begin(runner, count)
    replayed = runner.graphs.run(entries).logits.clone()
    runner.capture_steps(capture_nothing)
    assert torch.equal(runner.graphs.run(entries).logits, replayed)
    assert replayed.isfinite().all()


@pytest.mark.parametrize("speculate", ["ngram", "ngram-tree"])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_a_graph_verifies_drafts_with_the_bits_of_its_kernels(demo, speculate, count):
    options = {"speculative_model": speculate, "num_speculative_tokens": 4}
    runner = make_runner(demo, CudaCapture(torch.device("cuda")), **options)
    entries = begin(runner, count, num_drafts=4)
    if speculate == "ngram-tree":
        for entry in entries:
            entry.sequence.draft_parents = [-1, -1, 0, 1][: entry.num_draft_tokens]
    assert not runner.graphs.unsupported_reason(entries)
    replayed = runner.graphs.run(entries).logits.clone()
    assert len(replayed) == sum(entry.num_tokens for entry in entries)
    runner.capture_steps(capture_nothing)
    assert torch.equal(runner.graphs.run(entries).logits, replayed)
    assert replayed.isfinite().all()


def test_a_graph_draws_what_the_host_draws_of_changed_logits(demo):
    """Penalties, biases and masks: from the logits of a graph the same tokens as step by step on the host."""
    runner = make_runner(demo)
    entries = begin(runner, 8)
    for index, entry in enumerate(entries):
        request, wishes = entry.sequence.request, CHANGES[index % len(CHANGES)]
        entry.sequence.request = replace(request, sampling=SamplingParams(**wishes))
        entry.sequence.constraint = NoRepeats() if index % 2 else None
    for token in (5, 7):
        _, logits, drawn, _ = runner.graphs.run(entries)
        there = logits.cpu()
        assert sample_and_match(entries, logits, drawn) == sample_and_match(entries, there)
        for entry in entries:
            entry.sequence.token_ids.append(token)
            entry.start += 1


def test_twenty_replays_give_the_same_bits(demo):
    runner = make_runner(demo)
    entries = begin(runner, 13)
    first = runner.graphs.run(entries).logits.clone()
    for _ in range(19):
        assert torch.equal(runner.graphs.run(entries).logits, first)


CHANGES = (
    {"temperature": 0, "repetition_penalty": 1.4},
    {"presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"logit_bias": ((5, 4.0), (6, -100.0)), "top_k": 40},
    {},
)


def answers(runner: ModelRunner, config: RuntimeConfig) -> tuple[list[list[int]], Engine]:
    speculator = build_speculator("", runner.decoder, runner, config)
    if speculator is not None:
        speculator.gate = None
    engine, chance, requests = Engine(runner, None, config, speculator=speculator), random.Random(5), []
    constrain(engine, NoRepeats)
    for index in range(40):
        wishes = {"temperature": index % 3 / 2, "top_p": 1 - index % 2 / 10} | CHANGES[index % len(CHANGES)]
        params = SamplingParams(**wishes, seed=index, max_tokens=8 + index)
        prompt = [chance.randrange(runner.vocab_size) for _ in range(1 + 11 * index)]
        requests.append((str(index), prompt, params))
    found = answer_all(engine, requests)
    return [found[str(index), 0] for index in range(40)], engine


@pytest.mark.parametrize("speculate", ["", "ngram", "ngram-tree"])
def test_answers_of_an_engine_are_those_of_the_same_kernels(demo, speculate):
    options = {"num_blocks": 2000, "max_num_seqs": 32, "speculative_model": speculate}
    config = RuntimeConfig(device="cuda", **options)
    expected, computed = answers(make_runner(demo, capture_nothing, **options), config)
    found, engine = answers(make_runner(demo, **options), config)
    assert found == expected
    paths = engine.metrics.steps_by_path_total
    assert paths == computed.metrics.steps_by_path_total, "no capture failed"
    assert sum(count for path, count in paths.items() if path.startswith("recorded")) > paths.total() / 2


def test_answers_are_the_same_where_the_next_step_is_submitted_before_the_last_is_read(demo):
    """Without end tokens, so that both make the same batches: other batches may be rounded differently."""

    def serve(overlap: bool) -> tuple[object, Engine]:
        config = RuntimeConfig(device="cuda", num_blocks=2000, max_num_seqs=32, overlap=overlap)
        chance, requests = random.Random(7), []
        for index in range(32):
            prompt = [chance.randrange(8000) for _ in range(1 + 9 * index)]
            params = SamplingParams(temperature=index % 2, seed=index, max_tokens=20 + 3 * index, ignore_eos=True)
            requests.append((str(index), prompt, params))
        engine = Engine(make_runner(demo), None, config)
        return answer_all(engine, requests), engine

    (expected, serial), (found, overlapped) = serve(overlap=False), serve(overlap=True)
    assert found == expected
    assert overlapped.metrics.steps_by_overlap_total["overlapped"] > 50
    assert not serial.metrics.steps_by_overlap_total


COMMON = ({"temperature": 0}, {}, {"top_k": 40}, {"top_p": 0.6, "temperature": 0.8})


def test_a_step_is_read_back_once():
    """All else that would wait for the GPU raises; the one read is let through."""
    logits = 8 * torch.randn(64, 128256, device="cuda")
    draws = [SamplingMetadata(SamplingParams(**COMMON[row % len(COMMON)]), row, row) for row in range(64)]
    expected = sample_tokens(logits, draws)
    reads = []

    class Once(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if getattr(function, "__name__", "") != "tolist":
                return function(*args, **(kwargs or {}))
            reads.append(args)
            torch.cuda.set_sync_debug_mode("default")
            try:
                return function(*args)
            finally:
                torch.cuda.set_sync_debug_mode("error")

    torch.cuda.set_sync_debug_mode("error")
    try:
        with Once():
            found = sample_tokens(logits, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found == expected
    assert len(reads) == 1


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """16 KiB of keys and values per token, a large vocabulary, and a context that no GPU holds 64 times."""
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "max_position_embeddings": 65536,
    }
    return save_tiny_model(tmp_path_factory.mktemp("models") / "wide", "llama", torch.bfloat16, head_dim=64, **sizes)


@pytest.mark.whole_gpu
def test_memory_is_kept_when_all_of_it_is_given_away(wide):
    """All that is free but 8 GiB is taken first; then the default pool takes its share, and the heaviest mixture of
    requests must find its memory: nothing grows beyond what was set aside for steps."""
    decoder = load_model(wide, device="cuda", dtype="bfloat16")
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    taken = torch.empty(max(0, free - 8 * GIB), dtype=torch.uint8, device="cuda")
    config = RuntimeConfig(device="cuda", max_num_batched_tokens=2048, prefill_chunk=1024)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runner = build_runner(decoder, config)
    plan = runner.memory
    assert "after the weights" in plan.budget.reason
    assert plan.kv_bytes > plan.budget.nbytes - plan.block_size * plan.token_bytes
    engine, chance = Engine(runner, None, config), random.Random(0)
    for index in range(150):
        wishes = {"temperature": 1.0, "seed": index, "max_tokens": 20, "logprobs": index % 4 or None}
        params = SamplingParams(**wishes, top_k=(0, 50, 5000)[index % 3], repetition_penalty=1 + index % 2 / 10)
        engine.add_request([chance.randrange(65536) for _ in range(chance.choice((1, 30, 900, 3000)))], params)
    while engine.has_work:
        assert not any(delta.error for delta in engine.step())
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= plan.kv_bytes + plan.budget.step_bytes
    assert runner.graphs.failure == ""
    del taken
