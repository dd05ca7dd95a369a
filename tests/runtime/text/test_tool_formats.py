"""Each family's own template: its format is found, its calls are parsed however they are cut, and its grammar holds."""

import json
import re
from typing import Any

import pytest
from chat_templates import FAMILIES, Family

from compress.common.cli import demo_model_path
from runtime.text.answer_form import AnswerForm, AnswerParser
from runtime.text.grammar import GrammarCompiler
from runtime.text.harmony import HARMONY
from runtime.text.pieces import CallArguments, CallStart, Piece, joined
from runtime.text.reasoning import Position
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_format import TOOL_FORMATS, ToolFormat
from runtime.text.tool_grammar import allowed_calls, forced_calls, literal
from runtime.text.tools import concatenates_arguments, find_format

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"$ref": "#/$defs/days"},
        "hours": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS: list[Any] = [{"name": "get_weather", "parameters": WEATHER}, {"name": "now"}]
ROME = {"city": 'Rome "old"\n}] <b>', "unit": "C", "days": 2, "hours": [8, 12]}
CALLS = [("get_weather", ROME), ("now", {})]
TOKENIZER = Tokenizer.open(demo_model_path())
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def conversation(family: Family, content: str, calls: list[tuple[str, dict]]) -> list[dict[str, Any]]:
    tool_format = TOOL_FORMATS[family.name]
    as_text = concatenates_arguments(family.template)
    written = [
        {
            "id": tool_format.new_id(name, number),
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(held) if as_text else held},
        }
        for number, (name, held) in enumerate(calls)
    ]
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content, "tool_calls": written}]


def write(family: Family, content: str = "", calls: list[tuple[str, dict]] = CALLS) -> str:
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    return family.written(conversation(family, content, calls), tools)


def parse(tool_format: ToolFormat, *texts: str, several: bool = True) -> list[Piece]:
    parser = new_parser(tool_format, several=several)
    return joined([piece for text in texts for piece in parser.push(text)] + parser.flush())


def new_parser(tool_format: ToolFormat, *, several: bool = True) -> AnswerParser:
    """A parser as the server makes it; calls of harmony are found by the parser of its channels."""
    reasoning = HARMONY if tool_format.name == "harmony" else None
    return AnswerForm(tool_format, TOOLS, several, reasoning, Position.BEFORE).parser()


def meant(pieces: list[Piece]) -> list[Any]:
    """Pieces with arguments as values."""
    return [json.loads(piece.text) if isinstance(piece, CallArguments) else piece for piece in pieces]


@every_family
def test_the_template_tells_the_format(family: Family) -> None:
    assert find_format(family.template).name == family.name


def test_every_format_has_a_family() -> None:
    assert {family.name for family in FAMILIES.values()} == set(TOOL_FORMATS)


@every_family
def test_calls_of_a_rendered_conversation(family: Family) -> None:
    tool_format = TOOL_FORMATS[family.name]
    content = "" if family.name == "Llama 3.1" else "Let me see."
    pieces = parse(tool_format, write(family, content).lstrip("\n"))
    expected = [CallStart("get_weather"), ROME, CallStart("now"), {}]
    is_behind = family.name == "Gemma 4"  # its templates write an answer's calls first
    expected = [*expected, content] if is_behind else [content, *expected] if content else expected
    assert meant(pieces) == expected


@every_family
def test_every_cut_gives_the_same(family: Family) -> None:
    tool_format = TOOL_FORMATS[family.name]
    text = write(family, "Well,") + "\n and so on"
    whole = parse(tool_format, text)
    assert parse(tool_format, *text) == whole
    for middle in range(len(text) + 1):
        assert parse(tool_format, text[:middle], text[middle:]) == whole, text[:middle]
        assert parse(tool_format, text[:middle]) == parse(tool_format, *text[:middle]), text[:middle]


@every_family
def test_pieces_come_as_early_as_they_are_certain(family: Family) -> None:
    """The name before the arguments, and those before their end."""
    text = write(family, calls=[("get_weather", {"city": "Rome", "days": 2})])
    parser = new_parser(TOOL_FORMATS[family.name])
    seen: list[tuple[int, Piece]] = []
    for position, character in enumerate(text):
        seen += [(position, piece) for piece in parser.push(character)]
    assert isinstance(seen[0][1], CallStart)
    arguments = [(position, piece.text) for position, piece in seen if isinstance(piece, CallArguments)]
    assert json.loads("".join(part for _, part in arguments)) == {"city": "Rome", "days": 2}
    assert seen[0][0] < text.index("Rome")
    assert [position for position, part in arguments if "R" in part] == [text.index("Rome")]


@every_family
def test_a_call_that_is_cut_off_keeps_what_there_is(family: Family) -> None:
    text = write(family, calls=[("get_weather", {"city": "Rome", "days": 2})])
    start, arguments = parse(TOOL_FORMATS[family.name], text[: text.index("Rome") + 2])
    assert start == CallStart("get_weather")
    assert arguments == CallArguments('{"city": "Ro')


@every_family
def test_one_call_is_enough(family: Family) -> None:
    tool_format, text = TOOL_FORMATS[family.name], write(family) + " more"
    assert meant(parse(tool_format, *text, several=False)) == [CallStart("get_weather"), ROME]


@every_family
def test_text_without_calls_stays_as_it_is(family: Family) -> None:
    opening = TOOL_FORMATS[family.name].opening
    texts = ["", " \n", "Hello {1} [2] <b> f(x)\n", f"I would write {opening} first, ", f"{opening}{opening[:-1]}"]
    for text in texts[: 4 if family.name == "harmony" else None]:
        assert "".join(parse(TOOL_FORMATS[family.name], *text)) == text  # type: ignore[arg-type]


def tokens_of(text: str, special: dict[str, int]) -> list[int]:
    """Tokens of a text; special ones where their text is."""
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    return [token for part in parts for token in ([special[part]] if part in special else TOKENIZER.encode(part))]


def accepts(grammar: Any, text: str, special: dict[str, int]) -> bool:
    tokens = [*tokens_of(text, special), 0]
    return COMPILER.constraint(grammar, {0}).accept(tokens) == len(tokens)


def as_generated(text: str) -> str:
    """A rendering without what templates write around calls: ids in objects, and a line break before the first.

    Calls of harmony name their function after the channel.
    """
    called = r"<|channel|>commentary to=functions.\1 <|constrain|>"
    text = re.sub(r"^ to=functions\.(\w+)<\|channel\|>commentary", called, text)
    text = text.replace("<|constrain|> json", "<|constrain|>json").removesuffix("<|call|>")
    return re.sub(r', "id": "\w+"', "", text).lstrip("\n")


@every_family
@pytest.mark.parametrize("is_special", [False, True])
def test_the_grammar_takes_the_familys_own_calls(family: Family, is_special: bool) -> None:
    tool_format = TOOL_FORMATS[family.name]
    special = {tool_format.opening: 1} if is_special else {}
    if is_special and tool_format.closing.startswith("<"):
        special[tool_format.closing] = 2
    if is_special and family.name == "GLM 4.5":
        special["</arg_value>"] = 3
    forced = forced_calls(tool_format, TOOLS, special, several=True)
    allowed = allowed_calls(tool_format, TOOLS, special, several=True)
    is_harmony = family.name == "harmony"
    if is_special and is_harmony:
        special = {"<|channel|>": 1, "<|message|>": 2}
        forced, allowed = (make(tool_format, TOOLS, special, several=True) for make in (forced_calls, allowed_calls))
    wrong = [("get_weather", {"city": "Rome", "days": 22}), ("get_weather", {"days": 2}), ("other", {})]
    for calls in (CALLS[:1], CALLS[1:], *(() if is_harmony else (CALLS, CALLS[::-1]))):
        text = as_generated(write(family, calls=calls))
        assert accepts(forced, text, special), text
        assert accepts(allowed, text, special), text
    for call in wrong:
        text = as_generated(write(family, calls=[call]))
        assert not accepts(forced, text, special), text
        assert not accepts(allowed, text, special), text
    assert not accepts(forced, "Hello", special)
    assert accepts(allowed, f"{tool_format.text_opening}Hello, {{1}} [2] <b>.\n", special)
    once = forced_calls(tool_format, TOOLS, special, several=False)
    assert not accepts(once, as_generated(write(family)), special)
    assert accepts(once, as_generated(write(family, calls=CALLS[1:])), special)


@every_family
def test_an_answer_is_calls_or_json_of_a_form(family: Family) -> None:
    tool_format = TOOL_FORMATS[family.name]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = forced_calls(tool_format, TOOLS, {}, several=True, reply=schema)
    assert accepts(grammar, as_generated(write(family, calls=CALLS[:1])), {})
    for text, is_valid in (('{"a": 1}', True), ('{"a": "b"}', False), ("Hello", False), ("", False)):
        assert accepts(grammar, tool_format.text_opening + text, {}) == is_valid


def test_ids_are_those_of_the_templates() -> None:
    ids = {name: tool_format.new_id("f", 3) for name, tool_format in TOOL_FORMATS.items()}
    assert ids["Kimi K2"] == "functions.f:3"
    assert re.fullmatch("[0-9a-f]{9}", ids["Mistral"])
    assert re.fullmatch("[0-9a-f]{9}", ids["Mistral 3"])
    assert all(
        found.startswith("call_") for name, found in ids.items() if name not in ("Kimi K2", "Mistral", "Mistral 3")
    )


def test_special_tokens_of_a_literal() -> None:
    special = {"<a>": 7, "<a>b": 8}
    assert literal("x<a>y", special) == '"x" <[7]> "y"'
    assert literal("<a>b<a>", special) == "<[8]> <[7]>"
    assert literal('"', {}) == r'"\""'
    assert literal("", special) == ""
