"""Reasoning is found by the template and separated however the text is cut; grammars begin after it."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from chat_templates import FAMILIES
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from compress.common.cli import demo_model_path
from runtime.core.request import Grammar, GrammarKind
from runtime.text.answer_form import FORMATS, AnswerForm, ReasoningCounter, find_reasoning
from runtime.text.grammar import GrammarCompiler
from runtime.text.harmony import HARMONY
from runtime.text.pieces import CallArguments, CallStart, Piece, Reasoning, joined
from runtime.text.reasoning import MARKS, Position, ReasoningFormat
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_formats.harmony import HARMONY_CALLS
from runtime.text.tool_formats.hermes import HERMES

TOKENIZER = Tokenizer.open(demo_model_path())
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
MISTRAL, GEMMA, THINK = MARKS
every_format = pytest.mark.parametrize("reasoning", MARKS, ids=lambda found: found.name)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
HEAD, COMMENTARY = "<|channel|>analysis<|message|>", "<|channel|>commentary"
NEXT = "<|end|><|start|>assistant"


def parse(form: AnswerForm, *texts: str) -> list[Piece]:
    parser = form.parser()
    return joined([piece for text in texts for piece in parser.push(text)] + parser.flush())


def form_of(reasoning: ReasoningFormat, position: Position, **fields: Any) -> AnswerForm:
    return AnswerForm(reasoning=reasoning, position=position, **fields)


def test_the_template_tells_the_marks() -> None:
    found = {name: find_reasoning(family.template) for name, family in FAMILIES.items()}
    assert {name: each.name for name, each in found.items() if each} == {
        "qwen3": "think",
        "deepseek_r1": "think",
        "deepseek_v31": "think",
        "glm45": "think",
        "ministral3": "Mistral",
        "gpt_oss": "harmony",
        "gemma4": "Gemma 4",
    }
    assert find_reasoning("{{ '<|channel>thought\\n<channel|>' }}") is GEMMA


@pytest.mark.parametrize(
    ("family", "variables", "position"),
    [
        ("qwen3", {}, Position.BEFORE),
        ("qwen3", {"enable_thinking": False}, Position.AFTER),
        ("deepseek_r1", {}, Position.INSIDE),
        ("deepseek_v31", {}, Position.AFTER),
        ("deepseek_v31", {"thinking": True}, Position.INSIDE),
        ("glm45", {}, Position.BEFORE),
        ("glm45", {"enable_thinking": False}, Position.AFTER),
        ("ministral3", {}, Position.BEFORE),
        ("gpt_oss", {}, Position.BEFORE),
    ],
)
def test_the_prompt_tells_where_the_answer_begins(family: str, variables: dict, position: Position) -> None:
    prompt = FAMILIES[family].render([{"role": "user", "content": "<think>"}], **variables)
    found = find_reasoning(FAMILIES[family].template)
    assert found is not None
    assert found.position(prompt) is position


@every_format
def test_reasoning_and_answer(reasoning: ReasoningFormat) -> None:
    opening, closing = reasoning.opening, reasoning.closing
    before, inside, after = (form_of(reasoning, position) for position in Position)
    text = f"Hm,\n{opening[:-1]} maybe{closing}\n\n {{1}}\n"
    pieces = [Reasoning(f"Hm,\n{opening[:-1]} maybe"), "{1}\n"]
    assert parse(inside, text) == pieces
    assert parse(before, f" {opening}\n{text}") == pieces
    assert parse(after, text) == [text]
    assert parse(before, text) == [text]
    assert parse(before, f"\n{opening[:-1]}") == [f"\n{opening[:-1]}"]
    assert parse(inside, f"Hm {closing[:-1]}") == [Reasoning(f"Hm {closing[:-1]}")]
    assert parse(before, opening + closing) == []
    assert parse(before, f"{opening} \n{closing}yes") == ["yes"]
    assert parse(before) == []


@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<thi", "a", " ", "\n", CALL, "<tool_call>"]), max_size=8),
    position=st.sampled_from(Position),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
@examples(200)
def test_every_cut_gives_the_same(parts: list[str], position: Position, cuts: list[int]) -> None:
    text = "".join(parts)
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    form = form_of(THINK, position, tool_format=HERMES)
    assert parse(form, *(text[start:end] for start, end in pairwise(ends))) == parse(form, text)
    assert parse(form, *text) == parse(form, text)


def test_calls_follow_reasoning_and_are_no_calls_inside() -> None:
    form = form_of(THINK, Position.INSIDE, tool_format=HERMES)
    call = [CallStart("f"), CallArguments('{"a": 1}')]
    assert parse(form, f"I could {CALL}.</think>\n\nWell,\n{CALL}") == [Reasoning(f"I could {CALL}."), "Well,", *call]
    assert form.shown([Reasoning("a"), "b"]) == [Reasoning("a"), "b"]
    assert replace(form, shows_reasoning=False).shown([Reasoning("a"), "b"]) == ["b"]


FINAL = "<|channel|>final<|message|>"
CALLED = [CallStart("f"), CallArguments('{"a": 1}')]
BODY = '<|message|>{"a": 1}'


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (f"{HEAD}Hm.{NEXT}{FINAL}Yes <b>", [Reasoning("Hm."), "Yes <b>"]),
        (f"{HEAD}Hm.{NEXT}{COMMENTARY} to=functions.f <|constrain|>json{BODY}<|call|>", [Reasoning("Hm."), *CALLED]),
        (f" to=functions.f{COMMENTARY} json{BODY}", CALLED),
        (f"{COMMENTARY}<|message|>I look.{NEXT} to=functions.f{COMMENTARY}{BODY}<|call|>", ["I look.", *CALLED]),
        (f"{HEAD}a{NEXT}{HEAD}b{NEXT}{FINAL}c<|return|>", [Reasoning("a\nb"), "c"]),
        (f"{HEAD}Hm <|e", [Reasoning("Hm <|e")]),
        (f"{COMMENTARY} to=functions.f<|message|> no", [" no"]),
        (f"{COMMENTARY} to=functions.f<|message|><|call|>", [CallStart("f"), CallArguments("{}")]),
        (f"{HEAD[:-1]}", []),
        (f"{HEAD}a<|end|>", [Reasoning("a")]),
        ("<|channel|>analysis to=browser.search code<|message|>x", [Reasoning("x")]),
        ("Hello <b>", ["Hello <b>"]),
        (" \n", [" \n"]),
        ("", []),
    ],
)
def test_channels(text: str, pieces: list[Piece]) -> None:
    form = form_of(HARMONY, Position.BEFORE, tool_format=HARMONY_CALLS)
    assert parse(form, text) == pieces
    for middle in range(len(text)):
        assert parse(form, text[:middle], text[middle:]) == pieces, text[:middle]
    assert parse(form, *text) == pieces


def test_channels_without_tools_and_with_one_call() -> None:
    call = f"{COMMENTARY} to=functions.f{BODY}<|call|>"
    assert parse(form_of(HARMONY, Position.BEFORE), call) == ['{"a": 1}']
    one = form_of(HARMONY, Position.BEFORE, tool_format=HARMONY_CALLS, several=False)
    assert parse(one, f"{call}<|start|>assistant{call}") == CALLED
    assert len(parse(replace(one, several=True), f"{call}<|start|>assistant{call}")) == 4


def accepts(grammar: Grammar, text: str) -> bool:
    tokens = [*TOKENIZER.encode(text), 0]
    return COMPILER.constraint(grammar, {0}).accept(tokens) == len(tokens)


SCHEMA = '{"type": "object", "properties": {"a": {"enum": ["}", 1]}}, "required": ["a"], "additionalProperties": false}'
GRAMMARS = [
    (Grammar(GrammarKind.JSON_SCHEMA, SCHEMA), '{"a": "}"}'),
    (Grammar(GrammarKind.JSON_OBJECT), '{"a": {}}'),
    (Grammar(GrammarKind.REGEX, r"\{[0-9]{3}/\}?"), "{123/"),
    (Grammar(GrammarKind.LARK, 'start: answer "{"\nanswer: /[0-9]+/'), "12{"),
]


@every_format
@pytest.mark.parametrize(("grammar", "text"), GRAMMARS, ids=lambda value: getattr(value, "kind", ""))
def test_grammars_begin_behind_reasoning(reasoning: ReasoningFormat, grammar: Grammar, text: str) -> None:
    opening, closing = reasoning.opening, reasoning.closing
    before, inside, after = (replace(grammar, prefix=reasoning.prefix(position, {})) for position in Position)
    assert after == grammar
    assert accepts(inside, f"Hm, {{<b>\n{closing}\n\n{text}")
    assert accepts(inside, f"{closing}{text}")
    assert accepts(before, f"{opening}\nHm, {{<b>\n{closing}\n\n{text}")
    assert accepts(before, text)
    assert not accepts(inside, f"Hm{closing}\n\nHm")
    assert not accepts(inside, "Hm")
    assert not accepts(before, f"Hm{closing}{text}")


def test_grammars_begin_behind_special_tokens_and_channels() -> None:
    grammar = Grammar(GrammarKind.REGEX, "[0-9]{3}")
    special = {THINK.closing: 1}
    prefixed = replace(grammar, prefix=THINK.prefix(Position.INSIDE, special))
    tokens = [*TOKENIZER.encode("Hm,"), 1, *TOKENIZER.encode("123"), 0]
    assert COMPILER.constraint(prefixed, {0}).accept(tokens) == len(tokens)
    assert THINK.uses(special)
    assert not THINK.uses({"<|im_end|>": 1})
    harmony = replace(grammar, prefix=HARMONY.prefix(Position.BEFORE, {}))
    assert accepts(harmony, f"{HEAD}Hm.{NEXT}{HEAD}Well.{NEXT}{FINAL}123")
    assert accepts(harmony, f"{FINAL}123")
    assert not accepts(harmony, f"{HEAD}Hm.{NEXT}123")
    assert accepts(replace(grammar, prefix=HARMONY.prefix(Position.BEFORE, {}, is_call=True)), f"{HEAD}Hm.{NEXT}123")
    assert HARMONY.prefix(Position.AFTER, {}) == ""


@pytest.mark.parametrize(
    ("reasoning", "position", "thoughts", "rest"),
    [
        (THINK, Position.INSIDE, "Hm, ü </think>", "\n\nYes"),
        (THINK, Position.BEFORE, "", "Yes </think>"),
        (THINK, Position.INSIDE, "Hm, and", ""),
        (HARMONY, Position.BEFORE, "", f"{FINAL}Yes"),
    ],
)
def test_tokens_of_reasoning_are_counted(
    reasoning: ReasoningFormat, position: Position, thoughts: str, rest: str
) -> None:
    counter = ReasoningCounter(form_of(reasoning, position, tool_format=HERMES), TOKENIZER.token_bytes)
    tokens = TOKENIZER.encode(thoughts)
    counter.add(0, tokens)
    counter.add(0, TOKENIZER.encode(rest))
    counter.add(1, [])
    assert counter.count == len(tokens)


def test_every_form_has_a_name() -> None:
    assert len({each.name for each in FORMATS}) == len(FORMATS)
