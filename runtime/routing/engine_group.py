"""Several engines of one model that share requests: each request runs on the one that `SentPrefixes` chooses.

Further engines may compute the prompts of these (`runtime.transfer`), which ask them without this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

from runtime.core.request import Delta, RequestOptions, SamplingParams
from runtime.engine.block_pool import extend_hashes, root_hash
from runtime.engine.engine import NO_OPTIONS
from runtime.engine.engine_client import EngineClient, Health, SingleEngineClient, join_health
from runtime.engine.metrics import join
from runtime.routing.prefixes import SentPrefixes


class EngineGroup(EngineClient):
    """Serves several engines as one. It ends with the first engine that ends, unless that only computes prompts.

    Args:
        engines: the engines, not started. Their names, also in metrics, are their places.
        prefill_engines: engines that only compute prompts, not started; their names are `prefill-0` and so on.
        block_size: tokens of a block of their prefix caches.
        most_blocks: blocks of prompts to remember for each; 0 chooses engines by load only.
    """

    def __init__(
        self,
        engines: Sequence[SingleEngineClient],
        block_size: int,
        most_blocks: int,
        prefill_engines: Sequence[SingleEngineClient] = (),
    ) -> None:
        self.engines = {str(place): engine for place, engine in enumerate(engines)}
        self.all = self.engines | {f"prefill-{place}": engine for place, engine in enumerate(prefill_engines)}
        self.block_size = block_size
        self.prefixes = SentPrefixes(most_blocks)

    def start(self) -> None:
        for engine in self.all.values():
            engine.start()

    def stop(self, timeout: float = 30.0) -> bool:
        with ThreadPoolExecutor(len(self.all)) as pool:
            return all(list(pool.map(lambda engine: engine.stop(timeout), self.all.values())))

    def check(self) -> Health:
        """Returns the health of all together, see `join_health`."""
        return join_health({f"engine {name}": engine.check() for name, engine in self.engines.items()})

    async def render_metrics(self, model_name: str = "", engine: str = "") -> str:
        """Renders the metrics of all engines, or of the one with that name."""
        chosen = {engine: self.all[engine]} if engine else self.all
        return join(await asyncio.gather(*(each.render_metrics(model_name, name) for name, each in chosen.items())))

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> AsyncGenerator[list[Delta], None]:
        engine = self._choose(prompt_token_ids, options)
        async with aclosing(engine.generate(prompt_token_ids, sampling, request_id, options)) as groups:
            async for deltas in groups:
                yield deltas

    async def change_adapters(self, name: str, path: Path | None) -> None:
        engines = [engine for engine in self.all.values() if not engine.check().has_ended]
        changes = await asyncio.gather(*(each.change_adapters(name, path) for each in engines), return_exceptions=True)
        errors = [error for error in changes if error is not None]
        if errors and path is not None:
            changed = [engine for engine, error in zip(engines, changes, strict=True) if error is None]
            await asyncio.gather(*(each.change_adapters(name, None) for each in changed), return_exceptions=True)
        for error in errors:
            raise error

    def _choose(self, prompt_token_ids: Sequence[int], options: RequestOptions) -> SingleEngineClient:
        keys: list[bytes] = []
        extend_hashes(keys, prompt_token_ids, self.block_size, root_hash(options.adapter, options.cache_salt))
        loads = {name: engine.num_requests for name, engine in self.engines.items()}
        name, *_ = self.prefixes.choose(keys, loads)
        self.prefixes.note(keys, name)
        return self.engines[name]
