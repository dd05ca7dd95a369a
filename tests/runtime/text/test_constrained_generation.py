"""Answers of the demo model that keep to a grammar: always valid, and the same whatever else the engine does."""

import json
import re
import threading
from dataclasses import replace

import pytest
from covering import sample
from jsonschema import validate

from compress.common.cli import demo_model_path, draft_model_path
from compress.common.errors import RequestError
from runtime.core.config import RuntimeConfig
from runtime.core.request import FinishReason, Grammar, GrammarKind, SamplingParams
from runtime.llm import LLM, Completion
from runtime.text import grammar as grammars
from runtime.text.grammar import NAMES, TokenConstraint

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ß"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PAIRS = {
    "type": "array",
    "items": {"$ref": "#/$defs/pair"},
    "minItems": 1,
    "maxItems": 2,
    "$defs": {
        "pair": {
            "type": "object",
            "properties": {"x": {"type": "integer", "multipleOf": 5, "maximum": 99}, "y": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
WORDS = {
    "anyOf": [{"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{2}$"}, {"type": "null"}, {"const": {"k": [1, "é"]}}]
}
SCHEMAS = [PERSON, PAIRS, WORDS, {"type": "string", "format": "date"}]
PATTERN = r"(red|green|blue)( and (red|green|blue)){0,2}\."
EXPRESSION = 'start: sum\nsum: term ("+" term){0,3}\nterm: /[1-9][0-9]{0,2}/ | "(" sum ")"'
PROMPTS = ["Once upon a time", "The answer in short is", "def main():"]


def grammar(kind: GrammarKind, text: str = "") -> Grammar:
    return Grammar(kind, text)


SCHEMA_GRAMMARS = [grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in SCHEMAS]
REGEX = grammar(GrammarKind.REGEX, PATTERN)
LARK = grammar(GrammarKind.LARK, EXPRESSION)
PERSON_GRAMMAR = SCHEMA_GRAMMARS[0]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(demo_model_path(), RuntimeConfig(device="cpu", dtype="float32", num_blocks=512))


def answers(llm: LLM, wanted: Grammar, num_seeds: int, **options: object) -> list[Completion]:
    samplings = [
        SamplingParams(**{"max_tokens": 400, "seed": seed, "grammar": wanted, **options}) for seed in range(num_seeds)
    ]
    return llm.generate([PROMPTS[seed % 3] for seed in range(num_seeds)], samplings)


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_json_parses_and_validates(llm: LLM, index: int) -> None:
    for found in answers(llm, SCHEMA_GRAMMARS[index], 6):
        assert found.finish_reason is FinishReason.STOP, found
        validate(json.loads(found.text), SCHEMAS[index])


@pytest.mark.full
def test_greedy_and_truncated_sampling_keep_to_the_schema(llm: LLM) -> None:
    for options in ({"temperature": 0}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {"temperature": 5.0}):
        for found in answers(llm, PERSON_GRAMMAR, 2, **options):
            assert found.finish_reason is FinishReason.STOP
            validate(json.loads(found.text), PERSON)


def test_penalties_and_bias_cannot_break_the_form(llm: LLM) -> None:
    braces = tuple((token, -100.0) for token in llm.tokenizer.encode('{}":'))
    options = {"repetition_penalty": 2.0, "presence_penalty": 2.0, "logit_bias": braces}
    for found in answers(llm, PERSON_GRAMMAR, 6, **options):
        validate(json.loads(found.text), PERSON)


def test_any_object(llm: LLM) -> None:
    for found in answers(llm, grammar(GrammarKind.JSON_OBJECT), 8, max_tokens=100):
        if found.finish_reason is FinishReason.STOP:
            assert isinstance(json.loads(found.text), dict)
        else:
            assert found.finish_reason is FinishReason.LENGTH
            assert found.text.startswith("{")


def test_regular_expressions_match_the_whole_text(llm: LLM) -> None:
    for found in answers(llm, REGEX, 24):
        assert re.fullmatch(PATTERN, found.text)
        assert found.finish_reason is FinishReason.STOP


@pytest.mark.full
def test_lark_grammars(llm: LLM) -> None:
    for found in answers(llm, LARK, 24):
        assert re.fullmatch(r"[0-9+()]+", found.text)
        if found.finish_reason is FinishReason.STOP:
            assert eval(found.text) > 0


def test_the_end_token_is_not_needed(llm: LLM) -> None:
    for found in answers(llm, REGEX, 12, ignore_eos=True):
        assert re.fullmatch(PATTERN, found.text)
        assert found.finish_reason is FinishReason.STOP
        assert not llm.engine.runner.eos_token_ids & set(found.token_ids)


def test_an_answer_that_is_cut_says_so(llm: LLM) -> None:
    for found in answers(llm, PERSON_GRAMMAR, 6, max_tokens=3):
        assert found.finish_reason is FinishReason.LENGTH
        assert len(found.token_ids) == 3
    exact = answers(llm, grammar(GrammarKind.REGEX, "ab"), 1)[0]
    cut = answers(llm, grammar(GrammarKind.REGEX, "ab"), 1, max_tokens=len(exact.token_ids))[0]
    assert (cut.text, cut.finish_reason) == ("ab", FinishReason.STOP)


def test_stop_strings_still_end_the_text(llm: LLM) -> None:
    for found in answers(llm, REGEX, 12, stop=("e",)):
        assert "e" not in found.text
        assert found.finish_reason is FinishReason.STOP


@pytest.mark.full
def test_every_answer_of_one_prompt_has_a_state_of_its_own(llm: LLM) -> None:
    found = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=400, n=6, seed=1, grammar=PERSON_GRAMMAR))
    for answer in found:
        validate(json.loads(answer.text), PERSON)
    assert len({answer.text for answer in found}) > 1
    alone = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=400, seed=1, grammar=PERSON_GRAMMAR))
    assert alone[0].token_ids == found[0].token_ids


def test_log_probabilities_are_of_the_model_not_of_the_grammar(llm: LLM) -> None:
    found = answers(llm, REGEX, 1, logprobs=1)[0]
    assert len(found.logprobs) == len(found.token_ids)
    assert found.logprobs[0].logprob < found.logprobs[0].top[0][1]  # the model would have said something else


@pytest.mark.parametrize(
    "bad", [grammar(GrammarKind.REGEX, "("), grammar(GrammarKind.JSON_SCHEMA, '{"$dynamicRef": "#a"}')]
)
def test_a_bad_grammar_refuses_all_prompts_before_any_is_computed(llm: LLM, bad: Grammar) -> None:
    with pytest.raises(RequestError, match=NAMES[bad.kind]):
        llm.generate(PROMPTS[:2], [SamplingParams(), SamplingParams(grammar=bad)])
    assert not llm.engine.has_work


MIXED: list[Grammar | None] = [PERSON_GRAMMAR, REGEX, None, SCHEMA_GRAMMARS[1], LARK, grammar(GrammarKind.JSON_OBJECT)]
SAMPLINGS = [
    SamplingParams(max_tokens=40, temperature=0.4 * i, seed=7 + i, n=1 + i % 2, grammar=wanted)
    for i, wanted in enumerate(MIXED)
]
RULES = {"min_tokens": 12, "bad_words": ((11, 12), *((token,) for token in range(300, 400)))}
SAMPLINGS += [SamplingParams(max_tokens=30, seed=3, grammar=wanted, **RULES) for wanted in (None, PERSON_GRAMMAR)]
LONG_PROMPT = "A long time ago there lived a king who had three daughters. " * 3
EXACT = RuntimeConfig(device="cpu", dtype="float64", block_size=16, num_blocks=256)


def tokens(exact: LLM, *, together: bool = True) -> list[list[int]]:
    prompts = [LONG_PROMPT + PROMPTS[i % 3] for i in range(len(SAMPLINGS))]
    if together:
        return [found.token_ids for found in exact.generate(prompts, SAMPLINGS)]
    return [found.token_ids for i, p in enumerate(prompts) for found in exact.generate([p], SAMPLINGS[i])]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Each request alone, in one chunk, without a prefix cache."""
    return tokens(LLM(demo_model_path(), replace(EXACT, prefix_caching=False)), together=False)


@pytest.mark.parametrize(
    "changes",
    sample(
        [
            {},
            {"max_num_batched_tokens": 17},
            {"num_blocks": 9},
            {"prefix_caching": False, "num_blocks": 9},
            {"speculative_model": "ngram"},
            {"speculative_model": str(draft_model_path()), "num_blocks": 28},
        ],
        quick=2,
    ),
    ids=["together", "small chunks", "scarce blocks", "no prefix cache", "n-gram drafts", "a draft model"],
)
def test_the_same_tokens_whatever_the_engine_does(expected: list[list[int]], changes: dict[str, object]) -> None:
    exact = LLM(demo_model_path(), replace(EXACT, **changes))
    assert tokens(exact) == expected
    is_scarce = changes.get("num_blocks", 256) < 20
    assert (exact.engine.scheduler.stats.num_preemptions > 0) == is_scarce


NO_WORK = grammars.WorkLimit(seconds=-1.0, per_token=0.0)


@pytest.mark.full
def test_slow_grammars_change_no_tokens(expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "INLINE_WORK", NO_WORK)
    exact = LLM(demo_model_path(), replace(EXACT, num_blocks=9))
    assert tokens(exact) == expected


@pytest.mark.parametrize("aborted", [False, True])
def test_others_continue_while_a_slow_grammar_is_followed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, aborted: bool
) -> None:
    gate, prepare = threading.Event(), TokenConstraint.prepare

    def gated(self: TokenConstraint, token_id: int) -> None:
        assert gate.wait(60)
        prepare(self, token_id)

    monkeypatch.setattr(grammars, "INLINE_WORK", NO_WORK)
    monkeypatch.setattr(TokenConstraint, "prepare", gated)
    engine, prompt = llm.engine, llm.tokenizer.encode(PROMPTS[0])
    slow = engine.add_request(prompt, SamplingParams(max_tokens=400, grammar=grammar(GrammarKind.REGEX, "(ab|ac){3}")))
    free = engine.add_request(prompt, SamplingParams(max_tokens=5, ignore_eos=True))
    deltas = []
    while not any(delta.finish_reason for delta in deltas):
        deltas += engine.step()
    assert {delta.request_id for delta in deltas} == {free}
    if aborted:
        engine.abort(slow)
    gate.set()
    while engine.has_work or engine.output_processor.has_held:
        deltas += engine.step()
    rest = [delta for delta in deltas if delta.request_id == slow]
    if aborted:
        assert not rest
    else:
        assert re.fullmatch("(ab|ac){3}", "".join(delta.text for delta in rest))
        assert rest[-1].finish_reason is FinishReason.STOP
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
