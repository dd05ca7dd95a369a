"""Greedy tokens of every family, alone and in a crowd, are those of transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from covering import sample
from engines import answer_all, small_engine
from tiny_configs import VARIANTS
from tiny_models import load_reference, reference_logits, save_tiny_model

from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine
from runtime.model.loader import load_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LENGTHS = (5, 40, 130)
CROWDED = {
    "num_blocks": 48,
    "prefill_chunk": 16,
    "prefix_caching": True,
    "speculative_model": "ngram",
}


def requests(longest: int) -> Iterator[tuple[str, list[int], SamplingParams]]:
    """Prompts that repeat themselves, some of which begin alike."""
    chance = torch.Generator().manual_seed(5)
    for number in range(2):
        text = torch.randint(3, 112, (13,), generator=chance).tolist() * 10
        fitting = [length for length in LENGTHS if length + GREEDY.max_tokens <= longest]
        yield from ((f"{length} {number}", text[:length], GREEDY) for length in fitting)


@pytest.mark.parametrize("family", sample(VARIANTS, quick=2))
def test_greedy_tokens(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", family, **VARIANTS[family])
    decoder, reference = load_model(folder, dtype="float64"), load_reference(folder)
    engine = small_engine(decoder, folder, **CROWDED)
    sent = list(requests(engine.runner.max_model_len))
    together = answer_all(engine, sent)
    if len(sent) == 2 * len(LENGTHS) and not all(decoder.config.windows):
        assert_crowded(engine)
    for name, prompt, sampling in sent:
        found = together[name, 0]
        logits = reference_logits(reference, torch.tensor([prompt + found]))[0, len(prompt) - 1 : -1]
        assert found == logits.argmax(-1).tolist(), name
        if name.endswith("0"):
            assert answer_all(small_engine(decoder), [(name, prompt, sampling)])[name, 0] == found


def assert_crowded(engine: Engine) -> None:
    stats, pool = engine.scheduler.stats, engine.scheduler.pool
    assert stats.num_preemptions + pool.num_evictions > 0
    assert stats.num_prefix_hits > 0
