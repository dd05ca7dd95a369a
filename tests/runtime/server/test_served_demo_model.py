"""The bundled demo model served over a real socket: answers do not depend on how they are requested."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from servers import answer, is_idle, send_raw, streamed

from runtime.engine.engine import Engine

PROMPT = "The castle was built in the"
GREEDY = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
SEEDED = {**GREEDY, "temperature": 0.9, "seed": 7}
MIXED = [
    GREEDY,
    SEEDED,
    {**SEEDED, "prompt": "Once upon a time", "max_tokens": 40},
    {**SEEDED, "prompt": [PROMPT, "In 1943"], "seed": 5},
    {**GREEDY, "prompt": PROMPT * 12, "max_tokens": 9},
    {**GREEDY, "stop": [" and", "."], "max_tokens": 60},
    {**SEEDED, "top_k": 40, "top_p": 0.8, "seed": 1},
    {**SEEDED, "n": 3, "max_tokens": 20},
    {**SEEDED, "min_p": 0.1, "ignore_eos": True, "max_tokens": 33},
]


@dataclass
class Served:
    client: httpx.Client
    engine: Engine
    tokenizer: Any
    url: str

    def complete(self, **body: Any) -> dict[str, Any]:
        return answer(self.client, "/v1/completions", **body)

    def text(self, **body: Any) -> str:
        return self.complete(**body)["choices"][0]["text"]

    def streamed(self, path: str, **body: Any) -> list[dict[str, Any]]:
        return streamed(self.client, path, **body)


@pytest.fixture
def demo(demo_server: Any) -> Iterator[Served]:
    url, engine, tokenizer = demo_server
    with httpx.Client(base_url=url, timeout=60) as client:
        yield Served(client, engine, tokenizer, url)


@pytest.mark.parametrize("body", MIXED)
def test_stream_joined_is_the_whole_answer(demo: Served, body: dict[str, Any]) -> None:
    whole = demo.complete(**body)["choices"]
    chunks = [choice for chunk in demo.streamed("/v1/completions", **body) for choice in chunk["choices"]]
    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        assert [chunk["finish_reason"] for chunk in own if chunk["finish_reason"]] == [choice["finish_reason"]]
        assert own[-1]["finish_reason"]


def test_seeds_are_reproducible_and_differ(demo: Served) -> None:
    texts = [demo.text(**{**SEEDED, "seed": seed}) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_first_of_several_answers_is_the_only_one_of_one(demo: Served) -> None:
    several = [choice["text"] for choice in demo.complete(**SEEDED, n=3)["choices"]]
    assert several[0] == demo.text(**SEEDED)
    assert len(set(several)) == 3


def test_stop_string_ends_the_text_before_it(demo: Served) -> None:
    whole = demo.text(**GREEDY)
    stop = whole[9:14]  # across token borders as they come
    choice = demo.complete(**GREEDY, stop=stop)["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    chunks = demo.streamed("/v1/completions", **GREEDY, stop=stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]


def test_token_ids_are_the_same_prompt(demo: Served) -> None:
    assert demo.text(**{**GREEDY, "prompt": demo.tokenizer.encode(PROMPT)}) == demo.text(**GREEDY)


def test_token_outside_of_the_vocabulary(demo: Served) -> None:
    response = demo.client.post("/v1/completions", json={**GREEDY, "prompt": [10**6]})
    assert response.status_code == 400
    assert "1000000" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_prompt_longer_than_the_context(demo: Served, path: str) -> None:
    text = PROMPT * 1000
    prompt = {"prompt": text} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
    response = demo.client.post(f"/v1/{path}", json={"model": "demo", **prompt})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"context is {demo.engine.runner.max_model_len} tokens" in error["message"]


def test_chat_streams_what_it_answers_and_uses_the_template(demo: Served) -> None:
    messages = [{"role": "user", "content": "Who built the castle?"}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 20}
    answer = demo.client.post("/v1/chat/completions", json=body).json()
    chunks = demo.streamed("/v1/chat/completions", **body)
    joined = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert joined == answer["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens"] == len(demo.tokenizer.encode_chat(messages))
    templated = demo.text(**{**GREEDY, "prompt": demo.tokenizer.encode_chat(messages), "max_tokens": 20})
    assert joined == templated


def test_greedy_token_is_the_most_likely_one(demo: Served) -> None:
    logprobs = demo.complete(**GREEDY, logprobs=3)["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 24
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert chosen == max(top.values())
    text = demo.text(**GREEDY)
    assert "".join(logprobs["tokens"]) == text
    assert all(text[at:].startswith(t) for at, t in zip(logprobs["text_offset"], logprobs["tokens"], strict=True))


def test_requests_together_equal_requests_alone(demo: Served) -> None:
    alone = [[choice["text"] for choice in demo.complete(**body)["choices"]] for body in MIXED]

    async def all_together() -> list[list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", timeout=60) as client:
            extra = ("top_k", "min_p", "ignore_eos")

            async def one(body: dict[str, Any]) -> list[str]:
                plain = {name: value for name, value in body.items() if name not in extra}
                rest = {name: body[name] for name in extra if name in body}
                texts: dict[int, str] = {}
                async for chunk in await client.completions.create(**plain, extra_body=rest, stream=True):
                    for choice in chunk.choices:
                        texts[choice.index] = texts.get(choice.index, "") + choice.text
                return [texts[index] for index in sorted(texts)]

            return await asyncio.gather(*map(one, MIXED))

    assert asyncio.run(all_together()) == alone
    assert is_idle(demo.engine)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "Once"]])
def test_client_that_leaves_frees_all_blocks(demo: Served, wait_until: Any, stream: bool, prompt: Any) -> None:
    metrics = demo.engine.metrics
    before, body = metrics.generation_tokens_total, {**SEEDED, "prompt": prompt, "max_tokens": 1500, "ignore_eos": True}
    with send_raw(demo.url, stream=stream, **body):
        wait_until(lambda: metrics.generation_tokens_total >= before + 5)
        assert not is_idle(demo.engine)
    wait_until(lambda: is_idle(demo.engine))
    assert metrics.generation_tokens_total < before + 500  # not the 1500 per prompt it would have been
    demo.engine.scheduler.pool.check([])
    assert demo.client.get("/health").json()["running"] == 0


def test_demo_client_streams_and_measures(demo: Served, tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "scripts" / "demo_client.py"
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(script), demo.url, "--out", str(figures)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "completion of 'He opened the door and':\nHe opened the door and" in result.stdout
    found = json.loads(figures.read_text())
    assert found["model"] == "demo"
    for kind in ("completion", "chat"):
        assert found[kind]["tokens"] >= 2
        assert found[kind]["tokens_per_second"] > 0
