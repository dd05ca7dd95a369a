"""Calls of Gemma 4: objects with bare keys become JSON, and the grammar holds them to nested schemas."""

import json
import re
from typing import Any

import pytest

from compress.common.cli import demo_model_path
from compress.common.errors import RequestError
from runtime.text.grammar import GrammarCompiler
from runtime.text.pieces import CallArguments, CallStart, Piece, joined
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_formats.gemma import GEMMA
from runtime.text.tool_grammar import forced_calls
from runtime.text.tool_parser import ToolCallParser

QUOTE = '<|"|>'
TOOLS: list[Any] = [{"name": "find", "parameters": {"properties": {"place": {"type": "string"}, "near": {}}}}]
TRIP = {
    "type": "object",
    "properties": {
        "Stops": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "nights": {"type": "integer"}},
                "required": ["city"],
            },
        },
        "guide": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "mode": {"enum": ["train", "car"]},
        "fast": {"type": ["boolean", "null"]},
    },
    "required": ["Stops"],
}
TOKENIZER = Tokenizer.open(demo_model_path())
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)


def parse(*texts: str) -> list[Piece]:
    parser = ToolCallParser(GEMMA, TOOLS)
    return joined([piece for text in texts for piece in parser.push(text)] + parser.flush())


def call(body: str) -> str:
    return f"<|tool_call>call:find{{{body}}}<tool_call|>".replace("`", QUOTE)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", {}),
        ("place:`Rome`,days:42", {"place": "Rome", "days": 42}),
        ('place:`a "b"\\\n{c}, [d]: <|e|>`', {"place": 'a "b"\\\n{c}, [d]: <|e|>'}),
        ("place:``,near:`x`", {"place": "", "near": "x"}),
        ("a:{b:{c:[1,-2.5e3,true]},d:``},e:[]", {"a": {"b": {"c": [1, -2500.0, True]}, "d": ""}, "e": []}),
        ("a:[{b:`x`,c:false},{}],d:null,e:None", {"a": [{"b": "x", "c": False}, {}], "d": None, "e": None}),
        ("`place`:`Rome`, a : {`b c` : 1 }", {"place": "Rome", "a": {"b c": 1}}),
        ("place:12,near:12", {"place": "12", "near": 12}),
        ("near:12:30 h", {"near": "12:30 h"}),
    ],
)
def test_objects_become_json_however_they_are_cut(body: str, expected: Any) -> None:
    text = call(body)
    start, arguments = parse(text)
    assert start == CallStart("find")
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == expected
    assert parse(*text) == [start, arguments]
    assert all(parse(text[:middle], text[middle:]) == [start, arguments] for middle in range(len(text)))


@pytest.mark.parametrize(
    ("kept", "arguments"),
    [
        ("place:`Ro", '{"place": "Ro'),
        ('place:`Ro<|"', '{"place": "Ro<|\\"'),
        ("a:{days:4", '{"a": {"days": 4'),
        ("place:<|", '{"place": '),
        ("pla", "{"),
    ],
)
def test_a_call_that_is_cut_off_keeps_what_there_is(kept: str, arguments: str) -> None:
    text = f"<|tool_call>call:find{{{kept}".replace("`", QUOTE)
    assert parse(text) == parse(*text) == [CallStart("find"), CallArguments(arguments)]


def test_what_is_no_call_stays_text() -> None:
    for text in ("<|tool_call>find{}", "<|tool_call>call:find(a)", "call:find{a:1}", "<|tool_call>call:{}"):
        assert parse(*text) == [text]


def accepts(body: str, special: dict[str, int], tool: Any = None) -> bool:
    grammar = forced_calls(GEMMA, [tool or {"name": "find", "parameters": TRIP}], special, several=True)
    parts = re.split(f"({'|'.join(map(re.escape, special))})", call(body)) if special else [call(body)]
    tokens = [each for part in parts for each in ([special[part]] if part in special else TOKENIZER.encode(part))]
    return COMPILER.constraint(grammar, {0}).accept([*tokens, 0]) == len(tokens) + 1


@pytest.mark.full
@pytest.mark.parametrize("special", [{}, {"<|tool_call>": 1, "<tool_call|>": 2, QUOTE: 3}])
@pytest.mark.parametrize(
    ("body", "holds"),
    [
        ("Stops:[]", True),
        ("fast:true,guide:`Al, {x}`,mode:`car`,Stops:[]", True),
        ("fast:null,guide:null,Stops:[{city:``},{city:`Rome`,nights:2}]", True),
        ("Stops:[],fast:true", False),
        ("Stops:[],Stops:[]", False),
        ("Stops:[],", False),
        ("fast:true", False),
        ("Stops:[{nights:2}]", False),
        ("Stops:[{city:`Rome`,nights:`2`}]", False),
        ("mode:`boat`,Stops:[]", False),
        ("mode:car,Stops:[]", False),
        ("other:1,Stops:[]", False),
    ],
)
def test_grammars_of_nested_schemas(body: str, holds: bool, special: dict[str, int]) -> None:
    assert accepts(body, special) == holds


def test_a_tool_without_parameters() -> None:
    assert accepts("", {}, {"name": "find"})
    assert not accepts("a:1", {}, {"name": "find"})


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ({"properties": {"a": {}}}, "any type"),
        ({"properties": {"a": {"type": "array"}}}, "type array"),
        ({"properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 2}}}, "minItems"),
        ({"properties": {"a": {"type": "object"}}}, "type object"),
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        ({"properties": {"a": {"anyOf": [{"type": "null"}], "allOf": []}}}, "allOf"),
        ({"properties": {}, "required": ["a"]}, "required: 'a'"),
        ({"properties": {}, "patternProperties": {}}, "patternProperties"),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/a"}},
                "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}},
            },
            "recursive definitions",
        ),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused_by_name(parameters: Any, part: str) -> None:
    with pytest.raises(RequestError, match="find") as refusal:
        forced_calls(GEMMA, [{"name": "find", "parameters": parameters}], {}, several=True)
    assert part in refusal.value.problem
