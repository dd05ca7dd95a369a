"""From what users write to llguidance's grammars: sizes are bounded, and what cannot be followed is refused."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from compress.checkpoint.errors import RequestError
from runtime.sampling_params import Grammar, GrammarKind
from runtime.text.deep_stack import call_on_deep_stack
from runtime.text.token_constraint import TokenConstraint, is_empty

NAMES = {
    GrammarKind.JSON_OBJECT: "JSON grammar",
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.LARK: "Lark grammar",
}

MAX_CHARACTERS = 2**16
"""Of a grammar's text. What fits in there cannot be nested so deeply that compiling it overflows its stack."""

JSON_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,20})?", "lenient": False, "coerce_one_of": False}
"""Blanks within JSON are a space, or a new line and its indent: a model cannot go on with them for ever. Keywords that
llguidance does not know how to keep to are errors."""

NO_FORCING = '%llguidance {"no_forcing": true}'
"""Text that only one way leads through is not cut into tokens beforehand: the model chooses among all that fit."""

LIMITS = LLParserLimits(verbose_errors=False, max_grammar_size=30_000, max_items_in_row=10_000, step_max_items=200_000)
"""Bounds of the work: seconds to compile, some 50 ms per token. Objects may have 2,000 optional properties."""

EXCERPT = re.compile(r"\s*(\d+ \|.*|\^*|<non-verbose/>)\s*$")
"""Lines of an error that quote the grammar."""

POSITION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
"""The place of an error in the grammar as it was handed to llguidance, which is not the user's text."""


def compile_grammar(grammar: Grammar, tokens: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of the grammar, its first mask computed.

    Raises:
        RequestError: the grammar is invalid, uses what is not supported, is too large, or allows no text.
    """
    if len(grammar.text) > MAX_CHARACTERS:
        problem = f"the {NAMES[grammar.kind]} has {len(grammar.text)} characters"
        raise RequestError(problem, f"Shorten it to at most {MAX_CHARACTERS}")
    try:
        source = LLMatcher.grammar_from_lark(f"{_lark(grammar)}\n{NO_FORCING}")
    except (ValueError, RecursionError) as error:
        raise _refusal(grammar, str(error)) from error
    matcher = call_on_deep_stack(lambda: LLMatcher(tokens, source, log_level=0, limits=LIMITS))
    if matcher.is_error():
        raise _refusal(grammar, matcher.get_error())
    first = TokenConstraint(matcher, tokens.vocab_size - 1, ())
    if is_empty(first.mask()):
        raise _refusal(grammar, "it allows no text at all")
    return matcher


def _lark(grammar: Grammar) -> str:
    """The grammar in llguidance's form of Lark. Raises ValueError for what is no JSON object."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"][0]["lark_grammar"]
        case GrammarKind.LARK:
            return grammar.text
        case GrammarKind.JSON_OBJECT:
            return _json_rule({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(grammar.text)
            if not isinstance(schema, dict):
                raise ValueError("a schema must be a JSON object")
            return _json_rule(schema)


def _json_rule(schema: dict[str, Any]) -> str:
    # In place of options that the schema may carry, which could switch the strictness off.
    return f"start: %json {json.dumps(schema | {'x-guidance': JSON_OPTIONS})}"


def _refusal(grammar: Grammar, reason: str) -> RequestError:
    lines = [line.strip() for line in reason.splitlines() if not EXCERPT.match(line)]
    text = "; ".join(lines)
    short = (text if grammar.kind is GrammarKind.LARK else POSITION.sub("", text))[:300] or "it is not valid"
    return RequestError(f"the {NAMES[grammar.kind]} cannot be followed: {short}", "Change or simplify it")
