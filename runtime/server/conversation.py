"""Conversations as texts to tokenize: rendered by the chat template, with special tokens in messages cut apart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any

from compress.common.errors import RequestError
from runtime.server.protocol.chat import REASONING, ChatRequest
from runtime.text.tokenizer import Tokenizer
from runtime.text.tools import concatenates_arguments, describe_tools, mentions_tools, takes_one_call

Json = Any
PRIVATE_CHARACTERS = range(0xE000, 0xF900)


def conversation_texts(tokenizer: Tokenizer, body: ChatRequest) -> list[str]:
    """Returns the prompt up to the answer in pieces; tokens do not reach from one to the next.

    A special token in a message or tool is text: it is cut after its first character. Most prompts are one piece.

    Raises:
        RequestError: the template refuses the conversation, or has no such variable, or has changed a message that the
            answer should continue.
    """
    variables = body.template_variables
    if body.reasoning_effort is not None and "reasoning_effort" not in tokenizer.template_variables:
        del variables["reasoning_effort"]
    messages: Json = [message.as_json() for message in body.messages]
    tools: Json = [tool.as_json() for tool in body.usable_tools]
    mark = "" if body.parse_special else find_mark(tokenizer.special_ids, [messages, tools])
    if mark:
        messages, tools = cut_apart(tokenizer.special_ids, mark, [messages, tools])
    text = render(tokenizer, messages, tools, variables)
    if body.continue_final_message:
        text = up_to_message(text, messages[-1]["content"])
    return text.split(mark) if mark else [text]


def render(tokenizer: Tokenizer, messages: list[Json], tools: list[Json], variables: dict[str, Any]) -> str:
    """Returns a rendered conversation. Templates without support for tools get them as text."""
    messages = [with_reasoning(message, tokenizer.chat_template or "") for message in messages]
    if not (tools or any("tool_calls" in message or message["role"] == "tool" for message in messages)):
        return tokenizer.render_chat(messages, **variables)
    template = tokenizer.chat_template or ""
    if not mentions_tools(template):
        return tokenizer.render_chat(describe_tools(messages, tools), **variables)
    if takes_one_call(template):
        messages = one_call_each(messages)
    if concatenates_arguments(template):
        messages = [with_text_arguments(message) for message in messages]
    return tokenizer.render_chat(messages, **({"tools": tools} if tools else {}), **variables)


def with_reasoning(message: Json, template: str) -> Json:
    """Returns a message whose reasoning has the names that a template reads."""
    if REASONING not in message:
        return message
    names = set(re.findall(r"[.'\"](reasoning_content|reasoning|thinking)\b", template))
    if message["content"] and message.get("tool_calls"):
        names.discard("thinking")  # templates of harmony take one of both
    thoughts = message[REASONING]
    plain = {name: held for name, held in message.items() if name != REASONING}
    return {**plain, **dict.fromkeys(sorted(names), thoughts)}


def one_call_each(messages: list[Json]) -> list[Json]:
    """Returns messages with one call each at most, each before its result."""
    found: list[Json] = []
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        results = list(takewhile(lambda each: each["role"] == "tool", islice(messages, place, None)))
        place += len(results)
        ids = [call["id"] for call in calls]
        for number, call in enumerate(calls):
            turn = message if number == 0 else {"role": "assistant", "content": ""}
            found += [{**turn, "tool_calls": [call]}, *(each for each in results if each["tool_call_id"] == call["id"])]
        found += [each for each in results if each["tool_call_id"] not in ids]
    return found


def with_text_arguments(message: Json) -> Json:
    """Returns a message in which the arguments of calls are JSON as text."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def up_to_message(text: str, message: str) -> str:
    """Returns a rendered conversation up to the end of its last message."""
    for form in (message, message.strip()):
        if form and (start := text.rfind(form)) >= 0:
            return text[: start + len(form)]
    problem = "the model's chat template changes the message that the answer should continue"
    raise RequestError(problem, "Send a prompt to /v1/completions")


def find_mark(special_tokens: Iterable[str], value: Json) -> str:
    """Returns a character that no text of a JSON value has, if one of them has a special token; else an empty text."""
    texts = list(texts_of(value))
    wanted = pattern_of(special_tokens)
    if wanted is None or not any(map(wanted.search, texts)):
        return ""
    free = (chr(code) for code in PRIVATE_CHARACTERS)
    return next(character for character in free if not any(character in text for text in texts))


def cut_apart(special_tokens: Iterable[str], mark: str, value: Json) -> Json:
    """Returns a JSON value whose texts have a mark after the first character of each special token."""
    wanted = pattern_of(special_tokens)
    if isinstance(value, dict):
        pairs = ([*map(partial(cut_apart, special_tokens, mark), pair)] for pair in value.items())
        return dict(pairs)
    if isinstance(value, list):
        return [cut_apart(special_tokens, mark, held) for held in value]
    while isinstance(value, str) and wanted is not None and wanted.search(value):  # tokens may overlap
        value = wanted.sub(lambda found: f"{found[0][0]}{mark}{found[0][1:]}", value)
    return value


def pattern_of(special_tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Returns what finds special tokens of two characters or more; None if there are none."""
    names = [name for name in special_tokens if len(name) > 1]
    return re.compile("|".join(map(re.escape, names))) if names else None


def texts_of(value: Json) -> Iterable[str]:
    """Yields the texts in a JSON value, names in objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for held in chain(value, value.values()) if isinstance(value, dict) else value:
            yield from texts_of(held)
