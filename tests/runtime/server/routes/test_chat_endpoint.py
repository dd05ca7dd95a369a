"""`/v1/chat/completions`, whole and streamed."""

from functools import partial
from typing import Any, ClassVar

import httpx
from servers import answer, streamed

from runtime.server.conversation import conversation_texts
from runtime.server.protocol.chat import ChatRequest, Message

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


chat = partial(answer, path="/v1/chat/completions", model="alphabet", messages=MESSAGES)


stream = partial(streamed, path="/v1/chat/completions", model="alphabet", messages=MESSAGES)


def test_answers_with_a_message(api: httpx.Client) -> None:
    body = chat(api, max_tokens=4)
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "lmno", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "length"


def test_default_max_tokens_is_the_rest_of_the_context(api: httpx.Client) -> None:
    assert chat(api)["usage"]["total_tokens"] == 100


def test_max_completion_tokens_is_the_same_limit(api: httpx.Client) -> None:
    assert chat(api, max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def test_text_parts_are_lines(api: httpx.Client) -> None:
    """As other servers join them, in each form of a conversation."""
    plain = {"messages": [{"role": "user", "content": "See this:\nWell?"}]}
    expected = chat(api, **plain, max_tokens=4)["usage"]["prompt_tokens"]
    parts = [{"type": "text", "text": "See this:"}, {"type": "text", "text": "Well?"}]
    turns = [{"role": "user", "content": parts}]
    assert chat(api, messages=turns, max_tokens=4)["usage"]["prompt_tokens"] == expected
    counted = api.post("/v1/messages/count_tokens", json={"model": "alphabet", "messages": turns}).json()
    assert counted == {"input_tokens": expected}
    items = [{"role": "user", "content": [{**part, "type": "input_text"} for part in parts]}]
    response = api.post("/v1/responses", json={"model": "alphabet", "input": items, "max_output_tokens": 4}).json()
    assert response["usage"]["input_tokens"] == expected


def test_developers_speak_as_the_system(api: httpx.Client) -> None:
    named = [{**MESSAGES[0], "role": "developer", "name": "Ann"}, MESSAGES[1]]
    tokens = [api.post("/tokenize", json={"messages": messages}).json()["tokens"] for messages in (MESSAGES, named)]
    assert tokens[0] == tokens[1]


def test_results_of_tools_may_name_the_function(api: httpx.Client) -> None:
    """As in OpenAI's own examples, and with the nulls of its client's classes."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call], "function_call": None}
    result = {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "fine"}
    assert answer(api, "/tokenize", messages=[*MESSAGES, asked, result])["count"] > 20


def test_templates_hear_who_speaks() -> None:
    message = Message.model_validate({"role": "user", "name": "Ann", "content": "Hello"})
    assert message.as_json() == {"role": "user", "name": "Ann", "content": "Hello"}


def test_variables_of_the_template_reach_it() -> None:
    given: dict[str, Any] = {}

    class Recorder:
        chat_template = "{{ enable_thinking }}"
        special_ids: ClassVar[dict[str, int]] = {}

        def render_chat(self, messages: Any, **variables: Any) -> str:
            given.update(variables)
            return ""

    body = {"model": "alphabet", "messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    conversation_texts(Recorder(), ChatRequest.model_validate(body))  # type: ignore[arg-type]
    assert given == {"enable_thinking": False}


def test_null_asks_for_nothing(api: httpx.Client) -> None:
    """Clients write out the fields that they leave open, also those that only other servers know."""
    nulls = dict.fromkeys(("temperature", "logprobs", "store", "service_tier", "functions"))
    assert chat(api, max_tokens=4, **nulls)["choices"] == chat(api, max_tokens=4)["choices"]


def test_stream_opens_with_the_role_and_ends_once(api: httpx.Client) -> None:
    chunks = stream(api, max_tokens=3)
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"]["content"] for c in chunks[1:-1]] == ["l", "m", "n"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]


def test_several_answers(api: httpx.Client) -> None:
    contents = [choice["message"]["content"] for choice in chat(api, n=3, max_tokens=2)["choices"]]
    assert contents == ["lm", "vw", "fg"]
    chunks = stream(api, n=3, max_tokens=2)
    assert [c["choices"][0]["delta"].get("role") for c in chunks[:3]] == ["assistant"] * 3
    for index, content in enumerate(contents):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in own) == content
        assert own[-1]["finish_reason"] == "length"


def test_usage_chunk_when_asked_for(api: httpx.Client) -> None:
    last = stream(api, max_tokens=3, stream_options={"include_usage": True})[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3


def test_logprobs_have_bytes_and_alternatives(api: httpx.Client) -> None:
    content = chat(api, max_tokens=1, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert content == [
        {
            "token": "l",
            "logprob": -0.5,
            "bytes": [108],
            "top_logprobs": [
                {"token": "l", "logprob": -0.5, "bytes": [108]},
                {"token": "\x01", "logprob": -9999.0, "bytes": [1]},
            ],
        }
    ]


def test_logprobs_without_alternatives(api: httpx.Client) -> None:
    chunks = stream(api, max_tokens=2, logprobs=True)
    content = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in content] == ["l", "m"]
    assert all(entry["top_logprobs"] == [] for entry in content)
