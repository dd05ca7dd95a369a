"""Mixers with a state in Triton against plain torch in float64: decode, drafts and spans in one step, states after
segments, every layout of projections."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import answer_all, small_engine
from poisoned_memory import poisoned_allocations
from state_layers import (
    DECODE,
    computed_in_torch,
    delta_net,
    in_dtype,
    mamba2,
    projections,
    random_memory,
    random_weights,
    state_rows,
)
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model
from torch import Tensor

from compress.models.mixers.gated_delta_net import GatedDeltaNet
from compress.models.mixers.mamba2 import Mamba2
from runtime.backends.base import Target
from runtime.backends.state_kernels import StateSteps
from runtime.backends.triton.states import STATE_KERNELS
from runtime.core.request import SamplingParams
from runtime.core.state_rows import decode_state_rows
from runtime.core.step import NO_STATE
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model
from runtime.model.mixers.registry import RecurrentMixer

LONG = [(75, 4, ((2, 7), (70, 4), (74, 2))), (1, 1, ((0, 1),)), (3, 5, ((0, 0), (2, 6))), (18, NO_STATE, ((17, 3),))]
"""Segments shorter and longer than a chunk, a single token, a draft and a beginning."""
DRAFTED = [(4, 5, ((0, 0), (1, 1), (2, 2), (3, 3))), (4, NO_STATE, ((0, 4), (1, 6), (2, 7), (3, 8)))]
"""As captured steps lay drafts out: the state after each token is kept."""
KERNELS = {kernel.mixer: kernel for kernel in STATE_KERNELS}
DELTA_NETS = [delta_net(2, 1, 32, 16, True), delta_net(2, 2, 16, 64, False), delta_net(2, 1, 128, 128, True)]
MAMBAS = [
    mamba2(2, 16, state_size=32),
    mamba2(1, 32, norms_before_gate=True, kernel=4, state_size=16),
    mamba2(1, 64, norm=None, has_conv_bias=False, state_size=128),
]


def compare(mixer: GatedDeltaNet | Mamba2, spans: list, device: torch.device, dtype: torch.dtype, bound: float) -> None:
    generator, rows = torch.Generator().manual_seed(1), state_rows(spans)
    weights, inputs = random_weights(mixer, generator), projections(mixer, sum(rows.lengths), generator)
    weights, inputs = in_dtype(weights, dtype), tuple(part.to(dtype) for part in inputs)
    expected_memory = random_memory(mixer, torch.float64)
    exact = tuple(part.double() for part in inputs)
    expected = computed_in_torch(mixer, weights, exact, expected_memory, rows)

    memory = {name: tensor.to(device) for name, tensor in random_memory(mixer, dtype).items()}
    step = KERNELS[type(mixer)].prepare(mixer, in_dtype(weights, dtype, device), Target(device, dtype))
    with poisoned_allocations():
        found = step([part.to(device) for part in inputs], memory, state_rows(spans, device))
    assert found.dtype == dtype
    assert relative_error(found, expected) < bound
    for name, tensor in memory.items():
        assert relative_error(tensor, expected_memory[name]) < bound, name


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("mixer", "spans"),
    [
        (DELTA_NETS[0], [(20, 4, ((2, 7), (19, 4)))]),
        (MAMBAS[0], DECODE),
        *(pytest.param(mixer, DECODE, marks=pytest.mark.full) for mixer in (*DELTA_NETS, *MAMBAS[1:])),
        *(pytest.param(mixer, LONG, marks=pytest.mark.full) for mixer in (*DELTA_NETS[:2], *MAMBAS)),
        *(pytest.param(mixer, DRAFTED, marks=pytest.mark.full) for mixer in (DELTA_NETS[1], MAMBAS[1])),
    ],
)
def test_equals_plain_torch(gpu, mixer: GatedDeltaNet | Mamba2, spans: list) -> None:
    """On a GPU products round factors to 11 bits, one after the other."""
    compare(mixer, spans, gpu, torch.float32, 5e-3 if gpu.type == "cuda" else 1e-5)


def test_captured_steps_lay_drafts_out_as_others_do() -> None:
    expected = state_rows(DRAFTED)
    found = decode_state_rows(expected.read_slots, expected.write_slots)
    for name in ("read_slots", "write_slots", "row_starts", "segment_starts", "first_segments"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert (found.lengths, found.counts) == (expected.lengths, expected.counts)


@pytest.mark.full
@pytest.mark.parametrize("mixer", [DELTA_NETS[1], MAMBAS[0]])
def test_16_bit_activations_are_rounded_and_nothing_else(gpu, mixer: GatedDeltaNet | Mamba2) -> None:
    compare(mixer, LONG, gpu, torch.float16, 5e-3 if gpu.type == "cuda" else 2e-3)


@pytest.mark.full
@pytest.mark.parametrize("mixer", [DELTA_NETS[0], MAMBAS[1]])
def test_sequences_do_not_see_each_other(gpu, mixer: GatedDeltaNet | Mamba2) -> None:
    generator = torch.Generator().manual_seed(2)
    weights = in_dtype(random_weights(mixer, generator), torch.float16, gpu)
    inputs = [part.to(gpu, torch.float16) for part in projections(mixer, sum(span[0] for span in LONG), generator)]
    step, first = KERNELS[type(mixer)].prepare(mixer, weights, Target(gpu, torch.float16)), 0

    def compute(parts: list[Tensor], spans: list) -> Tensor:
        memory = {name: tensor.to(gpu) for name, tensor in random_memory(mixer, torch.float16).items()}
        return step(parts, memory, state_rows(spans, gpu))

    found = compute(inputs, LONG)
    for span in LONG:
        rows = slice(first, first + span[0])
        assert torch.equal(compute([part[rows] for part in inputs], [span]), found[rows])
        first = rows.stop


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid"])
def test_greedy_tokens_through_the_engine(gpu, tmp_path: Path, family: str) -> None:
    """Prompts in chunks, drafts and several requests: the tokens of plain torch."""
    sizes = {"mamba_d_state": 16} if family == "granitemoehybrid" else {"linear_key_head_dim": 16}
    folder = save_tiny_model(tmp_path / "model", family, **VARIANTS.get(family, {}) | sizes)
    answers, greedy = [], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for in_triton in (False, True):
        decoder = load_model(folder, dtype="float32", kernels="reference")
        if in_triton:
            decoder = with_state_kernels(decoder, gpu)
        engine = small_engine(decoder, prefill_chunk=24, speculative_model="ngram")
        answers.append(answer_all(engine, [(str(n), [*range(11, 11 + n)] * 2, greedy) for n in (2, 14)]))
    assert answers[1] == answers[0]


def with_state_kernels(decoder: Decoder, device: torch.device) -> Decoder:
    """A decoder whose recurrent layers are computed in Triton; the registry chooses it on GPUs only."""
    target, layers = Target(device, decoder.dtype), []
    for layer in decoder.layers:
        if isinstance(layer.mixer, RecurrentMixer):
            mixer, weights = layer.mixer.spec, layer.mixer.weights
            step = KERNELS[type(mixer)].prepare(mixer, weights, target)
            layer = replace(layer, mixer=replace(layer.mixer, steps=StateSteps(step, step)))
        layers.append(layer)
    return replace(decoder, layers=tuple(layers))


@pytest.mark.parametrize(
    ("mixer", "dtype", "fact"),
    [
        (delta_net(32, 16, 128, 128, True), torch.bfloat16, ""),
        (mamba2(1, 64, state_size=128), torch.float16, ""),
        (mamba2(1, 64, state_size=128), torch.float32, "16 bits"),
        (mamba2(1, 80, state_size=128), torch.bfloat16, "not 80"),
        (mamba2(1, 64, state_size=128, kernel=9), torch.bfloat16, "8 tokens"),
        (mamba2(1, 64, state_size=128, activation="relu"), torch.bfloat16, "relu"),
    ],
)
def test_refusals_say_why(mixer: GatedDeltaNet | Mamba2, dtype: torch.dtype, fact: str) -> None:
    weights = random_weights(mixer, torch.Generator().manual_seed(1))
    reason = KERNELS[type(mixer)].unsupported_reason(mixer, weights, Target(torch.device("cuda"), dtype))
    assert fact in reason
    assert bool(reason) == bool(fact)
