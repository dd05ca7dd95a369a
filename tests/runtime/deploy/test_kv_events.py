"""Events of the KV cache over ZeroMQ, read by readers that share no code with the publisher."""

import importlib.util
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path

import httpx
import pytest
from fake_runner import FakeRunner
from runtime_command import serving
from servers import answer, free_port

from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.core.request import RequestOptions, SamplingParams
from runtime.deploy.kv_events import KVEventOptions, KVEventPublisher, address_of_engine, name_of
from runtime.engine.engine import Engine

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """As vLLM 0.33 publishes it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Prefixes:
    """Knowledge of a router about one server: the tokens of each prefix that can be found there, by its hash."""

    def __init__(self) -> None:
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.number = -1

    def read(self, frames: list[bytes]) -> None:
        _, number, payload = frames
        assert int.from_bytes(number, "big") == self.number + 1
        self.number += 1
        for event in msgspec.msgpack.decode(payload, type=Batch).events:
            self.apply(event)

    def apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        match event:
            case BlockStored(parent_block_hash=parent):
                size, before = event.block_size, () if parent is None else self.tokens[parent]
                assert len(event.token_ids) == size * len(event.block_hashes)
                for index, block_hash in enumerate(event.block_hashes):
                    before += tuple(event.token_ids[index * size : (index + 1) * size])
                    self.tokens[block_hash] = before
            case BlockRemoved():
                for block_hash in event.block_hashes:
                    del self.tokens[block_hash]
            case AllBlocksCleared():
                self.tokens.clear()


@pytest.fixture
def addresses(tmp_path: Path) -> KVEventOptions:
    return KVEventOptions(
        kv_events=f"ipc://{tmp_path}/events", kv_events_replay=f"ipc://{tmp_path}/replay", kv_events_topic="kv@a@m"
    )


@contextmanager
def publishing(options: KVEventOptions, **config: int) -> Iterator[Engine]:
    engine = Engine(FakeRunner(**config), None, RuntimeConfig(block_size=4))
    publisher = KVEventPublisher(options, 4)
    engine.scheduler.pool.watcher = publisher
    try:
        yield engine
    finally:
        publisher.close()


@contextmanager
def connected(kind: int, address: str) -> Iterator["zmq.Socket"]:
    with zmq.Context.instance().socket(kind) as reader:
        reader.set(zmq.LINGER, 0)
        reader.set(zmq.RCVTIMEO, 10_000)
        if kind == zmq.SUB:
            reader.subscribe(b"kv@")
        reader.connect(address)
        yield reader


def findable(engine: Engine) -> set[int]:
    pool = engine.scheduler.pool
    return {name_of(block.hash) for block in pool._blocks if block.hash is not None}


def compute(engine: Engine, prompt: list[int], salt: str = "", tokens: int = 6) -> list[int]:
    """Answers a prompt; returns the tokens whose keys and values were computed."""
    engine.add_request(prompt, SamplingParams(max_tokens=tokens), options=RequestOptions(cache_salt=salt))
    output: list[int] = []
    while engine.has_work:
        for delta in engine.step():
            output += delta.token_ids
    return [*prompt, *output[:-1]]


def replayed(address: str, first: int = 0) -> list[list[bytes]]:
    """Batches from a number on, as a reader of vLLM asks for them."""
    with connected(zmq.DEALER, address) as reader:
        reader.send_multipart((b"", first.to_bytes(8, "big")))
        frames = [reader.recv_multipart()[1:]]
        while frames[-1][1] != b"\xff" * 8:
            frames.append(reader.recv_multipart()[1:])
        return frames[:-1]


def test_a_reader_rebuilds_every_prefix_that_can_be_found(addresses: KVEventOptions) -> None:
    draw, known = random.Random(0), Prefixes()
    with publishing(addresses, num_blocks=24) as engine, connected(zmq.SUB, addresses.kv_events) as reader:
        time.sleep(0.3)  # the subscription reaches the publisher
        for _ in range(40):
            stems = draw.choice([[1] * 9, [2] * 14, [1] * 5 + [3] * 12])
            computed = compute(engine, [*stems, *draw.choices(range(5), k=draw.randrange(8))])
            while known.tokens.keys() != findable(engine):
                known.read(reader.recv_multipart())
            whole = len(computed) // 4 * 4
            assert tuple(computed[:whole]) in known.tokens.values()
        assert engine.scheduler.pool.num_evictions > 10
        engine.scheduler.heal()
        while known.tokens:
            known.read(reader.recv_multipart())


def test_a_late_reader_replays_what_it_missed(addresses: KVEventOptions) -> None:
    with publishing(addresses) as engine:
        for start in range(4):
            compute(engine, [start] * 12)
            assert replayed(addresses.kv_events_replay, first=start)
        whole = Prefixes()
        batches = replayed(addresses.kv_events_replay)
        for frames in batches:
            whole.read(frames)
        assert whole.tokens.keys() == findable(engine)
        assert {frames[0] for frames in batches} == {addresses.kv_events_topic.encode()}
        assert replayed(addresses.kv_events_replay, first=len(batches) - 1) == batches[-1:]
        assert replayed(addresses.kv_events_replay, first=len(batches)) == []


def test_salted_prefixes_are_others_and_say_so(addresses: KVEventOptions) -> None:
    with publishing(addresses) as engine:
        for salt in ("", "alice"):
            compute(engine, [7] * 8, salt=salt, tokens=1)
        known = Prefixes()
        batches = replayed(addresses.kv_events_replay)
        for frames in batches:
            known.read(frames)
    events = [event for frames in batches for event in msgspec.msgpack.decode(frames[2], type=Batch).events]
    assert [event.extra_keys for event in events] == [None, None, [("alice",)], [("alice",)]]
    assert len(known.tokens) == 4


def test_addresses_that_cannot_be_used_are_refused(addresses: KVEventOptions, tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="--kv-events"):
        KVEventPublisher(KVEventOptions(kv_events="nowhere"), 4)


def test_missing_packages_are_named(addresses: KVEventOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ToolkitError, match="zmq") as refused:
        KVEventPublisher(addresses, 4)
    assert "[events]" in refused.value.remedy


def test_the_topic_names_address_port_and_model() -> None:
    assert KVEventOptions().named(8000, ["demo"]) == [None]
    (named,) = KVEventOptions(kv_events="tcp://*:5557").named(8000, ["org/demo"])
    assert named.kv_events_topic.startswith("kv@")
    assert named.kv_events_topic.endswith(":8000@org/demo")
    (named,) = KVEventOptions(kv_events="x", kv_events_topic="t").named(8000, ["demo"])
    assert named.kv_events_topic == "t"


def test_each_model_has_a_topic_and_the_addresses_of_its_engines() -> None:
    options = KVEventOptions(kv_events="tcp://*:5557", kv_events_replay="tcp://*:6557", kv_events_topic="kv@t")
    first, second = options.named(8000, ["a", "b"], engines=2)
    assert (first.kv_events, first.kv_events_replay, first.kv_events_topic) == (*astuple(options)[:2], "kv@t@a")
    assert (second.kv_events, second.kv_events_replay) == ("tcp://*:5559", "tcp://*:6559")
    assert second.kv_events_topic == "kv@t@b"


def test_ports_of_events_and_replays_do_not_overlap() -> None:
    options = KVEventOptions(kv_events="tcp://*:5557", kv_events_replay="tcp://*:5559")
    assert len(options.named(8000, ["a", "b"])) == 2
    with pytest.raises(ToolkitError, match=r"3 engines take 3 ports.*Use --kv-events-replay tcp://\*:5560"):
        options.named(8000, ["a", "b", "c"])
    assert replace(options, kv_events="tcp://router:5557").named(8000, ["a"], engines=4)


def test_an_engine_that_ends_says_that_nothing_is_cached(addresses: KVEventOptions) -> None:
    known = Prefixes()
    with connected(zmq.SUB, addresses.kv_events) as reader:
        with publishing(addresses) as engine:
            time.sleep(0.3)  # the subscription reaches the publisher
            compute(engine, [5] * 12)
            while not known.tokens:
                known.read(reader.recv_multipart())
        while known.tokens:
            known.read(reader.recv_multipart())


def test_each_engine_has_addresses_and_a_rank_of_its_own(addresses: KVEventOptions) -> None:
    assert address_of_engine("tcp://*:5557", 0) == "tcp://*:5557"
    assert address_of_engine("tcp://*:5557", 2) == "tcp://*:5559"
    assert address_of_engine("tcp://[::1]:5557", 1) == "tcp://[::1]:5558"
    assert address_of_engine("", 2) == ""
    with pytest.raises(ToolkitError):
        address_of_engine("tcp://router", 1)
    publishers = [KVEventPublisher(addresses, 4, rank) for rank in range(2)]
    try:
        for rank, publisher in enumerate(publishers):
            publisher.stored(bytes([rank]) * 16, None, [rank] * 4, "", "")
            time.sleep(0.05)
            (frames,) = replayed(address_of_engine(addresses.kv_events_replay, rank))
            batch = msgspec.msgpack.decode(frames[2], type=Batch)
            assert (batch.data_parallel_rank, batch.events[0].token_ids) == (rank, [rank] * 4)
    finally:
        for publisher in publishers:
            publisher.close()


@pytest.mark.full
def test_a_server_publishes_what_its_engine_caches(tmp_path: Path) -> None:
    events, replay = free_port(), free_port()
    options = ["demo", "--kv-events", f"tcp://*:{events}", "--kv-events-replay", f"tcp://*:{replay}"]
    with serving(*options, cwd=tmp_path) as (_, url, _):
        prompt = list(range(10, 110))
        with httpx.Client(base_url=url, timeout=60) as api:
            answer(api, "/v1/completions", model="demo", prompt=prompt, max_tokens=1)
        known = Prefixes()
        for frames in replayed(f"tcp://127.0.0.1:{replay}"):
            known.read(frames)
            assert frames[0].endswith(f":{url.rpartition(':')[2]}@demo".encode())
        assert tuple(prompt[:96]) in known.tokens.values()


@pytest.mark.full
def test_each_engine_of_a_server_publishes_what_it_caches(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
    options = ["demo", "--data-parallel-size", "2", "--kv-events", f"ipc://{tmp_path}/e", "--kv-events-replay"]
    with serving(*options, f"tcp://*:{port}", cwd=tmp_path) as (_, url, _):
        prompts = [[number] * 40 for number in (11, 12)]
        with httpx.Client(base_url=url, timeout=60) as api:
            for prompt in prompts:
                answer(api, "/v1/completions", model="demo", prompt=prompt, max_tokens=1)
        for rank, prompt in enumerate(prompts):
            known = Prefixes()
            for frames in replayed(f"tcp://127.0.0.1:{port + rank}"):
                known.read(frames)
                assert msgspec.msgpack.decode(frames[2], type=Batch).data_parallel_rank == rank
            assert set(known.tokens.values()) == {tuple(prompt[:16]), tuple(prompt[:32])}


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="needs ai-dynamo-runtime")
def test_the_indexer_of_dynamo_finds_cached_prefixes(addresses: KVEventOptions) -> None:
    port, events, replay = free_port(), free_port(), free_port()
    tcp = KVEventOptions(kv_events=f"tcp://*:{events}", kv_events_replay=f"tcp://*:{replay}")
    command = ["dynamo.indexer", "--block-size", "4", "--model-name", "demo", "--port", str(port)]
    host, model = "tcp://127.0.0.1", {"model_name": "demo", "block_size": 4}
    worker = {"instance_id": 1, "endpoint": f"{host}:{events}", "replay_endpoint": f"{host}:{replay}", **model}
    with publishing(tcp, num_blocks=16) as engine, httpx.Client(base_url=f"http://127.0.0.1:{port}") as api:
        computed = compute(engine, [5] * 21)
        process = subprocess.Popen([sys.executable, "-m", *command])
        try:
            until(lambda: answers(api))
            api.post("/register", json=worker).raise_for_status()
            until(lambda: api.get("/workers").json())
            time.sleep(0.5)  # its subscription reaches the publisher
            compute(engine, [5] * 8 + [6] * 12)  # the number of its batch shows the indexer that it missed one

            def matched() -> int:
                found = api.post("/query", json={"token_ids": computed, **model}).json()
                return found["instances"].get("1", {}).get("gpu", 0)

            until(lambda: matched() == len(computed) // 4 * 4)
            for start in range(10, 40, 10):
                compute(engine, list(range(start, start + 10)), tokens=20)
            assert engine.scheduler.pool.num_evictions
            until(lambda: matched() == 0)
        finally:
            process.kill()
            process.wait()


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def answers(api: httpx.Client) -> bool:
    try:
        return api.get("/workers").status_code == 200
    except httpx.TransportError:
        return False
