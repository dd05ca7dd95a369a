"""A step over static buffers with the GPU's own kernels, rows of padding among the others. Without a GPU they run in
Triton's interpreter, and the recording is the function itself; with one it is a CUDA graph."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from poisoned_memory import poison
from tiny_models import save_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from triton_steps import use_triton
from unrecorded_steps import capture_nothing

from runtime.backends.triton.layers import TritonSampling
from runtime.core.batch import slots_of
from runtime.core.config import RuntimeConfig
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import ScheduledSequence, StepPlan
from runtime.model.loader import load_model
from runtime.runner.capture import CudaCapture
from runtime.runner.runner import ModelRunner, build_runner, sample_and_match
from runtime.runner.step_buffers import StepBuffers
from runtime.runner.step_graphs import StepGraphs
from runtime.sampling.sampler import sample_step

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
BLOCK_SIZE = 4
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def decoder(gpu, tmp_path_factory):
    from runtime.backends.triton.layers import TritonOps

    folder = save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3", head_dim=32, **SIZES)
    return replace(load_model(folder, device=gpu.type, dtype="bfloat16", kernels="reference"), ops=TritonOps())


def make_runner(decoder, **options) -> ModelRunner:
    """With the kernels of a GPU, and NaN in all unwritten blocks."""
    config = {"num_blocks": 40, "block_size": BLOCK_SIZE, "max_num_seqs": 6, "max_model_len": 48} | options
    runner = build_runner(decoder, RuntimeConfig(**config))
    poison(runner.pages.memory)
    use_triton(runner)
    capture = CudaCapture(decoder.device) if decoder.device.type == "cuda" else capture_nothing
    buffers = StepBuffers(decoder, runner.memory)
    runner.graphs = StepGraphs(runner._logits, buffers, capture, partial(sample_step, TritonSampling()))
    return runner


def begin(
    runner: ModelRunner, lengths: list[int], wishes: tuple[dict, ...] = (GREEDY,)
) -> tuple[ScheduledSequence, ...]:
    """Sequences with keys and values (random ones) of all but the last token, and those last tokens."""
    chance, generator = random.Random(0), torch.Generator().manual_seed(0)
    config, device = runner.decoder.config, runner.decoder.device
    blocks = chance.sample(range(runner.num_blocks), runner.num_blocks)
    entries = []
    for index, length in enumerate(lengths):
        tokens = [chance.randrange(112) for _ in range(length)]
        request = Request(f"s{index}", tuple(tokens), SamplingParams(**wishes[index % len(wishes)]), seed=7)
        sequence = Sequence(request, tokens, block_ids=[blocks.pop() for _ in range(-(-(length + 4) // BLOCK_SIZE))])
        slots = torch.tensor(slots_of(ScheduledSequence(sequence, 0, length - 1), BLOCK_SIZE), device=device)
        shape = (2, config.num_layers, length - 1, config.mixer.num_kv_heads, config.mixer.head_dim)
        keys, values = torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for layer in range(config.num_layers if length > 1 else 0):
            runner.pages.write(layer, slots, keys[layer], values[layer])
        entries.append(ScheduledSequence(sequence, length - 1, 1))
    return tuple(entries)


def ordinary_logits(runner: ModelRunner, entries: tuple[ScheduledSequence, ...]) -> torch.Tensor:
    """In the order of the entries, from a step that is not recorded."""
    found: dict[str, torch.Tensor] = {}

    def keep(sampling, rows, drawn):
        parts = rows.split([1 + entry.num_draft_tokens for entry in sampling])
        found.update(zip([entry.sequence.id for entry in sampling], parts, strict=True))
        return {entry.sequence.id: [] for entry in sampling}

    graphs, sample = runner.graphs, runner.sample
    runner.graphs, runner.sample = None, keep
    runner.execute(StepPlan(entries))
    runner.graphs, runner.sample = graphs, sample
    return torch.cat([found[entry.sequence.id] for entry in entries])


@pytest.mark.parametrize("prompt", [1, 6])
@pytest.mark.parametrize("kv_cache", ["16bit", "int4"])
def test_logits_are_those_of_ordinary_steps(decoder, kv_cache, prompt):
    """Single tokens, and these with the last tokens of a prompt."""
    runner = make_runner(decoder, kv_cache=kv_cache)
    entries = begin(runner, [9, 1, 14])
    entries = (*entries[:2], replace(entries[2], start=14 - prompt, num_tokens=prompt))
    recorded = runner.graphs.run(entries).logits.clone()
    assert recorded.isfinite().all()
    expected = ordinary_logits(runner, entries)
    torch.testing.assert_close(recorded, expected, rtol=0, atol=0.02 * expected.abs().max().item())


@pytest.mark.full
@pytest.mark.parametrize("parents", [[-1, -1, 1], []], ids=str)
def test_drafts_of_many_lengths_are_verified(decoder, parents):
    """Chains, and trees together with chains: the same logits, and nothing is written for the rows of padding."""
    runner = make_runner(decoder, speculative_model="ngram-tree", num_speculative_tokens=4)
    entries = begin(runner, [9, 6, 14])
    entries[0].sequence.draft_token_ids, entries[0].sequence.draft_parents = [5, 6, 7], parents
    entries[2].sequence.draft_token_ids = [8]
    entries = tuple(replace(entry, num_tokens=1 + len(entry.sequence.draft_token_ids)) for entry in entries)
    assert not runner.graphs.unsupported_reason(entries)
    recorded = runner.graphs.run(entries).logits.clone()
    assert recorded.isfinite().all()
    written = {name: tensor.clone() for name, tensor in runner.pages.memory.tensors.items()}
    expected = ordinary_logits(runner, entries)
    torch.testing.assert_close(recorded, expected, rtol=0, atol=0.02 * expected.abs().max().item())
    for name, tensor in runner.pages.memory.tensors.items():
        assert torch.equal(tensor.isnan(), written[name].isnan()), name


def test_rows_of_padding_write_and_change_nothing(decoder):
    runner = make_runner(decoder)
    entries = begin(runner, [5, 14, 3])
    first = runner.graphs.run(entries).logits.clone()
    before = {name: tensor.clone() for name, tensor in runner.pages.memory.tensors.items()}
    runner.graphs.run(entries[:1])
    assert torch.equal(runner.graphs.run(entries).logits, first)
    for name, tensor in runner.pages.memory.tensors.items():
        assert torch.equal(tensor.view(torch.int16), before[name].view(torch.int16)), name


def test_a_window_moves_with_the_sequence(gpu, tmp_path):
    """Its blocks before the window are given back: keys have other places than positions."""
    from runtime.backends.triton.layers import TritonOps

    folder = save_tiny_model(tmp_path / "model", "mistral", head_dim=32, sliding_window=6, **SIZES)
    windowed = replace(load_model(folder, device=gpu.type, dtype="bfloat16", kernels="reference"), ops=TritonOps())
    runner = make_runner(windowed, prefill_chunk=48)
    entries = begin(runner, [21, 4])
    hidden = runner.attention_window.evictable_blocks(20, BLOCK_SIZE)
    assert len(hidden) > 2
    for index in hidden:
        entries[0].sequence.block_ids[index] = -1
    recorded = runner.graphs.run(entries).logits.clone()
    assert recorded.isfinite().all()
    expected = ordinary_logits(runner, entries)
    torch.testing.assert_close(recorded, expected, rtol=0, atol=0.02 * expected.abs().max().item())


class Operations(TorchDispatchMode):
    """Operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.add(operation.name())
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "wishes",
    [
        (GREEDY, {}, {"temperature": 0.6}),
        ({"temperature": 0, "top_k": 5}, {"top_k": 3}, {"top_p": 0.7, "temperature": 2.0}),
        ({}, {"min_p": 0.1}, {}),
        (GREEDY, {"repetition_penalty": 1.5, "temperature": 0}, {"logit_bias": ((5, 4.0),)}),
    ],
    ids=["whole", "truncated", "mixed", "changed"],
)
def test_tokens_are_drawn_within_the_step(decoder, wishes):
    """Only reading the tokens is left after the graph, also where requests change logits."""
    runner = make_runner(decoder)
    entries = begin(runner, [9, 1, 14], wishes)
    for seed in (2**63 - 1, 5):
        for entry in entries:
            entry.sequence.request = replace(entry.sequence.request, seed=seed)
        _, logits, drawn, _ = runner.graphs.run(entries)
        there = logits.cpu()
        before = drawn.tokens.clone()
        with Operations() as operations:
            found = sample_and_match(entries, logits, drawn)
        assert found == sample_and_match(entries, there)
        assert torch.equal(drawn.tokens, before)
        assert operations.names <= {"aten::_to_copy"}


@pytest.mark.full
def test_steps_in_which_somebody_truncates_have_recordings_of_their_own(decoder):
    runner = make_runner(decoder)
    greedy, mixed = begin(runner, [9, 1]), begin(runner, [9, 1], (GREEDY, {"top_k": 3}))
    for entries, recorded in ((greedy, 1), (mixed, 2), (greedy, 2), (mixed, 2)):
        runner.graphs.run(entries)
        assert len(runner.graphs._captured) == 1 + recorded, "the step itself has one"
