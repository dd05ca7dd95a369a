"""The whole matrix, over HTTP in float64: nothing that only makes serving faster may change a token.

{five models} x {prefix cache} x {chunk sizes} x {ample / scarce blocks and states} x {no speculation, n-gram, draft
model, two self-drafts}, and in each of these engines, all at the same time, {n = 1, 3} x {greedy, seeded} x {whole /
streamed}: 2,400 cells. Every answer must be the one of a plain engine that serves one
request at a time. At every run come engines that show every setting, with the hybrid and with the mixture, and one with
the demo model; the others are in the full tier.
"""

import asyncio
import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from covering import covering
from engines import small_engine
from servers import events
from shared_store import SharedStore
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model

from compress.common.cli import BUNDLED, bundled_path, demo_model_path
from runtime.engine.engine import Engine
from runtime.engine.engine_thread import EngineThread
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model
from runtime.server.app import create_app
from runtime.server.serving import Limits
from runtime.text.tokenizer import Tokenizer

SYSTEM = "The history of the city begins with a small settlement on the river. "
PROMPTS = (SYSTEM + "The river was", SYSTEM + "The city was", "the cat and the dog and the cat and the dog and the")
SAMPLINGS = ({"temperature": 0}, {"temperature": 0.8, "seed": 7})
FIXED = {"model": "demo", "max_tokens": 14, "logprobs": 0}
FEW_WORDS = {"logit_bias": {str(token): 10 for token in range(300, 308)}}
"""For the hybrid, which would never repeat a pair of words, so that n-grams would draft nothing."""

TRAINED = tuple(BUNDLED)
HYBRID = "qwen3_5_text"
QUICK = (HYBRID, "qwen3_moe")
TINY = (*QUICK, "llama")
"""Families of random weights: three recurrent layers and one of attention, a mixture of experts, an MLP."""
CACHES = (True, False)
CHUNKS = (7, 64, 512)
BLOCKS = (400, 18)
SCARCE_STATES = 12
SPECULATION = ("", "ngram", "demo", "self:2bit", "self:skip")

Answer = list[tuple[str, tuple[str, ...], str]]
"""Text, tokens and finish reason of each choice."""


@dataclass(frozen=True)
class Model:
    folder: Path
    decoder: Decoder
    tokenizer: Tokenizer

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Each prompt's requests, whole and streamed."""
        fixed = FIXED | (FEW_WORDS if self.decoder.config.state_fields else {})
        return [
            {**fixed, **sampling, "prompt": prompt, "n": n, "stream": stream}
            for prompt, n, sampling, stream in itertools.product(PROMPTS, (1, 3), SAMPLINGS, (False, True))
        ]

    @cached_property
    def expected(self) -> list[Answer]:
        """One request at a time, nothing shared, nothing guessed, every prompt in one piece."""
        engine = build_engine(self, num_blocks=400, prefix_caching=False, prefill_chunk=512)
        whole = asyncio.run(serve(engine, [body for body in self.bodies if not body["stream"]], together=False))
        answers = [answer for answer in whole for _ in ("whole", "streamed")]
        distinct = {tokens for answer in answers for _, tokens, _ in answer}
        # For each prompt three seeded answers, of which the first is also that of n = 1; greedy ones may coincide.
        assert len(distinct) > len(PROMPTS) * 3
        return answers


@pytest.fixture(scope="module")
def model_of(shared_store: SharedStore) -> Callable[[str], Model]:
    @cache
    def load(name: str) -> Model:
        tiny = name in TINY
        folder = shared_store.folder("matrix", name, partial(write_tiny, name)) if tiny else bundled_path(name)
        return Model(folder, load_model(folder, device="cpu", dtype="float64"), Tokenizer.open(folder))

    return load


def write_tiny(family: str, folder: Path) -> None:
    sizes = {"num_hidden_layers": 3} | VARIANTS.get(family, {}) | {"vocab_size": 8192}
    save_tiny_model(folder, family, **sizes)
    for file in demo_model_path().glob("tokenizer*"):
        shutil.copy(file, folder)


def build_engine(model: Model, **options: Any) -> Engine:
    return small_engine(model.decoder, model.folder, model.tokenizer, dtype="float64", max_model_len=72, **options)


async def serve(engine: Engine, requests: list[dict[str, Any]], together: bool) -> list[Answer]:
    limits = Limits(engine.runner.max_model_len, max_requests=256)
    app = create_app(EngineThread(engine), engine.tokenizer, "demo", limits)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=120) as client,
    ):
        if together:
            first = await ask(client, requests[0])  # so that the others find something in the cache
            return [first, *await asyncio.gather(*(ask(client, body) for body in requests[1:]))]
        return [await ask(client, body) for body in requests]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    parts = events(response.text) if body["stream"] else [response.json()]
    answer: Answer = []
    for index in range(body["n"]):
        choices = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
        text = "".join(choice["text"] for choice in choices)
        tokens = tuple(token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"])
        (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        answer.append((text, tokens, reason))
    return answer


def cells() -> list[Any]:
    """All settings with all models. Those of the quick tier come with the hybrid and the mixture."""
    found = []
    for name in (*TINY, *TRAINED):
        settings = covering(SPECULATION, BLOCKS, CHUNKS, CACHES)
        marks = () if name in QUICK else (pytest.mark.full,)
        found += [pytest.param(name, *cell.values, marks=marks or cell.marks) for cell in settings]
    first = len(found) - len(TRAINED) * len(settings)
    found[first] = pytest.param(*found[first].values)
    return found


@pytest.mark.parametrize(("name", "speculate", "num_blocks", "chunk", "caching"), cells())
def test_every_cell_gives_the_same_tokens(
    model_of: Callable[[str], Model],
    name: str,
    speculate: str,
    num_blocks: int,
    chunk: int,
    caching: bool,
) -> None:
    options = {"speculative_model": speculate, "num_blocks": num_blocks, "prefill_chunk": chunk}
    is_scarce, model = num_blocks == min(BLOCKS), model_of(name)
    options["num_state_slots"] = SCARCE_STATES if is_scarce else None
    engine = build_engine(model, prefix_caching=caching, **options)
    found = asyncio.run(serve(engine, model.bodies, together=True))
    assert found == model.expected
    stats, pool = engine.scheduler.stats, engine.scheduler.pool
    engine.scheduler.check()
    assert pool.num_free == pool.num_blocks
    if states := engine.scheduler.states:
        assert states.pool.num_free == states.pool.num_slots
    # The cell was what its name says.
    assert (stats.num_preemptions + pool.num_evictions > 0) == is_scarce
    assert stats.num_prefix_hits > 0 if caching else stats.num_prefix_hits == 0
    assert (engine.metrics.spec_decode_num_draft_tokens_total > 0) == bool(speculate)
