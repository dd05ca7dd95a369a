"""Publishes changes of the prefix cache as vLLM does, over ZeroMQ in msgpack, for routers that follow the caches of
many servers."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from compress.common.cli import option
from compress.common.errors import ToolkitError

REPLAYED_BATCHES = 10_000
POLL_SECONDS = 0.1
HIGH_WATER_MARK = 100_000
END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number after the last batch of a replay."""


@dataclass(frozen=True, kw_only=True)
class KVEventOptions:
    """Events of the KV cache for routers."""

    kv_events: str = option(
        "--kv-events",
        default="",
        metavar="ADDRESS",
        help="Publish which prefixes are cached over ZeroMQ, in vLLM's format: tcp://*:5557 waits for readers, "
        "tcp://HOST:PORT connects to one. Needs the extra [events]. Default: off.",
    )
    kv_events_replay: str = option(
        "--kv-events-replay",
        default="",
        metavar="ADDRESS",
        help="Send the last 10,000 batches again to readers that ask here, such as tcp://*:5558. Default: off.",
    )
    kv_events_topic: str = option(
        "--kv-events-topic",
        default="",
        metavar="TOPIC",
        help="Topic of the events; of several models, the beginning of TOPIC@MODEL. Default: kv@ADDRESS:PORT@MODEL of "
        "this server.",
    )

    def named(self, port: int, models: Sequence[str], engines: int = 1) -> list[KVEventOptions | None]:
        """Returns the options of each model, with addresses of its engines and a topic; None without events.

        Args:
            engines: engines of each model that publish.

        Raises:
            ToolkitError: addresses of events and of replays overlap, or have no port.
        """
        if not self.kv_events:
            return [None for _ in models]
        self._check_ports(len(models) * engines)
        topic = self.kv_events_topic or f"kv@{_own_address()}:{port}"
        is_whole = self.kv_events_topic and len(models) == 1
        return [
            replace(
                self,
                kv_events=address_of_engine(self.kv_events, place * engines),
                kv_events_replay=address_of_engine(self.kv_events_replay, place * engines),
                kv_events_topic=topic if is_whole else f"{topic}@{model}",
            )
            for place, model in enumerate(models)
        ]

    def _check_ports(self, count: int) -> None:
        """Raises ToolkitError if one of `count` ports for events is among those for replays."""
        ports = [address.rpartition(":")[2] for address in (self.kv_events, self.kv_events_replay)]
        is_bound = "*" in self.kv_events
        if is_bound and all(map(str.isdigit, ports)) and abs(int(ports[0]) - int(ports[1])) < count:
            problem = f"{count} engines take {count} ports from --kv-events on, and as many from --kv-events-replay on"
            free = self.kv_events.replace(ports[0], str(int(ports[0]) + count))
            raise ToolkitError(f"{problem}, and these overlap", f"Use --kv-events-replay {free}")


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return socket.gethostname()


def address_of_engine(address: str, index: int) -> str:
    """Returns the address of one of several engines, as vLLM does: ports in order, or names with a suffix.

    Raises:
        ToolkitError: an address of TCP without a port.
    """
    if not address or not index:
        return address
    if not address.startswith("tcp:"):
        return f"{address}_dp{index}"
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise ToolkitError(
            f"{address} has no port", "Use an address such as tcp://*:5557; engine 1 takes the next port"
        )
    return f"{host}:{int(port) + index}"


def name_of(block_hash: bytes) -> int:
    """Returns the 64 bits of a block's hash that readers know it by."""
    return int.from_bytes(block_hash[:8], "big")


class KVEventPublisher:
    """Publishes the events of one prefix cache from a thread of its own; see `runtime.engine.block_pool.BlockWatcher`.

    Args:
        options: addresses, those of the first engine, and topic.
        rank: number of the engine.

    Events that are waiting when the thread looks are published as one batch: frames of topic, sequence number (8 bytes,
    big-endian) and msgpack of `[time, events, rank]`.

    Raises:
        ToolkitError: a package is missing, or an address cannot be used.
    """

    def __init__(self, options: KVEventOptions, block_size: int, rank: int = 0) -> None:
        try:
            import msgspec
            import zmq
        except ImportError as error:
            problem = f"--kv-events needs the package {error.name}"
            raise ToolkitError(problem, "pip install 'compress-runtime[events]'") from error
        events, replay = (address_of_engine(each, rank) for each in (options.kv_events, options.kv_events_replay))
        self.block_size, self._rank = block_size, rank
        self._topic, self._pack = options.kv_events_topic.encode(), msgspec.msgpack.encode
        self._events: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._sent = deque[tuple[bytes, bytes]](maxlen=REPLAYED_BATCHES)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._publisher, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        for each in (self._publisher, self._router):
            each.set_hwm(HIGH_WATER_MARK)
        is_bound = "*" in events or events.startswith("ipc:")
        try:
            (self._publisher.bind if is_bound else self._publisher.connect)(events)
            if replay:
                self._router.bind(replay)
        except zmq.ZMQError as error:
            problem = f"--kv-events {events} {replay}: {error.strerror}"
            raise ToolkitError(problem, "Use addresses such as tcp://*:5557 that are free") from error
        self._thread = threading.Thread(target=self._run, name="KV events", daemon=True)
        self._thread.start()

    def stored(
        self, block_hash: bytes, parent: bytes | None, token_ids: Sequence[int], cache_salt: str, adapter: str
    ) -> None:
        """Publishes that a block can be found."""
        self._put(
            "BlockStored",
            block_hashes=[name_of(block_hash)],
            parent_block_hash=None if parent is None else name_of(parent),
            token_ids=list(token_ids),
            block_size=self.block_size,
            lora_id=None,
            medium="GPU",
            lora_name=adapter or None,
            extra_keys=[[cache_salt]] if cache_salt else None,
        )

    def removed(self, block_hash: bytes) -> None:
        """Publishes that a block can be found no longer."""
        self._put("BlockRemoved", block_hashes=[name_of(block_hash)], medium="GPU")

    def cleared(self) -> None:
        """Publishes that no block can be found."""
        self._put("AllBlocksCleared")

    def close(self) -> None:
        """Publishes what is waiting and that nothing can be found any longer, and closes the sockets."""
        self.cleared()
        self._events.put(None)
        self._thread.join()

    def _put(self, kind: str, **fields: Any) -> None:
        self._events.put({"type": kind, **fields})

    def _run(self) -> None:
        """Sends batches and answers replays, which contain all events put before, until `None` is put."""
        numbers, last = count(), False
        while not last:
            is_asked = self._router.poll(0) != 0
            if events := self._waiting(0 if is_asked else POLL_SECONDS):
                last = events[-1] is None
                number = next(numbers).to_bytes(8, "big")
                payload = self._pack([time.time(), [event for event in events if event], self._rank])
                self._publisher.send_multipart((self._topic, number, payload))
                self._sent.append((number, payload))
            if is_asked:
                self._replay()
        for each in (self._publisher, self._router):
            each.close(linger=1000)

    def _waiting(self, seconds: float) -> list[dict[str, Any] | None]:
        """Returns the events that wait; waits for the first of them for this long."""
        events = []
        with suppress(Empty):
            events.append(self._events.get(block=seconds > 0, timeout=seconds))
            while events[-1] is not None:
                events.append(self._events.get_nowait())
        return events

    def _replay(self) -> None:
        client, *_, first = self._router.recv_multipart()
        for number, payload in self._sent:
            if number >= first:
                self._router.send_multipart((client, b"", self._topic, number, payload))
        self._router.send_multipart((client, b"", b"", END, b""))
