"""Processes that divide the layers of a model give the tokens of one, in float64, whatever makes the engine fast."""

import os
import signal
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from engines import drain
from rank_answers import AMPLE, EXACT, SAMPLINGS, SCARCE, answers, pack_demo, plain, ranks
from shared_store import SharedStore
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model

from compress.common.cli import BUNDLED, bundled_path
from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.core.step import RunnerLostError
from runtime.llm import LLM

HYBRID, LATENT, MIXTURE, UNIFORM, WINDOWS = "qwen3_5_text", "deepseek_v3", "qwen3_moe", "llama", "mistral"
LAYERS = {LATENT: 4, MIXTURE: 4, UNIFORM: 4, WINDOWS: 4}


@pytest.fixture(scope="module")
def folder_of(shared_store: SharedStore) -> Callable[[str], Path]:
    def find(name: str) -> Path:
        if name in BUNDLED:
            return bundled_path(name)
        if name == "packed":
            return shared_store.folder("ranks", "packed", pack_demo) / "packed"
        return shared_store.folder("stages", name, partial(write_tiny, name))

    return cache(find)


def write_tiny(family: str, folder: Path) -> None:
    """Saves a model of random weights with the demo model's tokens."""
    sizes = VARIANTS[family] | {"vocab_size": 8192}
    save_tiny_model(folder, family, **(sizes | ({"num_hidden_layers": LAYERS[family]} if family in LAYERS else {})))
    for file in bundled_path("demo").glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())


def staged(folder: Path, **options: Any) -> LLM:
    return LLM(folder, RuntimeConfig(**(EXACT | {"block_size": 4, "pipeline_parallel_size": 2} | options)))


@pytest.mark.parametrize(
    "name", ["demo", HYBRID, *(pytest.param(n, marks=pytest.mark.full) for n in ("packed", LATENT))]
)
def test_two_stages_give_the_tokens_of_one_process(folder_of: Callable[[str], Path], name: str) -> None:
    llm = staged(folder_of(name), num_blocks=SCARCE, prefill_chunk=7, speculative_model="ngram")
    assert answers(llm) == plain(folder_of(name))
    stats, metrics = llm.engine.scheduler.stats, llm.engine.metrics
    assert stats.num_prefix_hits
    assert stats.num_preemptions + llm.engine.scheduler.pool.num_evictions
    assert metrics.spec_decode_num_draft_tokens_total or name != "demo"  # random weights repeat no words


@pytest.mark.parametrize(
    "name", ["demo", *(pytest.param(n, marks=pytest.mark.full) for n in (HYBRID, LATENT, WINDOWS))]
)
def test_parts_of_a_long_prompt_give_the_tokens_of_one_process(folder_of: Callable[[str], Path], name: str) -> None:
    """Steps of 64 tokens and more are computed in parts."""
    prompts = [[(7 * place + index) % 500 + 300 for place in range(length)] for index, length in enumerate((84, 50))]
    options = {"num_blocks": AMPLE, "prefill_chunk": 84, "max_model_len": 96}
    found = []
    for stages in (1, 2):
        llm = staged(folder_of(name), pipeline_parallel_size=stages, **options)
        found.append([answer.token_ids for answer in llm.generate(prompts, SAMPLINGS[0])])
    assert found[0] == found[1]
    assert all(found[0])


@pytest.mark.full
@pytest.mark.parametrize("name", ["demo", "packed", "demo-mixture", HYBRID, LATENT, MIXTURE])
@pytest.mark.parametrize(("stages", "each"), [(3, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize(("blocks", "chunk", "drafter"), [(AMPLE, 64, "demo"), (SCARCE, 7, "ngram")])
def test_more_processes_give_the_tokens_of_one(
    folder_of: Callable[[str], Path], name: str, stages: int, each: int, blocks: int, chunk: int, drafter: str
) -> None:
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": each}
    options = {"num_blocks": blocks, "prefill_chunk": chunk, "speculative_model": drafter}
    try:
        llm = staged(folder_of(name), **sizes, **options)
    except ToolkitError as error:
        assert each > 1
        pytest.skip(f"matrices are not cut: {error.problem}")
    assert answers(llm) == plain(folder_of(name))


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_stage_holds_its_share_of_weights_and_pages(folder_of: Callable[[str], Path], stages: int) -> None:
    """Embedding and head are whole in the first and last stage."""
    folder = folder_of(UNIFORM)
    whole = LLM(folder, RuntimeConfig(**EXACT)).engine.runner
    first = staged(folder, block_size=16, pipeline_parallel_size=stages).engine.runner
    layers = sum(layer.nbytes for layer in whole.decoder.layers)
    assert sum(layer.nbytes for layer in first.decoder.layers) == pytest.approx(layers / stages, rel=0.05)
    assert first.memory.pool_bytes == pytest.approx(whole.memory.pool_bytes / stages, rel=0.05)
    assert first.pages.memory.nbytes == first.memory.pool_bytes
    assert first.num_blocks == whole.num_blocks


def test_a_stage_that_dies_is_an_error_within_seconds() -> None:
    before = ranks()
    llm = LLM("demo", RuntimeConfig(**EXACT, pipeline_parallel_size=2))
    (rank,) = set(ranks()) - set(before)
    llm.engine.add_request([5, 6, 7], SAMPLINGS[0])
    llm.engine.step()
    os.kill(rank, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RunnerLostError):
        drain(llm.engine)
    assert time.monotonic() - start < 15


def test_more_stages_than_layers_are_refused() -> None:
    before = ranks()
    with pytest.raises(ToolkitError) as error:
        LLM("demo", RuntimeConfig(**EXACT, pipeline_parallel_size=99))
    assert "--pipeline-parallel-size" in error.value.remedy
    assert not set(ranks()) - set(before)
