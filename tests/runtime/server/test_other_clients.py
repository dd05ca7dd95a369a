"""Clients that others wrote over OpenAI's API, as their users call them."""

import json
from typing import Any

import pytest

pytestmark = pytest.mark.full

MESSAGES = [{"role": "user", "content": "Tell a story"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_langchain(demo_server: tuple[str, Any, Any]) -> None:
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI

    url = f"{demo_server[0]}/v1"
    chat = ChatOpenAI(base_url=url, api_key="none", model="demo", temperature=0, max_tokens=12, max_retries=0)
    whole = chat.invoke("Tell a story")
    assert whole.content
    assert "".join(chunk.content for chunk in chat.stream("Tell a story")) == whole.content
    assert whole.usage_metadata["output_tokens"] == whole.response_metadata["token_usage"]["completion_tokens"]
    assert [answer.content for answer in chat.batch(["Tell a story"] * 3)] == [whole.content] * 3

    tool = StructuredTool(name="weather", description="Weather to come", args_schema=SCHEMA, func=lambda city: city)
    caller = ChatOpenAI(base_url=url, api_key="none", model="demo", temperature=0, max_tokens=60, max_retries=0)
    (call,) = caller.bind_tools([tool], tool_choice="weather").invoke("Weather in Rome?").tool_calls
    assert (call["name"], call["args"]["city"] in ("Rome", "Oslo")) == ("weather", True)
    newer = ChatOpenAI(
        base_url=url, api_key="none", model="demo", temperature=0, max_tokens=12, max_retries=0, use_responses_api=True
    )
    assert newer.invoke("Tell a story").text == whole.content


def test_litellm(demo_server: tuple[str, Any, Any]) -> None:
    """It asks for an older openai than the other tests do, so it is not installed with them."""
    litellm = pytest.importorskip("litellm")
    fields = {"api_base": f"{demo_server[0]}/v1", "api_key": "none", "temperature": 0, "max_tokens": 12}
    whole = litellm.completion("openai/demo", MESSAGES, **fields).choices[0].message.content
    assert whole
    chunks = litellm.completion("openai/demo", MESSAGES, stream=True, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    options = {**fields, "max_tokens": 60, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = litellm.completion("openai/demo", MESSAGES, **options).choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
