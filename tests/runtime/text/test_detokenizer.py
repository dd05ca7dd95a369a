"""Text of tokens as they come: characters, stop strings, bytes."""

from functools import partial
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from tokenizers import decoders, models, pre_tokenizers

from compress.common.cli import demo_model_path
from runtime.engine.output_processor import StopMatcher
from runtime.text.tokenizer import Detokenizer, TokenByteTable, Tokenizer, byte_alphabet

MIXED = "naïve café: 你好, мир! 👩‍👩‍👧‍👦 e\u0301 \t x² 𝔘𝔫𝔦  — ‘end’\n\n    return '😀'"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(demo_model_path())


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Token id of each single byte of the byte-level vocabulary."""
    table = {}
    for token_id in range(tokenizer.vocab_size):
        token = tokenizer._backend.id_to_token(token_id)
        if token is not None and len(token) == 1:
            table[byte_of(token)] = token_id
    return table


def byte_of(character: str) -> int:
    """Inverse of the byte-level alphabet: printable bytes stand for themselves, the others from 256 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return ord(character) if ord(character) < 256 else others[ord(character) - 256]


def stream(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()


def test_pieces_joined_are_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(MIXED)
    assert stream(tokenizer.detokenizer(), ids) == MIXED


def test_no_piece_ends_within_a_character(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    for token_id in tokenizer.encode(MIXED):
        assert "\ufffd" not in detokenizer.push(token_id)


def test_a_prompt_may_end_at_every_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(MIXED)
    for cut in range(len(ids) + 1):
        before = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
        assert stream(tokenizer.detokenizer(ids[:cut]), ids[cut:]) == MIXED[len(before) :]


def test_a_prompt_may_end_at_every_byte(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    ids = [byte_ids[byte] for byte in MIXED.encode()]
    for cut in range(len(ids) + 1):
        before = MIXED.encode()[:cut].decode(errors="ignore")
        assert stream(tokenizer.detokenizer(ids[:cut]), ids[cut:]) == MIXED[len(before) :]


@examples(200)
@given(data=st.binary(max_size=24))
def test_bytes_that_are_no_text_come_out_as_in_the_whole(
    tokenizer: Tokenizer, byte_ids: dict[int, int], data: bytes
) -> None:
    ids = [byte_ids[byte] for byte in data]
    assert stream(tokenizer.detokenizer(), ids) == tokenizer.decode(ids)


def test_broken_bytes_are_not_held_for_long(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    detokenizer = tokenizer.detokenizer()
    for _ in range(1000):
        detokenizer.push(byte_ids[0xE2])
    assert len(detokenizer._window) < 12


def test_special_tokens_have_no_text_and_cost_nothing(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    ids = [*tokenizer.encode("one"), *[1] * 500, *tokenizer.encode(" two")]
    assert stream(detokenizer, ids) == "one two"
    assert len(detokenizer._window) < 12


@examples(200)
@given(data=st.data(), skip=st.booleans())
def test_the_table_of_single_tokens_changes_no_piece(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    """Special tokens, whole characters and parts of them, after prompts that may end within one."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 300), max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    fast = tokenizer.detokenizer(ids[:cut], skip_special_tokens=skip)
    slow = Detokenizer(partial(tokenizer.decode, skip_special_tokens=skip), ids[:cut])
    for token_id in ids[cut:]:
        assert fast.push(token_id) == slow.push(token_id)
    assert fast.flush() == slow.flush()


@pytest.fixture(scope="module")
def metaspace() -> Tokenizer:
    """A small tokenizer of the sentencepiece kind: a space is part of the next token, unknown characters are bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁dog", "s", "▁the"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


def test_a_space_at_the_beginning_depends_on_the_prompt(metaspace: Tokenizer) -> None:
    the, dog, s = 261, 259, 260
    assert stream(metaspace.detokenizer(), [the, dog, s]) == "the dogs"
    assert stream(metaspace.detokenizer([the]), [dog, s]) == " dogs"
    assert stream(metaspace.detokenizer([the, dog]), [s]) == "s"


def test_fallback_bytes_wait_for_their_character(metaspace: Tokenizer) -> None:
    the, s = 261, 260
    text = "你😀é"
    ids = [the, *(byte + 1 for byte in text.encode()), s]
    detokenizer = metaspace.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert [piece for piece in pieces if piece] == ["the", "你", "😀", "é", "s"]


def feed(stop: list[str], pieces: list[str]) -> tuple[str, str]:
    matcher = StopMatcher(stop)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.matched


@pytest.mark.parametrize("first", range(1, 12))
@pytest.mark.parametrize("second", range(1, 12))
def test_a_stop_string_is_found_wherever_the_text_is_cut(first: int, second: int) -> None:
    text = "hello<stop>there"
    cuts = sorted({first, first + second})
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert feed(["<stop>"], pieces) == ("hello", "<stop>")


def test_nothing_of_a_stop_string_leaks_and_nothing_else_is_held() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("abc") == "abc"
    assert matcher.push("dE") == "d"
    assert matcher.push("N") == ""
    assert matcher.push("x") == "ENx"
    assert matcher.push("EN") == ""
    assert matcher.push("D and more") == ""
    assert matcher.matched
    assert matcher.push("later") == ""
    assert matcher.flush() == ""


def test_text_held_at_the_end_comes_out() -> None:
    assert feed(["\n\n"], ["a", "\n"]) == ("a\n", "")


def test_the_stop_that_is_complete_first_wins_however_the_text_arrives() -> None:
    assert feed(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert feed(["abcd", "bc"], list("abcd")) == ("a", "bc")


def first_stop(text: str, stop: list[str]) -> tuple[str, str]:
    """The definition: read character by character until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            found = max(ending, key=len)
            return text[: end - len(found)], found
    return text, ""


@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 20)),
)
def test_it_equals_the_definition_for_every_cut(text: str, stop: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    assert feed(stop, pieces) == first_stop(text, stop)


def test_alphabet_is_that_of_byte_level_vocabularies() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


@pytest.mark.parametrize("text", ["Hello  world\n", "naïve café", "漢字と🙂🙃", "\x00\x7f\u00ad"])
def test_bytes_joined_are_the_text(text: str) -> None:
    tokenizer = Tokenizer.open(demo_model_path())
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()


def test_special_tokens_are_spelled_out_and_unknown_ids_are_empty() -> None:
    tokenizer = Tokenizer.open(demo_model_path())
    assert tokenizer.token_bytes(tokenizer.eos_token_id) == tokenizer.special_tokens["eos_token"].encode()
    assert tokenizer.token_bytes(10**6) == b""


def test_sentencepiece_spelling() -> None:
    vocab = {"<unk>": 0, "\u2581The": 1, "<0xE2>": 2, "é": 3}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    table = TokenByteTable(backend)
    assert [table[i] for i in (1, 2, 3)] == [b" The", b"\xe2", "é".encode()]
