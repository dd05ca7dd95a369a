"""Replicas of one model: their number, and the start of a prompt by which one of them is chosen. No Ray."""

from __future__ import annotations

import json
from dataclasses import dataclass

from compress.common.cli import option
from runtime.core.config import RoutingOptions
from runtime.engine.block_pool import extend_hashes, root_hash

PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input")
PART_BYTES = 256
MOST_KEYS = 100_000
"""Keys that are remembered for each replica."""


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(RoutingOptions):
    """Number and resources of replicas."""

    min_replicas: int = option("--min-replicas", default=1, min=1, help="Replicas that always run.")
    max_replicas: int = option(
        "--max-replicas", default=1, min=1, help="Replicas under load; no fewer than --min-replicas."
    )
    target_ongoing_requests: int = option(
        "--target-requests", default=16, min=1, help="Requests, running and waiting, for which a replica is added."
    )
    num_cpus: float = option("--replica-cpus", default=1.0, min=0, help="CPUs that Ray reserves for a replica.")
    num_gpus: float = option("--replica-gpus", default=0.0, min=0, help="GPUs that Ray reserves for a replica.")


def prefix_keys(body: bytes) -> list[bytes]:
    """Returns chained hashes of the parts of a request's prompt, one for each `PART_BYTES`; none without a prompt."""
    try:
        request = json.loads(body)
    except ValueError:
        return []
    if not isinstance(request, dict):
        return []
    keys: list[bytes] = []
    text = json.dumps([request[name] for name in PROMPT_FIELDS if request.get(name) is not None])
    extend_hashes(keys, list(text.encode()), PART_BYTES, root_hash("prompt", str(request.get("cache_salt", ""))))
    return keys
