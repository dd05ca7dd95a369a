"""The event loop is never held by one body: `/health` answers meanwhile, measured from another process."""

import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest
from runtime_command import serving

from compress.common.cli import demo_model_path
from runtime.server.protocol.generation import MAX_INPUTS

pytestmark = pytest.mark.full

LIMIT = 0.1
"""Seconds for the longest check."""
SPREAD = 5
"""Times the longest check without a body, by which other programs on the machine may delay one more."""
ATTEMPTS = 3
"""Times that a body is sent until no check is late: one that holds the loop does so every time, while other programs on
the machine delay a check now and then."""
PAUSE = 0.01
MAX_BODY = 4 * 2**20
VOCABULARY = json.loads((demo_model_path() / "config.json").read_text())["vocab_size"]
CONTEXT = json.loads((demo_model_path() / "config.json").read_text())["max_position_embeddings"]


def watch(host: str, port: int, connection: Connection) -> None:
    """Asks for the server's health until told to stop; sends start and duration of every check."""
    client, found = HTTPConnection(host, port, timeout=300), []
    connection.send(None)
    while not connection.poll(PAUSE):
        start = time.time()
        client.request("GET", "/health")
        client.getresponse().read()
        found.append((start, time.time() - start))
    connection.send(found)


@dataclass
class Watched:
    url: httpx.URL

    def longest_check(self, path: str, content: bytes, statuses: tuple[int, ...]) -> tuple[float, float]:
        """Seconds of the longest check while a body is served, and before that."""
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        watcher = context.Process(target=watch, args=(self.url.host, self.url.port, theirs), daemon=True)
        watcher.start()
        mine.recv()
        time.sleep(1)
        start = time.time()
        headers = {"Content-Type": "application/json"}
        response = httpx.post(self.url.join(path), content=content, headers=headers, timeout=300)
        end = time.time()
        assert response.status_code in statuses, response.text[:1000]
        mine.send(None)
        found = mine.recv()
        watcher.join()
        during = [seconds for began, seconds in found if began + seconds > start and began < end]
        return max(during, default=0.0), max(seconds for began, seconds in found if began < start)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: Any) -> Iterator[Watched]:
    with serving("--max-body", str(MAX_BODY), cwd=tmp_path_factory.mktemp("served")) as (_, url, _):
        yield Watched(httpx.URL(url))


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "demo", "prompt": "The", "max_tokens": 1, **fields}).encode()


def numbers(opening: bytes, item: bytes, count: int) -> bytes:
    return opening + b",".join([item] * count) + b"]}"


TEXT = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
SPEAKER = {"role": "user", "content": "hello"}
PROMPTS = [[(7 * place + number) % 2000 for place in range(CONTEXT - 13)] for number in range(16)]
ECHO = completion(prompt=PROMPTS, echo=True, logprobs=20)
NESTED = "[" * 500 + "]" * 500
BODIES = {
    "text to tokenize": ("/tokenize", json.dumps({"prompt": (TEXT * 400)[: 36 * 10**5]}).encode(), 200),
    "one word to tokenize": ("/tokenize", json.dumps({"prompt": "a" * 38 * 10**5}).encode(), 200),
    "token ids": ("/v1/completions", numbers(b'{"model": "demo", "prompt": [', b"1", 19 * 10**5), 400),
    "ids to detokenize": ("/detokenize", numbers(b'{"tokens": [', b"765", 10**6), 200),
    "inputs": ("/v1/embeddings", json.dumps({"model": "demo", "input": ["a cat"] * MAX_INPUTS}).encode(), 200),
    "scored prompts": ("/v1/completions", ECHO, 200),
    "biased vocabulary": (
        "/v1/completions",
        completion(logit_bias={str(token): -1 for token in range(VOCABULARY)}, max_tokens=64, ignore_eos=True),
        200,
    ),
    "messages": ("/v1/chat/completions", json.dumps({"model": "demo", "messages": [SPEAKER] * 50_000}).encode(), 400),
    "nested": ("/v1/completions", f'{{"model": "demo", "prompt": {NESTED}}}'.encode(), 400),
}


@pytest.mark.parametrize("name", BODIES)
def test_health_answers_while_a_body_is_served(watched: Watched, name: str) -> None:
    path, content, status = BODIES[name]
    assert len(content) <= MAX_BODY
    late = []
    for _ in range(ATTEMPTS):
        longest, idle = watched.longest_check(path, content, (status,))
        print(f"{name}: longest check {1000 * longest:.0f} ms, before {1000 * idle:.0f} ms")
        if longest <= LIMIT + SPREAD * idle:
            return
        late.append(longest)
    pytest.fail(f"the longest checks took {late} seconds")
