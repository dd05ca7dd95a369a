"""Processes that share a model with another mixer than plain attention give the tokens of one, in float64."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_answers import AMPLE, EXACT, SCARCE, answers, plain, record_exchanges
from shared_store import SharedStore
from tiny_configs import VARIANTS
from tiny_models import pack_model, save_tiny_model

from compress.checkpoint.config import read_config
from compress.checkpoint.weights import Int
from compress.common.cli import bundled_path
from runtime.core.config import RuntimeConfig
from runtime.core.model_config import parse_config
from runtime.llm import LLM

FAMILIES = {"hybrid": "qwen3_5_text", "mamba": "mamba2", "latent": "deepseek_v3", "wide-norms": "olmo2"}
SIZES = {"vocab_size": 8192, "head_dim": 16, "hidden_size": 64, "intermediate_size": 128}
PACKED = "-int4"
MODELS = [f"{name}{form}" for name in FAMILIES for form in ("", PACKED)]
QUICK = {"hybrid-int4", "latent"}


def make_tiny(family: str, folder: Path) -> None:
    """Random weights, dense and packed, over the tokens of the demo model."""
    folder.mkdir()
    dense = save_tiny_model(folder / "dense", family, torch.bfloat16, **(VARIANTS[family] | SIZES))
    linears = {linear.name for linear in parse_config(read_config(dense)).spec.linears()}
    pack_model(dense, folder / "packed", lambda module: Int(4, 16) if module in linears else None)
    for made in ("dense", "packed"):
        for file in bundled_path("demo").glob("tokenizer*"):
            (folder / made / file.name).write_bytes(file.read_bytes())


@pytest.fixture(scope="module")
def folder_of(shared_store: SharedStore) -> Callable[[str], Path]:
    def find(name: str) -> Path:
        family = FAMILIES[name.removesuffix(PACKED)]
        made = shared_store.folder("ranks", family, partial(make_tiny, family))
        return made / ("packed" if name.endswith(PACKED) else "dense")

    return cache(find)


@pytest.fixture(scope="module")
def tokens_of_one(folder_of: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    return cache(lambda name: plain(folder_of(name)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in MODELS]
)
def test_two_ranks_give_the_tokens_of_one(
    folder_of: Callable[[str], Path], tokens_of_one: Callable[[str], list[list[int]]], name: str
) -> None:
    options = {"block_size": 4, "num_blocks": SCARCE, "num_state_slots": 7, "prefill_chunk": 7}
    llm = LLM(folder_of(name), RuntimeConfig(**EXACT, **options, tensor_parallel_size=2))
    assert answers(llm) == tokens_of_one(name)
    scheduler = llm.engine.scheduler
    assert scheduler.stats.num_prefix_hits
    assert scheduler.stats.num_preemptions + scheduler.pool.num_evictions or name.startswith("mamba")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("hybrid", 2),
        ("latent", 3),
        *(pytest.param(name, 3, marks=pytest.mark.full) for name in MODELS if name != "latent"),
    ],
)
def test_ranks_that_share_tokens_give_those_of_one(
    folder_of: Callable[[str], Path],
    tokens_of_one: Callable[[str], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    count: int,
) -> None:
    sent = record_exchanges(monkeypatch)
    options = {"block_size": 4, "num_blocks": SCARCE, "num_state_slots": 7, "prefill_chunk": 7}
    sizes = {"tensor_parallel_size": count, "sequence_parallel_min_tokens": 5}
    llm = LLM(folder_of(name), RuntimeConfig(**EXACT, **options, **sizes))
    assert answers(llm) == tokens_of_one(name)
    assert llm.engine.scheduler.stats.num_prefix_hits
    assert len(set(map(tuple, sent))) > 1


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("count", "options"),
    [(3, {"num_blocks": SCARCE, "num_state_slots": 7, "prefill_chunk": 7}), (4, {"speculative_model": "ngram"})],
    ids=["scarce-3", "ngram-4"],
)
def test_more_ranks_give_the_tokens_of_one(
    folder_of: Callable[[str], Path],
    tokens_of_one: Callable[[str], list[list[int]]],
    name: str,
    count: int,
    options: dict[str, Any],
) -> None:
    options = {"block_size": 4, "num_blocks": AMPLE} | options
    llm = LLM(folder_of(name), RuntimeConfig(**EXACT, **options, tensor_parallel_size=count))
    assert answers(llm) == tokens_of_one(name)
