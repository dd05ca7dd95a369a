"""The engine that generates: has prompts computed by other engines, whose pages arrive in its host memory.

They are stored there under their hashes, as pages that were evicted are, and the request starts when they have arrived:
the prefix cache finds them. What did not arrive is computed here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from runtime.engine.block_pool import extend_hashes
from runtime.engine.engine_loop import Add, EngineLoop, Events, Run
from runtime.engine.kv_offload import KVOffload
from runtime.engine.transfer import Transfer
from runtime.transfer.messages import PAGES, STATES, Arrived, Ended, Unwanted, Wanted
from runtime.transfer.prefill_peer import Link, PrefillPeer

logger = logging.getLogger("runtime.transfer.receiver")

LEAST_SECONDS = 0.001
"""Time limit of a request whose time is over when its pages have arrived."""


Hashes = dict[str, set[bytes]]
"""Hashes by kind."""


@dataclass(eq=False, slots=True)
class Prompt:
    """A prompt that another engine computes.

    Attributes:
        link: connection to that engine.
        request: request that waits for the pages; None if it has ended, or waits no longer.
        reserved: what may still be written.
        arrived: what is stored for the request.
    """

    number: int
    link: Link
    request: Add | None
    reserved: Hashes
    arrived: Hashes = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)


class PageReceiver(Transfer):
    """Has the prompts of an engine computed by others.

    Args:
        loop: loop of this engine.
        local_tokens: maximum tokens without known pages of prompts that this engine computes itself.

    Attributes:
        peers: connections to the other engines.
    """

    def __init__(self, loop: EngineLoop, local_tokens: int) -> None:
        self.loop, self.local_tokens = loop, local_tokens
        self.peers: Sequence[PrefillPeer] = ()
        self._numbers = count()
        self._prompts: dict[int, Prompt] = {}
        self._started: dict[int, Hashes] = {}  # by stream; their pages are kept until they are in use

    @property
    def num_waiting(self) -> int:
        return sum(prompt.request is not None for prompt in self._prompts.values())

    def takes(self, request: Add) -> bool:
        links = [peer.link for peer in self.peers if peer.link is not None and peer.link.is_usable]
        if not links or not self._is_generating(request):
            return False
        link = min(links, key=lambda each: each.num_open)
        num_tokens, missing = self._find_missing(request)
        if num_tokens <= self.local_tokens:
            return False
        reserved = {kind: tier.reserve(missing[kind]) for kind, tier in self._tiers().items()}
        prompt = Prompt(next(self._numbers), link, request, {k: {h for h, _ in slots} for k, slots in reserved.items()})
        options = replace(request.options, detokenize=False)
        token_ids = request.prompt_token_ids[: self._num_full_tokens(request)]
        if any(reserved.values()) and link.send(Wanted(prompt.number, token_ids, options, reserved)):
            self._prompts[prompt.number] = prompt
            link.num_open += 1
            self._count()
            return True
        self._cancel(prompt)
        return False

    def _find_missing(self, request: Add) -> tuple[int, dict[str, list[bytes]]]:
        """Returns the number of tokens that would have to be computed, and the hashes to ask for, by kind."""
        scheduler, size = self.loop.engine.scheduler, self.loop.engine.config.block_size
        num_tokens, hashes = self._num_full_tokens(request), list[bytes]()
        root = scheduler.blocks.root(request.adapter, request.options.cache_salt)
        extend_hashes(hashes, request.prompt_token_ids[:num_tokens], size, root)
        pool = scheduler.pool
        pages = [block_hash for block_hash in hashes if pool.find(block_hash) is None and block_hash not in pool.tier]
        if scheduler.states is None:
            return len(pages) * size, {PAGES: pages}
        slots, last = scheduler.states.pool, hashes[-1:]
        states = [block_hash for block_hash in last if slots.find(block_hash) is None and block_hash not in slots.tier]
        return num_tokens if states else len(pages) * size, {PAGES: pages, STATES: states}

    def _num_full_tokens(self, request: Add) -> int:
        """Returns the tokens of full blocks before the last token, which is always computed here."""
        size = self.loop.engine.config.block_size
        return (len(request.prompt_token_ids) - 1) // size * size

    def _tiers(self) -> dict[str, KVOffload]:
        scheduler = self.loop.engine.scheduler
        tiers = {PAGES: scheduler.pool.tier}
        return tiers if scheduler.states is None else {**tiers, STATES: scheduler.states.pool.tier}

    def abort(self, stream: int) -> None:
        self._release(self._started.pop(stream, {}))
        for prompt in self._prompts.values():
            if prompt.request is not None and prompt.request.stream == stream:
                prompt.request = None
                self._count()
                self._release(prompt.arrived)
                prompt.link.send(Unwanted(prompt.number))

    def note_events(self, events: Events) -> None:
        if self._started:
            for stream, _ in events:
                self._release(self._started.pop(stream, {}))

    def handle(self, message: Any) -> None:
        self.loop.put(Run(partial(self._handle, message)))

    def give_up(self, link: Link) -> None:
        self.loop.put(Run(partial(self._give_up, link)))

    def lose(self, link: Link) -> None:
        self.loop.put(Run(partial(self._lose, link)))

    def _handle(self, message: Any) -> None:
        if not isinstance(message, Arrived | Ended) or (prompt := self._prompts.get(message.number)) is None:
            return
        if isinstance(message, Arrived):
            self._store(prompt, message)
        else:
            self._end(prompt, message.error)

    def _give_up(self, link: Link) -> None:
        for prompt in list(self._prompts.values()):
            if prompt.link is link:
                self._start(prompt, "the other engine makes no progress")

    def _lose(self, link: Link) -> None:
        for prompt in list(self._prompts.values()):
            if prompt.link is link:
                self._end(prompt, "the connection is lost")

    def _is_generating(self, request: Add) -> bool:
        """Returns whether pages are of use: a request for the prompt itself computes every token here."""
        sampling = request.sampling
        return sampling.max_tokens > 0 and sampling.prompt_logprobs is None and not request.options.embed

    def _count(self) -> None:
        self.loop.engine.metrics.num_remote_prefills = self.num_waiting

    def _store(self, prompt: Prompt, message: Arrived) -> None:
        """Makes what has arrived findable."""
        tier = self._tiers()[message.kind]
        tier.commit(message.hashes)
        prompt.reserved[message.kind].difference_update(message.hashes)
        if prompt.request is None:
            tier.release(message.hashes)
        else:
            prompt.arrived.setdefault(message.kind, set()).update(message.hashes)
        if message.kind == PAGES:
            self.loop.engine.metrics.transferred_blocks_total += len(message.hashes)

    def _end(self, prompt: Prompt, error: str) -> None:
        """Ends a prompt to which nothing more will be written."""
        del self._prompts[prompt.number]
        prompt.link.num_open -= 1
        self._cancel(prompt)
        self._start(prompt, error)

    def _start(self, prompt: Prompt, error: str) -> None:
        """Starts the request of a prompt, if it still waits."""
        request, prompt.request = prompt.request, None
        if request is None:
            return
        self._count()
        self.loop.engine.metrics.remote_prefills_total["failed" if error else "received"] += 1
        if error:
            logger.warning("request %s: its prompt is computed here: %s", request.request_id, error)
        if (limit := request.options.time_limit) is not None:
            left = max(LEAST_SECONDS, limit - (time.monotonic() - prompt.began))
            request = replace(request, options=replace(request.options, time_limit=left))
        self._started[request.stream] = prompt.arrived
        if not self.loop.add(request):
            self._release(self._started.pop(request.stream))

    def _cancel(self, prompt: Prompt) -> None:
        for kind, tier in self._tiers().items():
            tier.cancel(prompt.reserved[kind])

    def _release(self, hashes: Hashes) -> None:
        tiers = self._tiers()
        for kind, found in hashes.items():
            tiers[kind].release(found)
