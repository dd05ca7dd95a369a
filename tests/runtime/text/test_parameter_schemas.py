"""Arguments between tags: which are text, which JSON, and which schemas can be enforced."""

import json
from typing import Any

import pytest

from compress.common.errors import RequestError
from runtime.text.call_head import QUOTED, WAIT, WORD, Head, held_back, match_head
from runtime.text.parameter_schemas import argument_json, check_enforceable, is_text, properties_of, types_of
from runtime.text.pieces import CallArguments, CallStart, Piece, joined
from runtime.text.tool_formats.glm import GLM
from runtime.text.tool_formats.qwen_coder import QWEN_CODER
from runtime.text.tool_grammar import forced_calls
from runtime.text.tool_parser import ToolCallParser


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        (" 3\n", {"type": "number"}, 3),
        ("3", {"type": ["string", "null"]}, "3"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": "null"}, None),
        ("True", {"type": "boolean"}, True),
        ("True", {"type": ["string", "integer"]}, "True"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("C", {"enum": ["C", 1]}, "C"),
        ("1", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 1),
        ("NaN", {"type": "number"}, "NaN"),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("3", None, 3),
        ("three", None, "three"),
        ("", None, ""),
    ],
)
def test_arguments_get_the_type_of_their_schema(text: str, schema: dict | None, value: Any) -> None:
    assert json.loads(argument_json(text, schema)) == value


def test_parameters_with_references() -> None:
    root = {"properties": {"a": {"$ref": "#/$defs/t"}, "b": {"$ref": "#/nowhere"}}, "$defs": {"t": {"type": "string"}}}
    found = properties_of({"name": "f", "parameters": root})
    assert is_text(found["a"])
    assert not is_text(found["b"])
    assert types_of({"const": 1.5}) == {"number"}
    assert properties_of({"name": "f"}) == {}
    assert properties_of({"name": "f", "parameters": {"properties": 3}}) == {}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "a+"}}}, "pattern"),
        ({"properties": {}, "minProperties": 1}, "minProperties"),
        ({"required": ["a"]}, "'a'"),
    ],
)
@pytest.mark.parametrize("tool_format", [GLM, QWEN_CODER], ids=lambda found: found.name)
def test_schemas_that_cannot_be_enforced_are_refused(tool_format: Any, parameters: dict, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        forced_calls(tool_format, [{"name": "f", "parameters": parameters}], {}, several=True)
    check_enforceable({"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}})


TOOL = {"name": "f", "parameters": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}


def parse(tool_format: Any, text: str) -> list[Piece]:
    parser = ToolCallParser(tool_format, [TOOL])
    return joined([piece for character in text for piece in parser.push(character)] + parser.flush())


@pytest.mark.parametrize(
    ("tool_format", "text", "expected"),
    [
        (GLM, "<tool_call>f</tool_call>", ["{}"]),
        (GLM, "<tool_call>f<arg_key>s</arg_key><arg_value> a </arg_value></tool_call>", ['{"s": " a "}']),
        (GLM, "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value> no", ['{"n": 1}', " no"]),
        (GLM, "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>12", ['{"n": 12']),
        (GLM, "<tool_call>f\n<arg_key>n</arg_key> no", ["{}", "\n<arg_key>n</arg_key> no"]),
        (QWEN_CODER, "<tool_call>\n<function=f>\n</function>\n</tool_call>", ["{}"]),
        (
            QWEN_CODER,
            "<tool_call><function=f><parameter=s>\n\na</parameter\n\n</parameter></function></tool_call>",
            ['{"s": "\\na</parameter\\n"}'],
        ),
        (QWEN_CODER, "<tool_call><function=f><parameter=s>a</parameter>x", ['{"s": "a"}', "x"]),
        (QWEN_CODER, "<tool_call><function=f><parameter=s>\na\n", ['{"s": "a\\n']),
    ],
)
def test_calls_of_which_not_all_is_there(tool_format: Any, text: str, expected: list[str]) -> None:
    start, arguments, *rest = parse(tool_format, text)
    assert start == CallStart("f")
    assert isinstance(arguments, CallArguments)
    assert [arguments.text, *rest] == expected
    parser = ToolCallParser(tool_format, [TOOL])
    assert joined(parser.push(text) + parser.flush()) == [start, arguments, *rest]


@pytest.mark.parametrize(
    "text", ["<tool_call>is a tag", "<tool_call>\n<function>", "<tool_call><function=f", "<tool_call>f"]
)
def test_what_only_looks_like_a_call(text: str) -> None:
    for tool_format in (GLM, QWEN_CODER):
        assert parse(tool_format, text) == [text]


def test_heads() -> None:
    assert match_head(" <a> name :", ("<a>", WORD, ":")) == Head(("name",), 11)
    assert match_head("<a>name", ("<a>", WORD)) is WAIT
    assert match_head("<a", ("<a>", WORD)) is WAIT
    assert match_head("<b", ("<a>", WORD)) is None
    assert match_head('"a\\"b" {', (QUOTED, "{")) == Head(('"a\\"b"',), 8)
    assert match_head('"a\\', (QUOTED, "{")) is WAIT
    assert held_back("x</to", "</tool_call>") == 4
    assert held_back("x</tool_call>", "</tool_call>") == 0
