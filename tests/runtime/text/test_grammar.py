"""Constraints over the demo model's tokenizer: exact masks, honest refusals, no crash whatever the grammar."""

import json
import math
import random
import re
import subprocess
import sys
import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tiers import examples
from tokenizers import decoders, models

from compress.common.cli import demo_model_path
from compress.common.errors import RequestError
from runtime.core.request import Grammar, GrammarKind
from runtime.text import grammar as module
from runtime.text.grammar import CompiledGrammar, GrammarCompiler, TokenConstraint
from runtime.text.tokenizer import Tokenizer

PADDED_VOCAB = 8203  # more than the tokenizer's 8192, and no multiple of eight
END = 0
TOKENIZER = Tokenizer.open(demo_model_path())
COMPILER = GrammarCompiler(TOKENIZER, PADDED_VOCAB)

CITY = json.dumps({"type": "object", "properties": {"city": {"enum": ["Rome", "Zürich"]}}, "required": ["city"]})
JSON = Grammar(GrammarKind.JSON_OBJECT)


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


def schema(text: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def allowed(constraint: TokenConstraint) -> list[int]:
    mask = constraint.mask()
    assert len(mask) == (PADDED_VOCAB + 7) // 8
    return [token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1]


def walk(constraint: TokenConstraint, choose: random.Random, max_tokens: int = 300) -> list[int]:
    """Any allowed tokens, until an end token or the grammar's end."""
    tokens: list[int] = []
    while len(tokens) < max_tokens and not constraint.is_complete:
        tokens.append(choose.choice(allowed(constraint)))
        assert constraint.accept(tokens[-1:]) == 1
    return tokens


@pytest.mark.parametrize("pattern", [r"(cat|dog){1,3}", r"[0-9]{4}-[0-9][0-9]", r"[é☃x]{2,8}y?", r"a*b", r"x{0,3}"])
@given(seed=st.integers(0, 10**6))
@examples(30)
def test_whatever_is_allowed_matches_in_the_end(pattern: str, seed: int) -> None:
    tokens = walk(COMPILER.constraint(regex(pattern), {END}), random.Random(seed))
    if tokens[-1:] == [END] or len(tokens) < 300:
        assert re.fullmatch(pattern, TOKENIZER.decode(tokens))


@given(seed=st.integers(0, 10**6))
@examples(30)
def test_a_mask_is_exactly_what_is_accepted(seed: int) -> None:
    choose = random.Random(seed)
    constraint = COMPILER.constraint(schema(CITY), {END, 2})
    walk(constraint, choose, choose.randrange(12))
    inside = set(allowed(constraint))
    assert max(inside, default=0) < TOKENIZER.vocab_size
    tried = [*inside, *choose.sample(range(PADDED_VOCAB), 200), END, 2, PADDED_VOCAB, PADDED_VOCAB + 1, -1]
    for token in tried:
        assert constraint.accept([token]) == (token in inside)
        constraint.rollback(token in inside)
        assert set(allowed(constraint)) == inside


@given(seed=st.integers(0, 10**6), back=st.integers(0, 40))
@examples(40)
def test_rollback_undoes_tokens_also_end_tokens(seed: int, back: int) -> None:
    choose = random.Random(seed)
    constraint = COMPILER.constraint(JSON, {END})
    tokens = walk(constraint, choose, 40)
    back = min(back, len(tokens))
    constraint.rollback(back)
    again = COMPILER.constraint(JSON, {END})
    kept = tokens[: len(tokens) - back]
    assert again.accept(kept) == len(kept)
    assert again.mask() == constraint.mask()


def test_tokens_are_taken_up_to_the_first_that_is_not_allowed() -> None:
    constraint = COMPILER.constraint(regex("ab?"), {END})
    a, c = TOKENIZER.encode("a")[0], TOKENIZER.encode("c")[0]
    assert constraint.accept([a, END, a]) == 2
    assert constraint.is_complete
    assert allowed(constraint) == [END]
    constraint.rollback(2)
    assert constraint.accept([c]) == 0
    assert not constraint.is_complete


def test_a_model_without_end_tokens_is_complete_when_nothing_may_follow() -> None:
    constraint = COMPILER.constraint(regex("ab?"), ())
    constraint.accept(TOKENIZER.encode("a"))
    assert not constraint.is_complete
    constraint.accept(TOKENIZER.encode("b"))
    assert constraint.is_complete
    assert allowed(constraint) == []


def test_end_tokens_are_allowed_only_where_the_grammar_may_end() -> None:
    constraint = COMPILER.constraint(regex("ab"), {END, 2})
    assert not {END, 2} & set(allowed(constraint))
    constraint.accept(TOKENIZER.encode("ab"))
    assert allowed(constraint) == [END, 2]


def test_special_tokens_are_no_text() -> None:
    spelled = TOKENIZER.token_bytes(2).decode()
    constraint = COMPILER.constraint(regex(re.escape(spelled)), {END})
    assert constraint.accept([2]) == 0
    assert walk(constraint, random.Random(0)) != [2]
    named = COMPILER.constraint(lark(f'start: {spelled} "x"'), {END})
    assert allowed(named) == [2]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (regex("("), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (regex(""), "no text"),
        (regex("\ud800"), "surrogates"),
        (lark("start: a\na: missing"), "at 2(4): unknown name"),
        (lark("start: start"), "no text"),
        (lark(""), "no start rule"),
        (lark("start: /a/ <[99999]>"), "too large"),
        (schema('{"type": "array", "items": {"$dynamicRef": "#a"}}'), "dynamicRef"),
        (schema('{"x-guidance": {"lenient": true}, "$dynamicRef": "#a"}'), "dynamicRef"),
        (schema('{"type": "thing"}'), "Invalid type"),
        (schema('{"$ref": "https://example.com/schema"}'), "example.com"),
        (schema('{"$ref": "#"}'), "no text"),
        (schema('{"allOf": [{"type": "integer"}, {"type": "string"}]}'), "incompatible"),
        (schema("[]"), "JSON object"),
        (schema("{"), "line 1 column 2"),
        (schema("[" * 60_000), "recursion"),
        (schema(json.dumps({"enum": ["x" * 2**20]})), "1048590 characters"),
        (lark(f'start: "{"x" * 70_000}"'), "70009 characters"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(grammar: Grammar, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as refusal:
        COMPILER.compile(grammar)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500


LONG_SCHEMA = {
    "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(20_000)} | {"20000": {}},
    "$ref": "#/$defs/0",
}
LONG_RULES = "\n".join(f'a{i}:a{i + 1}|"z"' for i in range(4200)) + '\na4200:"x"\nstart: a0'
LONG_TERMINALS = "\n".join(f"A{i}:A{i + 1}" for i in range(5400)) + '\nA5400:"x"\nstart: A0'


@pytest.mark.parametrize(
    "grammar",
    [
        schema(json.dumps(LONG_SCHEMA, separators=(",", ":"))),
        lark(LONG_RULES),
        lark(LONG_TERMINALS),
        regex("(a{1,1000}){1,1000}"),
        regex("(.*a){50}"),
        lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
        lark("\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "x"\nstart: A0'),
    ],
    ids=["references", "rules", "terminals", "repetitions", "backtracking", "brackets", "doubling"],
)
def test_hostile_grammars_end_soon_and_nothing_crashes(grammar: Grammar) -> None:
    begin = time.process_time()
    try:
        constraint = COMPILER.constraint(grammar, {END})
    except RequestError:
        pass
    else:
        constraint.accept([random.Random(0).choice(allowed(constraint))])
        constraint.mask()
    assert time.process_time() - begin < 5


def sentencepiece_tokenizer() -> Tokenizer:
    """Spaces are U+2581, bytes have tokens of their own, and decoding drops the first space."""
    characters = ["\u2581", "a", "b", "\u2581a", "\u2581ab", "é", "{", "}", '"', ":", "1"]
    vocab = {token: i for i, token in enumerate(["</s>", *characters, *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, {"eos_token": "</s>"})


SENTENCEPIECE = sentencepiece_tokenizer()
SENTENCEPIECE_COMPILER = GrammarCompiler(SENTENCEPIECE, SENTENCEPIECE.vocab_size)


@given(seed=st.integers(0, 10**6))
@examples(40)
def test_vocabularies_of_sentencepiece(seed: int) -> None:
    pattern = r"(a|ab|é)( (a|ab|é|☃)){1,4}"
    constraint = SENTENCEPIECE_COMPILER.constraint(regex(pattern), {END})
    choose, said = random.Random(seed), list[int]()
    while not constraint.is_complete and END not in said:
        mask = constraint.mask()
        said.append(choose.choice([i for i in range(SENTENCEPIECE.vocab_size) if mask[i // 8] >> i % 8 & 1]))
        assert constraint.accept(said[-1:]) == 1
    text = SENTENCEPIECE.detokenizer(SENTENCEPIECE.encode("ab"))
    assert re.fullmatch(pattern, "".join(map(text.push, said)) + text.flush())


def test_each_grammar_is_compiled_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Grammar] = []
    compile_grammar = module.compile_grammar

    def counting(grammar: Grammar, tokens: LLTokenizer) -> CompiledGrammar:
        compiled.append(grammar)
        return compile_grammar(grammar, tokens)

    monkeypatch.setattr(module, "compile_grammar", counting)
    compiler = GrammarCompiler(TOKENIZER, PADDED_VOCAB)
    for number in range(module.CACHE_SIZE + 5):
        for _ in range(3):
            compiler.constraint(regex(f"a{{{number + 1}}}"), {END})
    assert len(compiled) == module.CACHE_SIZE + 5
    compiler.compile(regex("a{1}"))  # the oldest is gone
    assert len(compiled) == module.CACHE_SIZE + 6


def test_a_grammar_that_somebody_holds_stays_compiled() -> None:
    compiler = GrammarCompiler(TOKENIZER, PADDED_VOCAB)
    held = compiler.compile(JSON)
    for number in range(module.CACHE_SIZE):
        compiler.compile(regex(f"a{{{number + 1}}}"))
    assert compiler.compile(JSON) is held


MANY_STATES = regex(r".*[a-m].{12}[a-z ]*")
"""Its lexer must know which of the last characters were between a and m."""


def follow_at_random(constraint: TokenConstraint, num_tokens: int) -> int:
    """Returns the number of tokens that could be taken."""
    choose = random.Random(0)
    for count in range(num_tokens):
        mask = constraint.mask()
        allowed = [i for i in range(TOKENIZER.vocab_size) if mask[i // 8] >> i % 8 & 1]
        if not allowed or not constraint.accept([choose.choice(allowed)]):
            return count
    return num_tokens


def test_a_grammar_whose_lexer_is_full_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STATES", 2000)
    compiler = GrammarCompiler(TOKENIZER, PADDED_VOCAB)
    taken = follow_at_random(compiler.constraint(MANY_STATES, {END}), 100)
    assert 0 < taken < 100
    assert follow_at_random(compiler.constraint(MANY_STATES, {END}), 100) == 0  # answers share states
    assert compiler.find(MANY_STATES) is None
    assert follow_at_random(compiler.constraint(MANY_STATES, {END}), 100) == taken


def test_a_full_lexer_is_kept_for_those_that_found_it() -> None:
    compiler = GrammarCompiler(TOKENIZER, PADDED_VOCAB)
    held = compiler.compile(JSON)
    before = held.size
    follow_at_random(compiler.constraint(JSON, {END}), 5)
    assert before < held.size < math.inf
    held.seconds = math.inf
    assert compiler.compile(JSON) is held
    assert compiler.find(JSON) is None
    assert compiler.compile(JSON) is not held


def test_memory_of_the_cache_is_bounded() -> None:
    compiler = GrammarCompiler(TOKENIZER, PADDED_VOCAB)
    for number in range(40):
        compiler.compile(regex(f"a{{{number + 1}}}")).seconds = math.inf
    sizes = [compiled.size for compiled in compiler._recent.values()]
    assert sum(sizes[:-1]) <= module.CACHE_BYTES < sum(sizes) + 2 * sizes[-1]


def test_a_grammar_that_compiles_for_too_long_is_refused_and_the_next_one_is_not() -> None:
    compiler = GrammarCompiler(TOKENIZER, PADDED_VOCAB, compile_seconds=0)
    with pytest.raises(RequestError, match="0 s"):
        compiler.compile(JSON)
    compiler._compile_seconds = 60
    assert compiler.compile(regex("a")) is compiler.find(regex("a"))


AMBIGUOUS = lark('start: a\na: a a | "x"')


def spell(number: int) -> str:
    return "\n".join(f'b{i}: "x" a | "x"' for i in range(number))


AMBIGUOUS_GRAMMARS = {
    "pairs": AMBIGUOUS,
    "triples": lark('start: a\na: a a a | a a | "x" | "xx"'),
    "empty": lark('start: a\na: a a | "x" | ""'),
    "alternatives": lark(f"start: a+\na: {' | '.join(f'b{i}' for i in range(200))}\n{spell(200)}"),
}


@pytest.mark.parametrize("num_answers", [1, pytest.param(64, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", AMBIGUOUS_GRAMMARS)
def test_ambiguous_grammars_are_given_up_within_a_second(name: str, num_answers: int) -> None:
    """A second of processor time, for all answers of a request together."""
    compiler, work, num_tokens = GrammarCompiler(TOKENIZER, PADDED_VOCAB), module.Work(), 0
    answers = [compiler.constraint(AMBIGUOUS_GRAMMARS[name], {END}, work) for _ in range(num_answers)]
    (token,) = TOKENIZER.encode("x")
    begin = time.process_time()
    while not all(answer.is_stuck for answer in answers):
        num_tokens += sum(answer.accept([token]) for answer in answers)
    assert time.process_time() - begin < 3  # on a busy machine; 0.6 s for work, the rest for other threads and steps
    assert work.seconds < 2  # 10,000 tokens may take another 0.8 s
    assert num_tokens < 10_000
    for answer in answers:
        assert (answer.accept([token]), answer.is_complete) == (0, False)


def test_objects_with_2000_optional_properties_are_followed() -> None:
    properties = {f"p{i}": {"type": "integer"} for i in range(2000)}
    wanted = {"type": "object", "properties": properties, "additionalProperties": False}
    constraint = COMPILER.constraint(schema(json.dumps(wanted, separators=(",", ":"))), {END})
    tokens = TOKENIZER.encode(json.dumps({f"p{i}": i for i in range(0, 2000, 500)}))
    assert constraint.accept(tokens) == len(tokens)
    assert not constraint.is_stuck


@given(seed=st.integers(0, 10**6))
@examples(10)
def test_tokens_prepared_in_threads_are_those_followed_at_once(seed: int) -> None:
    choose = random.Random(seed)
    fast, slow = COMPILER.constraint(schema(CITY), {END}), COMPILER.constraint(schema(CITY), {END})
    while not fast.is_complete and fast.work.num_tokens < 25:
        inside = allowed(fast)
        token = choose.choice([*inside, *inside, choose.randrange(PADDED_VOCAB), END])
        slow._grammar.is_slow = True
        COMPILER.prepare(slow, token).result()
        slow._grammar.is_slow = False
        assert slow.accept([token]) == fast.accept([token]) == (token in inside)
        assert slow.mask() == fast.mask()
        assert slow.is_complete == fast.is_complete


def test_constraints_of_one_grammar_do_not_share_state() -> None:
    first, second = (COMPILER.constraint(regex("ab"), {END}) for _ in range(2))
    before = second.mask()
    first.accept(TOKENIZER.encode("ab"))
    assert second.mask() == before
    assert second.accept(TOKENIZER.encode("ab")) >= 1


def test_without_llguidance_grammars_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="pip install llguidance"):
        GrammarCompiler(TOKENIZER, PADDED_VOCAB).compile(JSON)
    code = "import sys; sys.modules['llguidance'] = None; import runtime.server.app, runtime.llm"
    subprocess.run([sys.executable, "-c", code], check=True)
