"""Formats of tool calls: found in templates, enforced by grammars, parsed however the text is cut."""

import json
import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import validate
from tiers import examples

from compress.common.cli import demo_model_path
from compress.common.errors import RequestError
from runtime.text.call_head import JsonEnd
from runtime.text.grammar import GrammarCompiler
from runtime.text.json_calls import JsonToolFormat
from runtime.text.pieces import CallArguments, CallStart, Piece, joined
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_formats.hermes import HERMES
from runtime.text.tool_formats.llama import LLAMA
from runtime.text.tool_formats.mistral import MISTRAL
from runtime.text.tool_grammar import allowed_calls, forced_calls
from runtime.text.tool_parser import ToolCallParser
from runtime.text.tools import concatenates_arguments, describe_tools, find_format, mentions_tools

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
def test_the_template_tells_the_format(template: str, tool_format: JsonToolFormat) -> None:
    assert find_format(template) is tool_format


@pytest.mark.parametrize(
    "template",
    [
        "{{ tools }} {{ '[TOOL_CALLS]' + name + arguments }}",
        "{{ tools }} <TOOLCALL>[{{ call }}]</TOOLCALL>",
        "{{ tools }} Return all calls within <tool_call></tool_call>:\n<tool_calls>[{{ call }}]</tool_calls>",
        "{{ tools }} <tool_call><invoke name={{ call.name }}>{{ call.arguments }}</invoke></tool_call>",
        "{{ tools }} <|python_tag|> is for code, <function={{ call.name }}>{{ call.arguments }}</function> for calls",
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
    tool_format: JsonToolFormat, several: bool, tags_are_special: bool
) -> None:
    """Random allowed tokens. Special tokens 1 and 2 of the demo model stand for tags here."""
    tags = [tag for tag in (tool_format.opening, tool_format.closing) if len(tag) > 1]
    special = {tag: number for number, tag in enumerate(tags, start=1)} if tags_are_special else {}
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
        pieces = parse(tool_format, [text.decode()])
        assert pieces
        for start, arguments in zip(pieces[::2], pieces[1::2], strict=True):
            assert isinstance(start, CallStart)
            assert isinstance(arguments, CallArguments)
            assert start.name in ("weather", "now")
            if start.name == "weather":
                validate(json.loads(arguments.text), PARAMETERS)
            else:
                assert json.loads(arguments.text) == {}


GOOD = {"name": "weather", "arguments": {"city": "Rome", "days": 2}}
BAD = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
UNKNOWN = {"name": "other", "arguments": {}}


def say(tool_format: JsonToolFormat, call: dict, *, tag: bool = True) -> str:
    text = json.dumps(call).replace("arguments", tool_format.key or "")
    text = f"[{text}]" if tool_format.bare == "[" else f"\n{text}\n" if tool_format.closing else text
    return f"{tool_format.opening if tag else ''}{text}{tool_format.closing.removeprefix(']')}"


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL], ids=lambda f: f.name)
@pytest.mark.parametrize("is_special", [False, True])
def test_strict_tools_leave_text_free_and_hold_calls_to_their_schema(
    tool_format: JsonToolFormat, is_special: bool
) -> None:
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
    if tool_format.bare:
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


def test_templates_that_join_arguments_with_texts() -> None:
    assert concatenates_arguments("{{ '<sep>' + tool['function']['arguments'] + '<end>' }}")
    assert concatenates_arguments("{{ '<sep>' + call.function.arguments }}")
    assert not concatenates_arguments("{{ '<sep>' + (call.function.arguments | tojson) + '<end>' }}")
    assert not concatenates_arguments("{{ call.function.arguments }}")


TRICKY = {"text": '</tool_call> }{ ][ \\ " [TOOL_CALLS]', "deep": [{"a": [1, {}]}]}
FORMATS = st.sampled_from([HERMES, LLAMA, MISTRAL])
VALUES = st.none() | st.integers() | st.text(max_size=8) | st.just(TRICKY)
ARGUMENTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=2)


def parse(tool_format: JsonToolFormat, pieces: Iterable[str], *, several: bool = True) -> list[Piece]:
    """All pieces, those that follow each other joined."""
    parser = ToolCallParser(tool_format, several=several)
    return joined([piece for text in pieces for piece in parser.push(text)] + parser.flush())


def write(tool_format: JsonToolFormat, calls: list[tuple[str, dict]]) -> str:
    """Calls as models of this format write them."""
    texts = [json.dumps({"name": name, tool_format.key or "": arguments}) for name, arguments in calls]
    if tool_format.bare == "[":
        return f"{tool_format.opening} [{', '.join(texts)}]"
    if tool_format.closing:
        return "\n".join(f"{tool_format.opening}\n{text}\n{tool_format.closing}" for text in texts)
    return tool_format.opening + "; ".join(texts)


def call(name: str, arguments: dict) -> list[Piece]:
    return [CallStart(name), CallArguments(json.dumps(arguments))]


@given(
    tool_format=FORMATS,
    calls=st.lists(st.tuples(st.text(min_size=1, max_size=5), ARGUMENTS), min_size=1, max_size=3),
    before=st.sampled_from(["", "  ", "Let me see.", "Let me see. \n"]),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
@examples(150)
def test_calls_come_out_as_they_were_meant(
    tool_format: JsonToolFormat, calls: list[tuple[str, dict]], before: str, cuts: list[int]
) -> None:
    text = before + write(tool_format, calls)
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(ends)]
    expected: list[Piece] = [before.rstrip()] if before.strip() else []
    expected += [piece for name, arguments in calls for piece in call(name, arguments)]
    assert parse(tool_format, pieces) == expected


FRAGMENTS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "[TOOL", ";", "a", " ", "\n"]
FRAGMENTS += [*'{}[]"\\', *(write(f, [("f", TRICKY)]).removeprefix(f.opening) for f in (HERMES, LLAMA, MISTRAL))]


@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join), tool_format=FORMATS, several=st.booleans())
@examples(400)
def test_any_text_gives_the_same_at_every_split(text: str, tool_format: JsonToolFormat, several: bool) -> None:
    whole = parse(tool_format, [text], several=several)
    assert parse(tool_format, list(text), several=several) == whole
    for middle in range(0, len(text), 7):
        assert parse(tool_format, [text[:middle], text[middle:]], several=several) == whole
    if not any(isinstance(piece, CallStart) for piece in whole):
        assert "".join(whole) == text  # type: ignore[arg-type]


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL], ids=lambda f: f.name)
def test_every_split_point_of_one_answer(tool_format: JsonToolFormat) -> None:
    text = f"Well, {write(tool_format, [('f', TRICKY), ('g', {})])} and so on"
    expected = parse(tool_format, [text])
    assert expected == ["Well,", *call("f", TRICKY), *call("g", {}), " and so on"]
    for middle in range(len(text) + 1):
        assert parse(tool_format, [text[:middle], text[middle:]]) == expected


@pytest.mark.parametrize(
    ("tool_format", "text", "expected"),
    [
        (HERMES, "just text \n", ["just text \n"]),
        (HERMES, "", []),
        (HERMES, '<tool_call>{"name": "f", "arg', ['<tool_call>{"name": "f", "arg']),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}', call("f", {})),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_c', call("f", {})),
        (HERMES, '<tool_call>no</tool_call><tool_call>{"name": "f", "arguments": {}}', None),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', None),
        (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>', None),
        (HERMES, '<tool_call>{"arguments": {"q": 1}, "name": "f"}</tool_call>', call("f", {"q": 1})),
        (HERMES, '<tool_call>{"id": 3, "name": "f", "arguments": {"q": 1}}</tool_call>', call("f", {"q": 1})),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"q": 1}, "id": "}"}</tool_call>.',
            [*call("f", {"q": 1}), "."],
        ),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"q": 1} no', [*call("f", {"q": 1}), " no"]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"q', [CallStart("f"), CallArguments('{"q')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {q}}', [CallStart("f"), CallArguments("{q}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}', None),
        (LLAMA, '{"name": "f", "parameters": {"q": 1}}', call("f", {"q": 1})),
        (LLAMA, '{"answer": 42} is JSON', ['{"answer": 42} is JSON']),
        (LLAMA, 'I say {"name": "f", "parameters": {}}', ['I say {"name": "f", "parameters": {}}']),
        (MISTRAL, '[{"name": "f", "arguments": {}}]', call("f", {})),
        (MISTRAL, "[1, 2] is a list", ["[1, 2] is a list"]),
        (MISTRAL, "[TOOL_CALLS] []", ["[TOOL_CALLS] []"]),
    ],
)
def test_what_is_a_call_and_what_is_text(tool_format: JsonToolFormat, text: str, expected: list[Piece] | None) -> None:
    found = parse(tool_format, [text])
    if expected is None:  # what is not a call is text, unchanged; a call may follow it
        assert isinstance(found[0], str)
        assert text.startswith(found[0])
    else:
        assert found == expected


def test_one_call_is_enough_when_asked_for_one() -> None:
    text = write(HERMES, [("f", {}), ("g", {})]) + " more"
    assert parse(HERMES, list(text), several=False) == call("f", {})
    assert parse(MISTRAL, [write(MISTRAL, [("f", {}), ("g", {})])], several=False) == call("f", {})


@given(value=st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)), rest=st.text())
@examples(200)
def test_json_ends_where_it_ends(value: object, rest: str) -> None:
    text = json.dumps([value])
    for size in (1, 2, 7):
        end, found = JsonEnd(), None
        for start in range(0, len(text) + len(rest), size):
            part = (text + rest)[start : start + size]
            found = end.feed(part)
            if found is not None:
                assert start + found == len(text)
                break
        assert found is not None
    assert JsonEnd().feed(text[:-1]) is None
