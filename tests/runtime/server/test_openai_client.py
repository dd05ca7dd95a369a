"""The official client, synchronous and asynchronous, against the server."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(api: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="alphabet", prompt="Z", max_tokens=3, logprobs=1)
    assert answer.choices[0].text == "nop"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.tokens == ["n", "o", "p"]
    assert answer.usage.total_tokens == 4


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="alphabet", messages=MESSAGES, max_completion_tokens=3, user="Ann")
    assert answer.choices[0].message.content == "lmn"
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_an_answer_goes_back_with_every_field_of_its_class(client: openai.OpenAI) -> None:
    """As `model_dump` writes it: with nulls for what this server does not know."""
    first = client.chat.completions.create(model="alphabet", messages=MESSAGES, max_tokens=3).choices[0].message
    dumped: Any = first.model_dump()
    assert "audio" in dumped
    lengths = [
        client.chat.completions.create(model="alphabet", messages=[*MESSAGES, turn, *MESSAGES]).usage.prompt_tokens
        for turn in ({"role": "assistant", "content": first.content}, first, dumped)
    ]
    assert len(set(lengths)) == 1


def test_streamed_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="alphabet", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "lmnop"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert last.usage.completion_tokens == 5


def test_asynchronous_client(api: Any) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:

            async def streamed() -> str:
                stream = await client.completions.create(model="alphabet", prompt="Z", max_tokens=20, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            async def whole() -> str:
                return (await client.completions.create(model="alphabet", prompt="Z", max_tokens=20)).choices[0].text

            return await asyncio.gather(streamed(), whole(), streamed())

    assert asyncio.run(run()) == ["nopqrstuvwxyzabcdefg"] * 3


def test_leaving_a_stream_frees_the_request(client: openai.OpenAI, engine: Any, wait_until: Any) -> None:
    engine.close_gate_at = 3
    with client.completions.create(model="alphabet", prompt="Z", max_tokens=90, stream=True) as stream:
        assert next(iter(stream)).choices[0].text == "n"
        wait_until(lambda: len(engine.active) == 1)
    wait_until(lambda: not engine.active)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["alphabet"]


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (openai.NotFoundError, {"model": "other"}),
        (openai.BadRequestError, {"temperature": 9}),
        (openai.BadRequestError, {"extra_body": {"beam_width": 4}}),
        (openai.BadRequestError, {"prompt": "x" * 200}),
    ],
)
def test_refusals_are_the_clients_exceptions(client: openai.OpenAI, error: type, fields: dict[str, Any]) -> None:
    with pytest.raises(error) as caught:
        client.completions.create(**{"model": "alphabet", "prompt": "Z", **fields})
    assert caught.value.body["message"]


def test_full_queue_is_a_rate_limit(client: openai.OpenAI, engine: Any, wait_until: Any) -> None:
    engine.gate.clear()
    with ThreadPoolExecutor() as pool:
        hanging = pool.submit(client.completions.create, model="alphabet", prompt=["a", "b", "c", "d"])
        wait_until(lambda: len(engine.active) == 4)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="alphabet", prompt="Z")
        engine.gate.set()
        assert len(hanging.result().choices) == 4


def test_wrong_key(guarded_api: Any) -> None:
    with openai.OpenAI(base_url=f"{guarded_api.base_url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert client.with_options(api_key="open sesame").models.list().data
