"""Routers: which engine gets a request. Rows of a registry. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from compress.common.registry import Registry
from runtime.deploy.replicas import MOST_KEYS
from runtime.engine.block_pool import extend_hashes, root_hash
from runtime.routing.prefixes import SentPrefixes
from runtime.simulate.jobs import Job
from runtime.simulate.worker import Worker

PART_TOKENS = 64
"""Tokens of a prompt for each of the keys that engines are remembered by."""


class Router(Protocol):
    """Chooses an engine for each request."""

    def choose(self, workers: Sequence[Worker], job: Job) -> Worker:
        """Returns the engine that gets a request."""


ROUTERS: Registry[type[Router]] = Registry("router")


@ROUTERS.register("round-robin")
class RoundRobin:
    """Engines in turn."""

    def __init__(self) -> None:
        self.turn = -1

    def choose(self, workers: Sequence[Worker], job: Job) -> Worker:
        self.turn = (self.turn + 1) % len(workers)
        return workers[self.turn]


@ROUTERS.register("least-loaded")
class LeastLoaded:
    """The engine with the fewest requests, the first of several."""

    def choose(self, workers: Sequence[Worker], job: Job) -> Worker:
        return min(workers, key=lambda worker: worker.load)


@ROUTERS.register("prefix")
class ByPrefix:
    """The engine that last got the longest prefix, unless it is too busy: the rule of `runtime deploy ray`."""

    def __init__(self) -> None:
        self.prefixes = SentPrefixes(MOST_KEYS)

    def choose(self, workers: Sequence[Worker], job: Job) -> Worker:
        keys: list[bytes] = []
        extend_hashes(keys, job.token_ids() if job.pieces else (), PART_TOKENS, root_hash("prompt", ""))
        name = self.prefixes.choose(keys, {str(place): worker.load for place, worker in enumerate(workers)})[0]
        self.prefixes.note(keys, name)
        return workers[int(name)]
