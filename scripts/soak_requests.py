"""Requests of a soak: random ones of many kinds, and clients that send them, leave or read slowly."""

from __future__ import annotations

import asyncio
import json
import math
import random
import string
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from runtime.bench.run import FAILURES

REQUEST_SECONDS = 300.0
"""Longest wait for an answer."""

MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class Shot:
    """One request, and how its client behaves."""

    path: str
    content: bytes | None = None
    manner: str = "reads all"


class Draw:
    """Random parts of requests to one model.

    Args:
        context: tokens of the model's context.
        vocab_size: token ids of the model.
    """

    def __init__(self, seed: str, model: str, context: int, vocab_size: int) -> None:
        self.random = random.Random(seed)
        self.model, self.context, self.vocab_size = model, context, vocab_size

    def shot(self) -> tuple[str, Shot]:
        """Returns the name of a kind, and a request of it."""
        name = self.random.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
        return name, KINDS[name][1](self)

    def size(self, low: int, high: int) -> int:
        """Draws a size whose logarithm is uniform."""
        return min(high, int(math.exp(self.random.uniform(math.log(low), math.log(high + 1)))))

    def word(self) -> str:
        return "".join(self.random.choices(string.ascii_lowercase, k=self.random.randint(1, 10)))

    def text(self, length: int) -> str:
        """Returns words, or characters from anywhere in Unicode; `length` is in characters."""
        if self.random.random() < 0.3:
            return "".join(map(chr, self.random.choices(range(0x20, 0xD7FF), k=length)))
        some = [self.word() for _ in range(min(2000, length // 6 + 1))]
        return " ".join(self.random.choices(some, k=length // 6 + 1))

    def ids(self, count: int) -> list[int]:
        return self.random.choices(range(self.vocab_size), k=count)

    def fields(self, **given: Any) -> dict[str, Any]:
        """Returns the fields of a short answer, and more."""
        few = {"max_tokens": self.random.randint(1, 24), "temperature": self.random.choice([0, 0.7, 1.5])}
        return {"model": self.model, **few, **given}

    def completion(self, manner: str = "reads all", **given: Any) -> Shot:
        body = self.fields(**{"prompt": self.text(self.size(4, 200)), **given})
        return Shot("/v1/completions", json.dumps(body).encode(), manner)


def mixed(draw: Draw) -> Shot:
    stop, bias = [draw.word()], {str(token): draw.random.uniform(-100, 100) for token in draw.ids(300)}
    options = {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "stop": stop, "logit_bias": bias, "presence_penalty": 0.5}
    chosen = draw.random.sample(sorted(options), 2)
    return draw.completion(stream=draw.random.random() < 0.5, **{name: options[name] for name in chosen})


def whole_context(draw: Draw) -> Shot:
    new = draw.random.randint(1, 8)
    return draw.completion(prompt=draw.ids(draw.size(draw.context // 8, draw.context - new)), max_tokens=new)


def too_long(draw: Draw) -> Shot:
    length = draw.size(10 * draw.context, 3_800_000)
    return draw.completion(prompt=draw.random.choice([draw.text(length // 2), "a" * length, draw.ids(length // 6)]))


def too_large(draw: Draw) -> Shot:
    return Shot("/v1/completions", draw.random.randbytes(draw.size(4 * MEBIBYTE + 1, 8 * MEBIBYTE)))


def malformed(draw: Draw) -> Shot:
    path = draw.random.choice(["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"])
    body = json.dumps(draw.fields(prompt=draw.text(draw.size(4, 50_000)))).encode()
    depth = draw.size(10, 100_000)
    return Shot(
        path,
        draw.random.choice(
            [
                draw.random.randbytes(draw.size(1, 100_000)),
                body[: draw.random.randrange(len(body))],
                b"[" * depth + b"]" * depth,
                b'{"a":' * depth + b"1" + b"}" * depth,
                json.dumps({draw.word(): draw.text(20) for _ in range(draw.size(1, 20_000))}).encode(),
                json.dumps(draw.fields(prompt=[None, {}, 1.5, draw.word()])).encode(),
            ]
        ),
    )


def tokenized(draw: Draw) -> Shot:
    body = {"prompt": draw.text(draw.size(1000, 1_000_000)), "return_token_strs": draw.random.random() < 0.2}
    return Shot("/tokenize", json.dumps(body).encode())


def detokenized(draw: Draw) -> Shot:
    return Shot("/detokenize", json.dumps({"tokens": draw.ids(draw.size(1000, 500_000))}).encode())


def constrained(draw: Draw) -> Shot:
    names = [draw.word() for _ in range(draw.size(1, 100))]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names[:2]}
    grammar = draw.random.choice(
        [
            {"guided_json": schema},
            {"guided_regex": f"({'|'.join(names)})[0-9]{{1,{draw.size(1, 50)}}}"},
            {"guided_choice": [f"{name} {index}" for index, name in enumerate(names)]},
            {"guided_grammar": f'start: rule | "{names[0]}" start\nrule: {" | ".join(map(json.dumps, names))}'},
            {"guided_regex": f".*[a-m].{{{draw.random.randint(8, 20)}}}{names[0]}"},  # many states of the lexer
            {"guided_regex": "(" * draw.size(1, 1000)},
        ]
    )
    return draw.completion(stream=draw.random.random() < 0.5, **grammar)


def scored(draw: Draw) -> Shot:
    prompt = draw.ids(draw.size(8, draw.context // 2))
    return draw.completion(prompt=prompt, echo=True, logprobs=draw.random.randint(0, 20), n=draw.random.randint(1, 2))


def several(draw: Draw) -> Shot:
    prompts = [draw.text(40) for _ in range(draw.random.randint(1, 4))]
    return draw.completion(prompt=prompts, n=draw.random.randint(2, 8), stream=draw.random.random() < 0.5)


def embedded(draw: Draw) -> Shot:
    inputs = [draw.text(draw.size(8, 400)) for _ in range(draw.size(1, 64))]
    return Shot("/v1/embeddings", json.dumps({"model": draw.model, "input": inputs}).encode())


def chat(draw: Draw) -> Shot:
    turns = [draw.text(draw.size(1, 100)) for _ in range(2 * draw.size(1, 20) + 1)]
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    parameters = {"type": "object", "properties": {draw.word(): {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": f"f{draw.random.randrange(10**6)}", "parameters": parameters}}]
    choice = draw.random.choice([{}, {"tools": tools}, {"tools": tools, "tool_choice": "required"}])
    body = draw.fields(messages=messages, stream=draw.random.random() < 0.5, **choice)
    return Shot("/v1/chat/completions", json.dumps(body).encode())


def looked_up(draw: Draw) -> Shot:
    return Shot(draw.random.choice(["/health", "/metrics", "/v1/models", "/openapi.json", "/", f"/{draw.word()}"]))


def left(draw: Draw) -> Shot:
    """A client that leaves, or reads slowly: before the answer, at its start, or within the request."""
    manner = draw.random.choice([name for name in MANNERS if name != "reads all"])
    long = draw.ids(draw.size(8, draw.context // 2))
    return draw.completion(
        manner, prompt=long, stream=draw.random.random() < 0.8, max_tokens=draw.size(8, draw.context // 2)
    )


KINDS: Mapping[str, tuple[int, Callable[[Draw], Shot]]] = {
    "completion": (20, mixed),
    "whole context": (4, whole_context),
    "too long": (4, too_long),
    "too large": (2, too_large),
    "malformed": (12, malformed),
    "/tokenize": (4, tokenized),
    "/detokenize": (2, detokenized),
    "constrained": (16, constrained),
    "scored": (4, scored),
    "several": (4, several),
    "embedded": (4, embedded),
    "chat": (10, chat),
    "looked up": (8, looked_up),
    "left": (16, left),
}
"""Weight and maker of each kind of request."""


async def read_all(response: aiohttp.ClientResponse) -> str:
    body = await response.read()
    failed = response.status == 500 or b'"code":"generation_failed"' in body
    return "500" if failed else str(response.status)


async def read_some(response: aiohttp.ClientResponse) -> str:
    await response.content.readany()
    return "left"


async def read_slowly(response: aiohttp.ClientResponse) -> str:
    for _ in range(20):
        if not await response.content.read(64):
            break
        await asyncio.sleep(0.1)
    return "left"


MANNERS: Mapping[str, Callable[[aiohttp.ClientResponse], Awaitable[str]] | None] = {
    "reads all": read_all,
    "reads some": read_some,
    "reads slowly": read_slowly,
    "leaves": None,
    "sends half": None,
}
"""Readers of the answer; None if the client leaves before."""


async def send(session: aiohttp.ClientSession, url: str, shot: Shot) -> str:
    """Sends one request; returns the status of its answer, or how it ended."""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            if read := MANNERS[shot.manner]:
                return await _ask(session, url, shot, read)
            return await _leave(url, shot)
    except TimeoutError:
        return "no answer"
    except FAILURES:
        return "disconnected"


async def _ask(
    session: aiohttp.ClientSession, url: str, shot: Shot, read: Callable[[aiohttp.ClientResponse], Awaitable[str]]
) -> str:
    method, headers = ("GET", {}) if shot.content is None else ("POST", {"Content-Type": "application/json"})
    async with session.request(method, url + shot.path, data=shot.content, headers=headers) as response:
        return await read(response)


async def _leave(url: str, shot: Shot) -> str:
    """Closes the connection after half of the request, or all of it."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    content = shot.content or b""
    head = f"POST {shot.path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode())
        writer.write(content[: len(content) // 2] if shot.manner == "sends half" else content)
        await writer.drain()
        await asyncio.sleep(0.2)
    finally:
        writer.close()
    return "left"
