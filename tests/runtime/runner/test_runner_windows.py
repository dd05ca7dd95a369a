"""Models with sliding windows, over texts several windows long: transformers' tokens, in a window's worth of blocks."""

import random

import pytest
import torch
from covering import covering
from engines import answer_all, blocks_held, small_engine
from tiny_models import load_reference, reference_logits, save_tiny_model

from compress.common.errors import ToolkitError
from runtime.core.attention_window import FULL_ATTENTION, AttentionWindow
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner

WINDOW = 16
BLOCK = 4
MODELS = {
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}),
    "mixed": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    family, options = MODELS[request.param]
    folder = save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", family, **options)
    reference = load_reference(folder)
    reference.set_attn_implementation("eager")
    return request.param, load_model(folder, dtype="float64"), reference


def prompts() -> list[list[int]]:
    chance = random.Random(1)
    shared = [chance.randrange(112) for _ in range(61)]
    lengths = [(61, 5), (61, 9), (61, 0), (0, 3), (0, 87), (30, 1), (61, 9)]
    return [shared[:prefix] + [chance.randrange(112) for _ in range(rest)] for prefix, rest in lengths]


def serve(decoder, **options) -> tuple[list[list[int]], int, Engine]:
    """Tokens of each prompt, and the most blocks that one sequence held after a step."""
    engine, held, greedy = small_engine(decoder, **options), [], SamplingParams(60, temperature=0, ignore_eos=True)
    requests = [(str(number), prompt, greedy) for number, prompt in enumerate(prompts())]
    found = answer_all(engine, requests, after_step=lambda: held.extend(blocks_held(engine)))
    return [found[name, 0] for name, *_ in requests], max(held), engine


@pytest.mark.parametrize(("chunk", "num_blocks", "prefix_caching"), covering([1, 7, 64], [200, 40], [True, False]))
def test_greedy_tokens_equal_transformers(model, chunk, num_blocks, prefix_caching):
    name, decoder, reference = model
    found, most, engine = serve(decoder, prefill_chunk=chunk, num_blocks=num_blocks, prefix_caching=prefix_caching)
    for prompt, tokens in zip(prompts(), found, strict=True):
        logits = reference_logits(reference, torch.tensor([prompt + tokens[:-1]]))[0, len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist()
    assert engine.scheduler.blocks.attention_window == (FULL_ATTENTION if name == "mixed" else AttentionWindow(WINDOW))
    if name != "mixed":
        assert most <= (WINDOW + chunk) // BLOCK + 2
    if num_blocks == 40 and name == "mixed":
        assert engine.scheduler.stats.num_preemptions


def test_a_window_needs_no_more_blocks_for_longer_texts(model):
    name, decoder, _ = model
    few = {"num_blocks": 10, "prefill_chunk": 7, "max_model_len": 256}
    if name == "mixed":
        with pytest.raises(ToolkitError, match=r"256 tokens.*64 KV.*10"):
            serve(decoder, **few)
        return
    found, most, engine = serve(decoder, **few)
    assert found == serve(decoder)[0]
    assert most <= 10 < len(prompts()[0]) // BLOCK
    assert engine.scheduler.stats.num_preemptions


def test_decodes_gather_only_blocks_in_the_window(model, monkeypatch):
    """The number of keys that a step reads does not grow with the text."""
    name, decoder, _ = model
    config = RuntimeConfig(block_size=BLOCK, num_blocks=100)
    runner = build_runner(decoder, config)
    gathered: list[int] = []
    gather = runner.pages.gather

    def count(layer, block_ids):
        gathered.append(len(block_ids))
        return gather(layer, block_ids)

    monkeypatch.setattr(runner.pages, "gather", count)
    engine = Engine(runner, None, config)
    engine.add_request(list(range(90)), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    while engine.has_work:
        gathered.clear()
        engine.step()
    assert max(gathered) == (190 // BLOCK + 1 if name == "mixed" else WINDOW // BLOCK + 1)
