from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_models import save_tiny_model

from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.core.progress import Stage, ignore
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import ScheduledSequence, StepPlan
from runtime.model.loader import load_model
from runtime.runner import warm_up as warm_up_module
from runtime.runner.runner import build_runner
from runtime.runner.warm_up import compile_ahead, covering_steps, largest_steps, warm_up

CONFIG = RuntimeConfig(
    num_blocks=32, block_size=4, max_num_seqs=5, max_num_batched_tokens=50, prefill_chunk=20, max_model_len=64
)


def lengths(config: RuntimeConfig = CONFIG, num_blocks: int = 32, longest: int = 64) -> list[list[int]]:
    return [[entry.num_tokens for entry in plan.entries] for plan in largest_steps(config, num_blocks, longest)]


def test_the_largest_steps_of_a_configuration():
    assert lengths() == [[20, 20, 10], [1] * 5]
    assert lengths(longest=16) == [[16, 16, 16, 2], [1] * 5]
    assert lengths(num_blocks=3) == [[12], [1] * 3]


def test_steps_that_choose_every_kernel_between_them():
    config = RuntimeConfig(max_num_batched_tokens=300, prefill_chunk=100, max_num_seqs=5)
    plans = covering_steps(config, 256, 2000)
    sizes = [plan.num_tokens for plan in plans]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 299, 300}
    for size in (1, 32, 300):
        spans = {(entry.start, entry.num_tokens) for plan in plans if plan.num_tokens == size for entry in plan.entries}
        assert {(256, 1), (512, 1), (1024, 1), (1999, 1), (0, 1)} <= spans
        assert {(0, min(size, 16)), (2000 - min(size, 16), min(size, 16))} <= spans
    for plan in plans:
        assert len(plan.entries) <= 5
        for entry in plan.entries:
            assert entry.num_tokens <= 100
            assert len(entry.sequence.block_ids) * 16 >= entry.start + entry.num_tokens
            assert max(entry.sequence.block_ids) < 256


def test_steps_of_many_short_sequences_are_covered():
    plans = covering_steps(RuntimeConfig(max_num_batched_tokens=512, prefill_chunk=256, max_num_seqs=64), 64, 100)
    assert {plan.num_tokens for plan in plans} >= {1, 2, 4, 8, 16, 32, 64, 128, 255, 256, 511, 512}
    assert {entry.start + entry.num_tokens for plan in plans for entry in plan.entries} <= set(range(1, 101))


@pytest.mark.parametrize("num_seqs", [1, 2])
def test_a_server_of_few_sequences_is_covered_too(num_seqs):
    config = RuntimeConfig(max_num_batched_tokens=64, prefill_chunk=64, max_num_seqs=num_seqs)
    plans = covering_steps(config, 64, 1024)
    assert {plan.num_tokens for plan in plans} >= {1, 2, 4, 8, 16, 32, 64}
    assert (1023, 1) in {(entry.start, entry.num_tokens) for plan in plans for entry in plan.entries}


class FakeCompiler:
    """Lacks the kernels that are named by the launches, until it has compiled them."""

    def __init__(self, on_disk: set[str]) -> None:
        self.on_disk, self.called, self.compiled = on_disk, [], []

    def missing(self, run, device):
        start = len(self.called)
        run()
        return [partial(self.compiled.append, name) for name in self.called[start:]]

    def compile(self, builds, device, report):
        assert builds, "where nothing is missing there may be no compiler"
        start = len(self.compiled)
        for done, build in enumerate(builds, 1):
            build()
            report(done, len(builds))
        return len(set(self.compiled[start:]) - self.on_disk)


@pytest.mark.parametrize(("on_disk", "compiled"), [(set(), "abcd"), ({"a"}, "abcd"), ({"a", "b"}, "ab")])
def test_kernels_are_compiled_ahead_unless_a_cache_has_those_of_two_steps(on_disk, compiled, monkeypatch):
    compiler, reports = FakeCompiler(on_disk), []
    monkeypatch.setattr(warm_up_module, "compilers", lambda device: [compiler])
    launches = [partial(compiler.called.append, name) for name in "abcd"]
    compile_ahead(torch.device("cuda"), launches[:2], launches[2:], lambda *report: reports.append(report))
    assert "".join(compiler.compiled) == compiled
    assert reports[:2] == [(Stage.COMPILATION, 1, 2), (Stage.COMPILATION, 2, 2)]


def test_nothing_is_compiled_where_nothing_is_missing(monkeypatch):
    compiler = FakeCompiler(set())
    monkeypatch.setattr(warm_up_module, "compilers", lambda device: [compiler])
    compile_ahead(torch.device("cuda"), [lambda: None], [partial(compiler.called.append, "a")], ignore)
    assert compiler.called == []


@pytest.mark.parametrize("warms_up", [False, True])
def test_every_kind_of_step_is_captured_before_the_first_request(warms_up, tmp_path):
    decoder = load_model(save_tiny_model(tmp_path / "model"), dtype="float32")
    config = replace(CONFIG, warm_up=warms_up)
    runner, reports = build_runner(decoder, config), []
    runner.capture_steps(lambda compute: lambda: None)  # on a CPU there is no slot for padding to write to
    warm_up(runner, config, lambda *report: reports.append(report))
    assert runner.graphs.is_complete == warms_up
    assert [done for _, done, _ in reports] == list(range(len(reports)))
    assert {total for _, _, total in reports} == {len(reports)}
    captured = dict(runner.graphs._captured)
    for count in range(1, 6):
        for sampling in (SamplingParams(temperature=0), SamplingParams(temperature=1, top_k=3)):
            runner.execute(decodes(runner, count, sampling))
    assert (runner.graphs._captured == captured) == warms_up


def test_captures_that_the_first_answers_do_not_need_are_left_for_later(tmp_path):
    decoder = load_model(save_tiny_model(tmp_path / "model"), dtype="float32")
    config = replace(CONFIG, warm_up=True, captures_later=True)
    runner = build_runner(decoder, config)
    runner.capture_steps(lambda compute: lambda: None)
    later = warm_up(runner, config)
    kinds = runner.graphs.kinds
    assert {kind.num_rows for kind in runner.graphs._captured} == {1, config.max_num_seqs, 50}
    assert len(later) == len(kinds) - 2
    for capture in later:
        capture()
    assert runner.graphs.is_complete


def decodes(runner, count, sampling):
    entries = []
    for index in range(count):
        sequence = Sequence(Request(str(index), (5,), sampling, 0), [5], block_ids=[index])
        entries.append(ScheduledSequence(sequence, 0, 1))
    return StepPlan(tuple(entries))


def test_every_token_has_a_block_of_its_own_sequence():
    for plan in largest_steps(CONFIG, 32, 64):
        blocks = [block for entry in plan.entries for block in entry.sequence.block_ids]
        assert len(set(blocks)) == len(blocks)
        assert all(len(entry.sequence.block_ids) * 4 >= entry.num_tokens for entry in plan.entries)


@pytest.mark.parametrize(
    "options", [{}, {"kv_cache": "int8", "kv_sinks": 2, "kv_residual_length": 8}, {"attention_window": 8}]
)
def test_they_run(options, tmp_path):
    decoder = load_model(save_tiny_model(tmp_path / "model"), dtype="float32")
    config = RuntimeConfig(**{"num_blocks": 32, "block_size": 4, "max_num_seqs": 5, "prefill_chunk": 20} | options)
    runner, steps = build_runner(decoder, config), []
    execute = runner.execute
    runner.execute = lambda plan: steps.append(execute(plan))
    warm_up(runner, config)
    assert [len(step.tokens) for step in steps] == [5, 5]
    assert all(token.token_id >= 0 for step in steps for tokens in step.tokens.values() for token in tokens)


def test_no_memory_for_them_is_a_refusal(tmp_path):
    decoder = load_model(save_tiny_model(tmp_path / "model"), dtype="float32")
    runner = build_runner(decoder, CONFIG)

    def execute(plan):
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner.execute = execute
    with pytest.raises(ToolkitError, match=r"--kv-memory .*--max-num-seqs"):
        warm_up(runner, CONFIG)
