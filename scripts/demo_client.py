"""Talks to a running server as any client would, with nothing but the standard library, and measures it.

    python scripts/demo_client.py http://127.0.0.1:8000 --out figures.json

Streams one completion and one chat answer to the terminal and writes tokens per second to the file.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 120
COMPLETION = {"prompt": "He opened the door and", "max_tokens": 96, "temperature": 0.6, "seed": 1}
CHAT = {
    "messages": [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does he have now?"}],
    "max_tokens": 96,
    "temperature": 0.5,
    "seed": 1,
}


@dataclass
class Figures:
    """Timing of one streamed answer.

    Attributes:
        tokens: generated, as the server's usage says.
        first_token_seconds: from sending the request to its first text.
        tokens_per_second: of the tokens after the first.
    """

    tokens: int
    first_token_seconds: float
    tokens_per_second: float


def request(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
    """Sends one request and returns its response; ends the program with the server's message when it refuses."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_SECONDS)
    content = None if body is None else json.dumps(body)
    connection.request(method, path, content, {"Content-Type": "application/json"} if body else {})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"error: {method} {path} gave status {response.status}: {response.read().decode(errors='replace')}")
    return response


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to `[DONE]`."""
    for line in response:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    sys.exit("error: the stream ended without [DONE]")


def text_of(event: dict[str, Any]) -> str:
    if "error" in event:
        sys.exit(f"error: {event['error']['message']}")
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event["choices"])


def stream(url: str, path: str, body: dict[str, Any]) -> Figures:
    """Prints an answer while it comes."""
    start = time.perf_counter()
    times: list[float] = []
    usage: dict[str, int] = {}
    response = request(url, "POST", path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    for event in events(response):
        if text := text_of(event):
            times.append(time.perf_counter())
            print(text, end="", flush=True)
        usage = event.get("usage") or usage
    print()
    if not times:
        sys.exit("error: the answer has no text")
    tokens = usage["completion_tokens"]
    seconds = times[-1] - times[0]
    return Figures(tokens, times[0] - start, (tokens - 1) / seconds if seconds else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams a completion and a chat answer and measures tokens/s.")
    parser.add_argument("url", help="of the server, for example http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    arguments = parser.parse_args()
    model = json.load(request(arguments.url, "GET", "/v1/models"))["data"][0]["id"]
    print(f"completion of {COMPLETION['prompt']!r}:\n{COMPLETION['prompt']}", end="")
    completion = stream(arguments.url, "/v1/completions", {"model": model, **COMPLETION})
    print(f"\nchat answer to {CHAT['messages'][0]['content']!r}:")
    chat = stream(arguments.url, "/v1/chat/completions", {"model": model, **CHAT})
    figures = {"model": model, "completion": asdict(completion), "chat": asdict(chat)}
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
