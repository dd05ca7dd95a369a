"""Formats of tool calls: found in chat templates, enforced by grammars, explained to models that know none."""

import json
import random

import pytest
from jsonschema import validate

from compress.common.cli import demo_model_path
from compress.common.errors import RequestError
from runtime.text.grammar import GrammarCompiler
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_parser import ToolCall, ToolCallParser
from runtime.text.tools import (
    HERMES,
    LLAMA,
    MISTRAL,
    ToolFormat,
    allowed_calls,
    describe_tools,
    find_format,
    forced_calls,
    mentions_tools,
)

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Zürich"]}},
}
TOOLS = [{"name": "weather", "parameters": PARAMETERS}, {"name": "now"}]
TOKENIZER = Tokenizer.open(demo_model_path())


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}", HERMES),
        ("{% if tools %}<tools>{{ tools | tojson }}</tools> answer in <tool_call></tool_call>{% endif %}", HERMES),
        ("{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}{{- '[TOOL_CALLS] [' }}", MISTRAL),
        ('{% if tools %}{"name": function name, "parameters": dictionary of argument name}{% endif %}', LLAMA),
        ("{% if builtin_tools or tools %}<|python_tag|>{% endif %}", LLAMA),
    ],
)
def test_the_template_tells_the_format(template: str, tool_format: ToolFormat) -> None:
    assert find_format(template) is tool_format


@pytest.mark.parametrize(
    "template",
    [
        "{{ tools }} <tool_call><function=name><parameter=a>",
        "{{ tools }} [TOOL_CALLS]name[ARGS]",
        "{{ tools }} {{ '[TOOL_CALLS]' + name + arguments }}",
        "{{ tools }} <tool_call>{{ name }}<arg_key>",
        "{{ tools }} in some other way",
    ],
)
def test_unknown_formats_are_refused_with_those_that_are_known(template: str) -> None:
    with pytest.raises(RequestError, match=r"Llama 3\.1"):
        find_format(template)


def test_a_word_that_contains_tools_is_no_mention() -> None:
    assert not mentions_tools("{{ toolshed }}")
    assert mentions_tools("{%- if tools is defined %}")


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL], ids=lambda f: f.name)
@pytest.mark.parametrize("tags_are_special", [False, True])
def test_what_the_grammar_allows_the_parser_finds(
    tool_format: ToolFormat, several: bool, tags_are_special: bool
) -> None:
    """Random allowed tokens. Special tokens 1 and 2 of the demo model stand for tags here."""
    special = {tool_format.opening: 1, tool_format.closing: 2} if tags_are_special else {}
    grammar = forced_calls(tool_format, TOOLS, special, several=several)
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
    spelled = {token_id: text for text, token_id in special.items()}
    for seed in range(8):
        choose, constraint, text = random.Random(seed), compiler.constraint(grammar, {0}), b""
        while not constraint.is_complete:
            mask = constraint.mask()
            token = 0 if mask[0] & 1 else choose.choice([i for i in range(8192) if mask[i // 8] >> i % 8 & 1])
            assert constraint.accept([token]) == 1
            text += b"" if token == 0 else spelled[token].encode() if token in spelled else TOKENIZER.token_bytes(token)
        parser = ToolCallParser(tool_format)
        pieces = parser.push(text.decode()) + parser.flush()
        assert pieces
        for piece in pieces:
            assert isinstance(piece, ToolCall)
            assert piece.name in ("weather", "now")
            if piece.name == "weather":
                validate(json.loads(piece.arguments), PARAMETERS)
            else:
                assert piece.arguments == "{}"


GOOD = {"name": "weather", "arguments": {"city": "Rome", "days": 2}}
BAD = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
UNKNOWN = {"name": "other", "arguments": {}}


def say(tool_format: ToolFormat, call: dict, *, tag: bool = True) -> str:
    text = json.dumps(call).replace("arguments", tool_format.arguments)
    text = f"[{text}]" if tool_format.is_list else f"\n{text}\n" if tool_format.closing else text
    return f"{tool_format.opening if tag else ''}{text}{tool_format.closing}"


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL], ids=lambda f: f.name)
@pytest.mark.parametrize("is_special", [False, True])
def test_strict_tools_leave_text_free_and_hold_calls_to_their_schema(tool_format: ToolFormat, is_special: bool) -> None:
    opening = tool_format.opening
    special = {opening: 1} if is_special else {}
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
    grammar = allowed_calls(tool_format, TOOLS, special, several=True)

    def is_allowed(text: str) -> bool:
        constraint = compiler.constraint(grammar, {0})
        before, tag, after = text.partition(opening) if is_special else (text, "", "")
        tokens = [*TOKENIZER.encode(before), *([1] if tag else []), *TOKENIZER.encode(after)]
        return constraint.accept([*tokens, 0]) == len(tokens) + 1

    for text in ("", "Hello, {1} [2] <b>.\n\n", "Well, " + say(tool_format, GOOD), say(tool_format, GOOD)):
        assert is_allowed(text), text
    for text in (say(tool_format, BAD), say(tool_format, UNKNOWN), "Well, " + say(tool_format, BAD), opening):
        assert not is_allowed(text), text
    if tool_format.is_bare:
        assert is_allowed(say(tool_format, GOOD, tag=False))
        assert not is_allowed(say(tool_format, BAD, tag=False))


def test_tools_in_words_for_templates_without_them() -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    system, user, assistant, result = describe_tools(conversation, [tool])
    assert system["content"].startswith("Be brief.\n\n")
    assert json.dumps(tool) in system["content"]
    assert user == conversation[1]
    assert assistant == {"role": "assistant", "content": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'}
    assert result == {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}
    assert describe_tools(conversation[1:2], [tool])[0]["role"] == "system"
    assert describe_tools(conversation[:2], []) == conversation[:2]
