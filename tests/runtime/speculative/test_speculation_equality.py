"""In float64: whoever guesses, on many blocks or few, cached or not, every token is the one without guesses."""

from dataclasses import replace

import pytest
from covering import covering, sample
from engines import Tokens, answer_all, small_engine
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model

from compress.common.cli import demo_model_path
from compress.common.errors import ToolkitError
from runtime.backends.kv_pages import TokenPages
from runtime.core.config import RuntimeConfig
from runtime.core.request import Grammar, GrammarKind, SamplingParams
from runtime.engine.engine import Engine
from runtime.llm import LLM, Completion
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner
from runtime.speculative.draft_model import ModelDrafter
from runtime.speculative.proposer import Speculator

GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=30, temperature=0.8, seed=5, ignore_eos=True)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9])
REQUESTS = [
    *((prompt, replace(sampling, n=n)) for prompt in PROMPTS[:2] for sampling in (GREEDY, SEEDED) for n in (1, 3)),
    (PROMPTS[2], replace(SEEDED, top_p=0.9, top_k=40, presence_penalty=0.5, frequency_penalty=0.2, max_tokens=17)),
    (PROMPTS[2], replace(GREEDY, repetition_penalty=1.3, logprobs=2, max_tokens=23)),
    (PROMPTS[1], replace(SEEDED, min_p=0.05, logit_bias=((5, 3.0), (6, -100.0)), seed=8)),
    (PROMPTS[0], replace(SEEDED, typical_p=0.8, xtc_probability=0.5, dry_multiplier=0.8, dry_allowed_length=1, n=2)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=4)


@pytest.fixture(scope="module")
def target(folder):
    return load_model(folder, dtype="float64")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Another model over the same vocabulary."""
    path = save_tiny_model(tmp_path_factory.mktemp("models") / "stranger", "qwen2", num_hidden_layers=1, hidden_size=32)
    return load_model(path, dtype="float64")


def serve(target, speculate, folder="", stranger=None, **options) -> tuple[Tokens, Engine]:
    """`speculate` is what users write, or `stranger`, or `itself`: the target as its own draft model."""
    named = "" if speculate in ("stranger", "itself") else speculate
    sizes = {"num_blocks": 400, "prefill_chunk": 6} | options
    engine = small_engine(target, folder, speculative_model=named, **sizes)
    if speculate and not named:
        config = engine.config
        draft = build_runner(target if speculate == "itself" else stranger, replace(config, num_blocks=400))
        engine.speculator = Speculator(ModelDrafter(draft, config), config.num_speculative_tokens)
        engine.speculator.gate = None
    requests = ((str(number), *request) for number, request in enumerate(REQUESTS))
    return answer_all(engine, requests, gap=2), engine  # they arrive while others run


@pytest.fixture(scope="module")
def expected(target) -> Tokens:
    tokens, _ = serve(target, "")
    assert len(tokens) == sum(sampling.n for _, sampling in REQUESTS)
    return tokens


DRAFTERS = ["ngram", "ngram-tree", "stranger", "itself", "self:2bit", "self:skip"]


@pytest.mark.parametrize(("speculate", "num_blocks", "prefix_caching"), covering(DRAFTERS, [400, 26], [True, False]))
def test_tokens_are_those_without_guesses(
    speculate, num_blocks, prefix_caching, folder, target, stranger, expected
) -> None:
    options = {"num_blocks": num_blocks, "prefix_caching": prefix_caching}
    tokens, engine = serve(target, speculate, folder, stranger, **options)
    assert tokens == expected
    assert engine.metrics.spec_decode_num_draft_tokens_total > 0
    if num_blocks == 26:
        assert engine.scheduler.stats.num_preemptions > 0
    if speculate == "itself":
        accepted = engine.metrics.spec_decode_num_accepted_tokens_total
        assert accepted > 0.95 * engine.metrics.spec_decode_num_draft_tokens_total, "same model, same noise"


def test_branches_behind_the_first_are_kept_where_the_next_step_looks(folder, target, expected, monkeypatch) -> None:
    moves, move = [], TokenPages.move

    def note_and_move(pages, sources, targets):
        moves.append(len(sources))
        move(pages, sources, targets)

    monkeypatch.setattr(TokenPages, "move", note_and_move)
    tokens, _ = serve(target, "ngram-tree", folder, num_speculative_tokens=8)
    assert tokens == expected
    assert sum(moves) > len(moves) > 0, "several tokens at once, too"


@pytest.mark.parametrize("family", sample(["mistral", "qwen3"]))
def test_windows_and_other_families(family, tmp_path) -> None:
    options = {"sliding_window": 10} if family == "mistral" else {}
    folder = save_tiny_model(tmp_path / "model", family, num_hidden_layers=3, **options)
    decoder = load_model(folder, dtype="float64")
    wanted, _ = serve(decoder, "")
    for speculate in ("ngram", "ngram-tree", "self:skip=1", "itself"):
        tokens, engine = serve(decoder, speculate, folder, num_blocks=30)
        assert tokens == wanted
    metrics = engine.metrics
    assert metrics.spec_decode_num_accepted_tokens_total > 0.95 * metrics.spec_decode_num_draft_tokens_total


def test_rejection_leaves_greedy_tokens_alone(folder, target, stranger, expected) -> None:
    greedy = [number for number, (_, sampling) in enumerate(REQUESTS) if sampling.temperature == 0]
    for speculate in ("ngram", "self:2bit"):
        tokens, engine = serve(target, speculate, folder, stranger, spec_verify="rejection")
        assert engine.metrics.spec_decode_num_accepted_tokens_total > 0
        for (name, index), answer in tokens.items():
            assert int(name) not in greedy or answer == expected[name, index]


TEXTS = (
    "The history of the city begins with a small settlement on the river, which the Romans",
    "one two three four one two three four one two",
    "def add(a, b):\n    return a + b\n\n\ndef",
)


def load(speculative_model: str, **options: object) -> LLM:
    defaults = {"dtype": "float64", "num_blocks": 128, "max_model_len": 256, "speculative_model": speculative_model}
    return LLM(demo_model_path(), RuntimeConfig(**(defaults | options)))


def answers(llm: LLM) -> list[Completion]:
    """Ends of every kind, in the middle of what may be accepted guesses."""
    (plain,) = llm.generate([TEXTS[1]], GREEDY)
    word, token = plain.text[20:26], plain.token_ids[11]
    cases = [
        replace(GREEDY, stop=(word,)),
        replace(GREEDY, stop_token_ids=(token,)),
        *(replace(GREEDY, max_tokens=count) for count in (1, 2, 3, 6)),
        replace(SEEDED, logprobs=1, n=2),
        replace(SEEDED, ignore_eos=False, max_tokens=60),
        replace(SEEDED, grammar=Grammar(GrammarKind.REGEX, "( [a-z]{2,9}){4,8}[.]"), ignore_eos=False, max_tokens=60),
        replace(GREEDY, grammar=Grammar(GrammarKind.JSON_OBJECT), ignore_eos=False),
    ]
    return [plain, *llm.generate([text for text in TEXTS for _ in cases], cases * len(TEXTS))]


@pytest.fixture(scope="module")
def plain_answers() -> list[Completion]:
    found = answers(load(""))
    assert {completion.finish_reason for completion in found} == {"stop", "length"}
    assert not any(completion.error for completion in found)
    return found


@pytest.mark.parametrize(
    ("speculate", "num_blocks"),
    [
        ("ngram", 34),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [("ngram-tree", 34), ("demo", 128), ("demo", 34), ("self:2bit", 34), ("self:skip=1", 128)]
        ),
    ],
)
def test_texts_ends_and_grammars_of_the_demo_model(speculate, num_blocks, plain_answers) -> None:
    llm = load(speculate, num_blocks=num_blocks, num_speculative_tokens=5)
    for found, wanted in zip(answers(llm), plain_answers, strict=True):
        for name in ("token_ids", "text", "finish_reason"):
            assert getattr(found, name) == getattr(wanted, name)
        mine, theirs = ([entry.logprob for entry in each.logprobs] for each in (found, wanted))
        assert mine == pytest.approx(theirs, abs=1e-10)
    assert llm.engine.metrics.spec_decode_num_accepted_tokens_total > 0


def test_text_that_repeats_itself_is_guessed() -> None:
    llm = load("ngram")
    llm.engine.speculator.gate = None
    llm.generate(["one two three four " * 8], replace(GREEDY, max_tokens=64))
    metrics = llm.engine.metrics
    assert metrics.spec_decode_num_accepted_tokens_total > 0.5 * metrics.spec_decode_num_draft_tokens_total
    assert metrics.steps_total < 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_model": "magic"}, "--speculative-model"),
        ({"speculative_model": "self:skip=5"}, r"5.*6 layers.*from 1.*4"),
        ({"speculative_model": "self:skip=0"}, r"0.*6 layers"),
        ({"speculative_model": "ngram", "num_speculative_tokens": 17}, r"17 draft.*between 1.*16"),
        ({"speculative_model": "ngram", "spec_verify": "guess"}, "--spec-verify"),
        ({"speculative_model": "", "spec_verify": "rejection"}, "--speculative-model"),
        ({"speculative_model": "ngram-tree", "spec_verify": "rejection"}, "tree"),
        ({"speculative_model": "ngram-tree", "kv_cache": "int8", "kv_residual_length": 8}, "sinks"),
        ({"speculative_model": "ngram-tree", "attention_window": 4}, r"4 tokens.*4"),
    ],
)
def test_wishes_that_cannot_be_granted_are_refused(options, message) -> None:
    with pytest.raises(ToolkitError, match=message):
        load(**options)


def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path) -> None:
    folder = save_tiny_model(tmp_path / "small")
    with pytest.raises(ToolkitError, match=r"112 tokens.*8192"):
        load(str(folder))


def test_trees_do_not_cross_chunks_of_tokens(tmp_path):
    decoder = load_model(save_tiny_model(tmp_path, "llama4_text", **VARIANTS["llama4_text"]))
    with pytest.raises(ToolkitError, match="--speculative-model ngram"):
        small_engine(decoder, speculative_model="ngram-tree")
