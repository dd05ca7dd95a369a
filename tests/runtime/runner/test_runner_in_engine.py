"""Engine, scheduler, blocks and model together, in float64: every way of scheduling gives the same tokens."""

import itertools
import random

import pytest
import torch
from engines import collect, drain, small_engine, tokens_of
from tiny_models import load_reference

from compress.common.cli import demo_model_path
from runtime.core.request import SamplingParams
from runtime.model.loader import load_model


def serve(decoder, requests, arrivals=None, **options) -> dict[str, list[int]]:
    """Tokens by request id. `arrivals`: the step before which each request comes in."""
    engine, deltas = small_engine(decoder, **options), {}
    waiting = sorted(zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0])
    for step in itertools.count():
        while waiting and waiting[0][0] <= step:
            name, prompt, sampling = waiting.pop(0)[1]
            engine.add_request(prompt, sampling, name)
        if not waiting:
            break
        collect(engine, deltas)
    found = drain(engine, deltas)
    assert not any(delta.error for parts in found.values() for delta in parts)
    return {name: tokens_of(parts) for name, parts in found.items()}


def many_requests() -> list[tuple[str, list[int], SamplingParams]]:
    chance = random.Random(4)
    shared = [chance.randrange(112) for _ in range(17)]
    requests = []
    for number in range(9):
        prompt = shared[: chance.choice([0, 8, 17])] + [chance.randrange(112) for _ in range(chance.randint(1, 20))]
        options = {"temperature": chance.choice([0, 0.9]), "max_tokens": chance.randint(1, 25)}
        requests.append((f"r{number}", prompt, SamplingParams(**options, top_p=0.9, seed=number, ignore_eos=True)))
    return requests


@pytest.fixture(scope="module")
def expected(tiny):
    """Each request alone, in one piece, with nothing cached."""
    answers: dict[str, list[int]] = {}
    for request in many_requests():
        answers |= serve(tiny, [request], prefix_caching=False, prefill_chunk=512)
    return answers


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [200, 17])
@pytest.mark.parametrize(("chunk", "budget"), [(5, 12), (64, 512)])
@pytest.mark.parametrize("spread", [0, 7])
def test_tokens_do_not_depend_on_scheduling(prefix_caching, num_blocks, chunk, budget, spread, tiny, expected):
    requests = many_requests()
    options = {"prefix_caching": prefix_caching, "prefill_chunk": chunk, "max_num_batched_tokens": budget}
    arrivals = [number * spread % 23 for number in range(len(requests))]
    assert serve(tiny, requests, arrivals, num_blocks=num_blocks, **options) == expected


def test_demo_model_equals_transformers_while_others_come_and_go():
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(4, 8192, (length,), generator=generator).tolist() for length in (30, 70, 5, 41)]
    model = load_reference(demo_model_path(), exact_norms=False)
    expected = model.generate(
        torch.tensor([prompts[0]]), max_new_tokens=128, do_sample=False, eos_token_id=None, pad_token_id=3
    )
    greedy = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    requests = [("main", prompts[0], greedy)]
    for number, prompt in enumerate(prompts[1:]):
        requests.append((f"guest {number}", prompt, SamplingParams(temperature=1, seed=number, max_tokens=9)))
    decoder = load_model(demo_model_path(), dtype="float64")
    found = serve(decoder, requests, arrivals=[0, 3, 20, 50], block_size=16, prefill_chunk=16)
    assert found["main"] == expected[0, 30:].tolist()
