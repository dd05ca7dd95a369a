"""Serves a checkpoint on a free port and streams an answer from it: `python examples/serve_and_call.py packed/`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx


@contextmanager
def served(model: str) -> Iterator[str]:
    """Starts a server, yields its address once it answers, and stops it."""
    command = [sys.executable, "-m", "runtime.cli", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stdout or () if line.startswith("serving"))
            yield next(word for word in line.split() if word.startswith("http"))
        finally:
            server.terminate()


def streamed(url: str, prompt: str) -> Iterator[str]:
    """Yields the pieces of the answer to a prompt."""
    [model] = httpx.get(f"{url}/v1/models").json()["data"]
    body = {"model": model["id"], "prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield from (choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"])


def main(model: str) -> None:
    with served(model) as url:
        for piece in streamed(url, "It was a bright cold day"):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo")
