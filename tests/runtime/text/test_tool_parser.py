"""Tool calls in text: the same pieces however the text is cut, and nothing that is text gets lost."""

import json
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from runtime.text.tool_parser import JsonEnd, Piece, ToolCall, ToolCallParser
from runtime.text.tools import HERMES, LLAMA, MISTRAL, ToolFormat

TRICKY = {"text": '</tool_call> }{ ][ \\ " [TOOL_CALLS]', "deep": [{"a": [1, {}]}]}
FORMATS = st.sampled_from([HERMES, LLAMA, MISTRAL])
VALUES = st.none() | st.integers() | st.text(max_size=8) | st.just(TRICKY)
ARGUMENTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=2)


def parse(tool_format: ToolFormat, pieces: Iterable[str], *, several: bool = True) -> list[Piece]:
    """All pieces, texts that follow each other joined."""
    parser = ToolCallParser(tool_format, several=several)
    found = [piece for text in pieces for piece in parser.push(text)] + parser.flush()
    joined: list[Piece] = []
    for piece in found:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def write(tool_format: ToolFormat, calls: list[tuple[str, dict]]) -> str:
    """Calls as models of this format write them."""
    texts = [json.dumps({"name": name, tool_format.arguments: arguments}) for name, arguments in calls]
    if tool_format.is_list:
        return f"{tool_format.opening} [{', '.join(texts)}]"
    if tool_format.closing:
        return "\n".join(f"{tool_format.opening}\n{text}\n{tool_format.closing}" for text in texts)
    return tool_format.opening + "; ".join(texts)


def call(name: str, arguments: dict) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


@given(
    tool_format=FORMATS,
    calls=st.lists(st.tuples(st.text(min_size=1, max_size=5), ARGUMENTS), min_size=1, max_size=3),
    before=st.sampled_from(["", "  ", "Let me see.", "Let me see. \n"]),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
@examples(150)
def test_calls_come_out_as_they_were_meant(
    tool_format: ToolFormat, calls: list[tuple[str, dict]], before: str, cuts: list[int]
) -> None:
    text = before + write(tool_format, calls)
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(ends)]
    expected = ([before.rstrip()] if before.strip() else []) + [call(name, arguments) for name, arguments in calls]
    assert parse(tool_format, pieces) == expected


FRAGMENTS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "[TOOL", ";", "a", " ", "\n"]
FRAGMENTS += [*'{}[]"\\', *(write(f, [("f", TRICKY)]).removeprefix(f.opening) for f in (HERMES, LLAMA, MISTRAL))]


@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join), tool_format=FORMATS, several=st.booleans())
@examples(400)
def test_any_text_gives_the_same_at_every_split(text: str, tool_format: ToolFormat, several: bool) -> None:
    whole = parse(tool_format, [text], several=several)
    assert parse(tool_format, list(text), several=several) == whole
    for middle in range(0, len(text), 7):
        assert parse(tool_format, [text[:middle], text[middle:]], several=several) == whole
    if not any(isinstance(piece, ToolCall) for piece in whole):
        assert "".join(whole) == text  # type: ignore[arg-type]


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL], ids=lambda f: f.name)
def test_every_split_point_of_one_answer(tool_format: ToolFormat) -> None:
    text = f"Well, {write(tool_format, [('f', TRICKY), ('g', {})])} and so on"
    expected = parse(tool_format, [text])
    assert [piece for piece in expected if isinstance(piece, ToolCall)] == [call("f", TRICKY), call("g", {})]
    for middle in range(len(text) + 1):
        assert parse(tool_format, [text[:middle], text[middle:]]) == expected


@pytest.mark.parametrize(
    ("tool_format", "text", "expected"),
    [
        (HERMES, "just text \n", ["just text \n"]),
        (HERMES, "", []),
        (HERMES, '<tool_call>{"name": "f", "arg', ['<tool_call>{"name": "f", "arg']),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}', [call("f", {})]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_c', [call("f", {})]),
        (HERMES, '<tool_call>no</tool_call><tool_call>{"name": "f", "arguments": {}}', None),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', None),
        (LLAMA, '{"name": "f", "parameters": {"q": 1}}', [call("f", {"q": 1})]),
        (LLAMA, '{"answer": 42} is JSON', ['{"answer": 42} is JSON']),
        (LLAMA, 'I say {"name": "f", "parameters": {}}', ['I say {"name": "f", "parameters": {}}']),
        (MISTRAL, '[{"name": "f", "arguments": {}}]', [call("f", {})]),
        (MISTRAL, "[1, 2] is a list", ["[1, 2] is a list"]),
        (MISTRAL, "[TOOL_CALLS] []", ["[TOOL_CALLS] []"]),
    ],
)
def test_what_is_a_call_and_what_is_text(tool_format: ToolFormat, text: str, expected: list[Piece] | None) -> None:
    found = parse(tool_format, [text])
    if expected is None:  # what is no call is text as it stands; a call may follow it
        assert isinstance(found[0], str)
        assert text.startswith(found[0])
    else:
        assert found == expected


def test_one_call_is_enough_when_asked_for_one() -> None:
    text = write(HERMES, [("f", {}), ("g", {})]) + " more"
    assert parse(HERMES, list(text), several=False) == [call("f", {})]
    assert parse(MISTRAL, [write(MISTRAL, [("f", {}), ("g", {})])], several=False) == [call("f", {})]


@given(value=st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)), rest=st.text())
@examples(200)
def test_json_ends_where_it_ends(value: object, rest: str) -> None:
    text = json.dumps([value])
    end = JsonEnd()
    for length in range(1, len(text)):
        assert end.find(text[:length]) is None
    assert end.find(text + rest) == len(text)
