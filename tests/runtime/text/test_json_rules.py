"""Rules of JSON leave out what a grammar cannot express where that allows more, and are compact."""

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher
from tiers import examples

from compress.common.cli import demo_model_path
from compress.common.errors import RequestError
from runtime.core.request import Grammar, GrammarKind
from runtime.text.grammar import MAX_SCHEMA_CHARACTERS, GrammarCompiler
from runtime.text.json_rules import EXCLUDING, FORMATS, relax, unenforced
from runtime.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.open(demo_model_path())
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
RESTRICTIONS: dict[str, Any] = {
    "uniqueItems": True,
    "not": {"type": "string"},
    "if": {"required": ["a"]},
    "contains": {"type": "integer"},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "dependencies": {"a": ["b"]},
    "propertyNames": {"maxLength": 1},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
}
COMPANIONS = {"if": {"then": {"required": ["b"]}, "else": {"type": "null"}}, "contains": {"minContains": 2}}


def compiled(schema: Any, **options: bool) -> Any:
    return COMPILER.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), **options))


def is_taken(schema: Any, text: str, **options: bool) -> bool:
    """Whether an answer may be this text."""
    compiled(schema, **options)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), **options)
    constraint = COMPILER.constraint(grammar, {0})
    tokens = TOKENIZER.encode(text)
    return constraint.accept([*tokens, 0]) == len(tokens) + 1


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_what_llguidance_cannot_express_is_left_out_and_named(name: str) -> None:
    assert RESTRICTIONS.keys() == EXCLUDING
    schema = {name: RESTRICTIONS[name], **COMPANIONS.get(name, {})}
    is_error, reasons = LLMatcher.validate_grammar_with_warnings(f"start: %json {json.dumps(schema)}")
    assert is_error
    assert name in reasons[0]
    assert unenforced(schema) == [name]
    assert unenforced(json.dumps(schema)) == [name]
    compiled(schema)


@pytest.mark.parametrize(
    "place",
    [
        lambda part: {"items": part},
        lambda part: {"properties": {"a": part, "not": {"type": "null"}}},
        lambda part: {"anyOf": [{"type": "null"}, part]},
        lambda part: {"$defs": {"a": part}, "$ref": "#/$defs/a"},
        lambda part: {"additionalProperties": part},
        lambda part: {"prefixItems": [{"type": "null"}, {"allOf": [part]}]},
    ],
)
def test_wherever_it_stands(place: Any) -> None:
    schema = place({"type": "array", "uniqueItems": True})
    assert unenforced(schema) == ["uniqueItems"]
    assert relax(schema)[0] == place({"type": "array"})
    compiled(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {name: {"type": "null"} for name in EXCLUDING}},
        {"enum": [{"not": 1, "uniqueItems": True}]},
        {"const": {"if": {"format": "color"}}},
        {"default": {"not": {}}, "examples": [{"not": {}}], "type": "string"},
    ],
)
def test_names_and_values_are_no_keywords(schema: Any) -> None:
    assert relax(schema) == (schema, [])


def test_what_restricts_nothing_is_not_named() -> None:
    assert unenforced({"uniqueItems": False, "unevaluatedProperties": True, "minContains": 2}) == []
    assert unenforced({"type": "integer", "format": "int64"}) == []
    assert unenforced("{") == unenforced("[1]") == unenforced("[" * 10**5) == []


@pytest.mark.parametrize("schema", ["$dynamicRef", "$recursiveRef"])
def test_what_changes_the_meaning_is_refused_by_name(schema: str) -> None:
    with pytest.raises(RequestError, match=schema[1:]):
        compiled({"type": "array", "items": {schema: "#a"}})


def test_formats() -> None:
    for name in FORMATS:
        assert unenforced({"type": "string", "format": name}) == []
        compiled({"type": "string", "format": name})
    for name in ("color", "iri", "json-pointer", "regex"):
        for types in ({}, {"type": "string"}, {"type": ["string", "null"]}):
            assert unenforced({**types, "format": name}) == ["format"]
            compiled({**types, "format": name})


@pytest.mark.parametrize(
    ("pattern", "is_regular"),
    [
        (r"^[a-z]+$", True),
        (r"\\bfoo\\1", True),
        (r"^(?:a|b)(?i:c)\.$", True),
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", False),
        (r"^(?=a)b", False),
        (r"(?<=a)b", False),
        (r"(a)\1", False),
        (r"\bfoo", False),
        (r"\\\bfoo", False),
    ],
)
def test_patterns(pattern: str, is_regular: bool) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert unenforced(schema) == ([] if is_regular else ["pattern"])
    compiled(schema)


@pytest.mark.parametrize(
    ("choices", "is_exclusive"),
    [
        ([{"type": "string"}, {"type": "array"}], True),
        ([{"type": "string"}], True),
        ([{"const": 1}, {"const": 2}, {"enum": [3, 4]}], True),
        ([{"const": 1}, {"enum": [1, 2]}], False),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"required": ["a"]}, {"required": ["b"]}], False),
        ([{"type": "string", "pattern": "^a"}, {"type": "string"}], False),
        ([{"$ref": "#/$defs/a"}, {"type": "null"}], False),
    ],
)
def test_choices_that_may_overlap_are_followed_as_any_of(choices: list[Any], is_exclusive: bool) -> None:
    schema = {"$defs": {"a": {"type": "string"}}, "oneOf": choices}
    assert unenforced(schema) == ([] if is_exclusive else ["oneOf"])
    compiled(schema)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "bc"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)
SCHEMAS = st.recursive(
    st.sampled_from([{"type": "string"}, {"type": "integer"}, {"type": "array"}, {"type": "object"}, {"const": 1}, {}]),
    lambda inner: st.one_of(
        st.builds(lambda part, name: {**part, name: RESTRICTIONS[name]}, inner, st.sampled_from(sorted(RESTRICTIONS))),
        st.builds(lambda part: {"items": part}, inner),
        st.builds(lambda part: {"properties": {"a": part}}, inner),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda parts: {"oneOf": parts}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda part, other: {**part, "not": other}, inner, inner),
    ),
    max_leaves=4,
)


def as_any_of(schema: Any) -> Any:
    """The schema as it is followed where its choices overlap."""
    if isinstance(schema, list):
        return [as_any_of(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {"anyOf" if key == "oneOf" else key: as_any_of(value) for key, value in schema.items()}


@given(schema=SCHEMAS, value=JSON)
@examples(200)
def test_no_value_of_the_schema_is_lost(schema: Any, value: Any) -> None:
    relaxed, _ = relax(schema)
    if Draft202012Validator(schema).is_valid(value):
        assert Draft202012Validator(as_any_of(relaxed)).is_valid(value)


@given(schema=JSON | SCHEMAS)
@examples(100)
def test_any_json_is_read(schema: Any) -> None:
    wrapped = dict.fromkeys(("type", "enum", "oneOf", "items", "properties", "format", "pattern", "$defs"), schema)
    assert isinstance(unenforced(wrapped), list)


OBJECT = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "null"}}}
LAYOUTS = {
    '{"a":[1,2],"b":null}': True,
    '{"a": [1, 2], "b": null}': True,
    '{"a": [1,2],"b": null}': True,
    '{ "a": [1]}': False,
    '{"a" :[1]}': False,
    '{"a":  [1]}': False,
    '{"a": [\n1]}': False,
    '{\n  "a": [1]\n}': False,
}


@pytest.mark.parametrize("text", LAYOUTS)
def test_json_is_compact_unless_it_may_be_indented(text: str) -> None:
    assert is_taken(OBJECT, text) == LAYOUTS[text]
    assert is_taken(OBJECT, text, any_whitespace=True) == ("  [" not in text)


def test_a_schema_does_not_choose_its_own_options() -> None:
    loose = {**OBJECT, "x-guidance": {"whitespace_pattern": r"\s*", "lenient": True}}
    assert not is_taken(loose, '{\n"a": [1]}')
    quoting = {"enum": ['"x-guidance": {}', {"x-guidance": {}}]}
    assert is_taken(quoting, json.dumps(quoting["enum"][0]))


@pytest.mark.parametrize("length", [20, 90])
def test_a_list_of_ten_thousand_values_is_compiled_within_a_second(length: int) -> None:
    choose = random.Random(length)
    values = ["".join(choose.choices("abcdefghij-", k=length)) for _ in range(10_000)]
    COMPILER.read_vocabulary()
    begin = time.process_time()
    compiled({"type": "object", "properties": {"a": {"enum": values}}, "required": ["a"]})
    assert time.process_time() - begin < 1
    assert is_taken({"enum": values}, json.dumps(values[-1]))


def test_the_longest_schema() -> None:
    spare = MAX_SCHEMA_CHARACTERS - len(json.dumps({"description": ""}))
    compiled({"description": "x" * spare})
    with pytest.raises(RequestError, match=str(MAX_SCHEMA_CHARACTERS)):
        compiled({"description": "x" * (spare + 1)})
