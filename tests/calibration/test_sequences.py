"""Packing: no padding, the same for a seed, refusals with numbers."""

from typing import ClassVar

import pytest
import torch

from calibration.sequences import load_tokenizer, overlap, pack_sequences
from calibration.sources import TextSource
from compress.common.cli import demo_model_path
from compress.common.errors import DataError


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


class LettersWithSpecials:
    """A tokenizer with a beginning token and a chat template, as small as it gets."""

    bos_token_id = 1
    eos_token_id = 2
    chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    special_tokens_map: ClassVar[dict[str, str]] = {}

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": letters(text)}


def source_of(*documents) -> TextSource:
    return TextSource("test", documents, "test text")


def test_sequences_are_full_and_follow_the_text():
    packed = pack_sequences(source_of("abcdefghij" * 10), letters, samples=100, length=7)
    assert packed.tokens.shape == (14, 7)
    text = "abcdefghij" * 10
    assert all("".join(map(chr, row)) in text for row in packed.tokens.tolist())
    assert "14 of 100" in packed.warnings[0]


def test_each_document_stands_behind_one_separator():
    packed = pack_sequences(source_of("aaa", "bbb"), LettersWithSpecials(), samples=1, length=8)
    assert sorted(packed.tokens[0].tolist()) == sorted([1, *letters("aaa"), 1, *letters("bbb")])
    assert packed.tokens[0, 0] == 1
    assert "token 1 " in packed.description


def test_chats_go_through_the_template():
    chat = [{"role": "user", "content": "hi"}]
    packed = pack_sequences(source_of(chat), LettersWithSpecials(), samples=1, length=9)
    assert packed.tokens[0].tolist() == [1, *letters("<user>hi")]
    with pytest.raises(DataError, match=r"chats .*chat template"):
        pack_sequences(source_of(chat), letters, samples=1, length=4)


class BeginsChats(LettersWithSpecials):
    """Its template writes the beginning token itself, as many do."""

    chat_template = "^" + LettersWithSpecials.chat_template

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1 if letter == "^" else ord(letter) for letter in text]}


def test_a_beginning_token_of_the_template_is_not_doubled():
    chats = [[{"role": "user", "content": "hi"}]] * 2
    packed = pack_sequences(source_of(*chats), BeginsChats(), samples=1, length=18)
    assert packed.tokens[0].tolist() == 2 * [1, *letters("<user>hi")]


def test_what_a_template_refuses_is_one_line():
    class Refuses(LettersWithSpecials):
        chat_template = "{{ raise_exception('roles must alternate\nuser and assistant') }}"

    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(DataError, match="user, user: roles must alternate user and"):
        pack_sequences(source_of(chat), Refuses(), samples=1, length=4)


@pytest.mark.parametrize("expression", ["5|dictsort", "5|truncate(1.5)", "cycler()"])
def test_errors_of_any_type_in_a_template_are_one_line(expression: str):
    tokenizer = LettersWithSpecials()
    tokenizer.chat_template = f"{{{{ {expression} }}}}"
    with pytest.raises(DataError, match="user"):
        pack_sequences(source_of([{"role": "user", "content": "Hi"}]), tokenizer, samples=1, length=4)


def test_a_template_runs_in_a_sandbox():
    tokenizer = load_tokenizer(demo_model_path())
    tokenizer.chat_template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(DataError, match=r" user: .*__class__"):
        pack_sequences(source_of([{"role": "user", "content": "a"}]), tokenizer, samples=1, length=4)


def test_chats_go_through_a_real_template():
    tokenizer = load_tokenizer(demo_model_path())
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    packed = pack_sequences(source_of(*[chat] * 8), tokenizer, samples=1, length=64)
    text = tokenizer.decode(packed.tokens[0])
    assert tokenizer.apply_chat_template(chat, tokenize=False) in text


def test_seed_decides_order_and_nothing_else_does():
    source = source_of(*(f"{number:05d}" for number in range(500)))
    same = [pack_sequences(source, letters, samples=8, length=32, seed=3) for _ in range(2)]
    other = pack_sequences(source, letters, samples=8, length=32, seed=4)
    assert same[0].token_sha256 == same[1].token_sha256
    assert same[0].token_sha256 != other.token_sha256


def test_too_short_text_is_refused_with_the_numbers():
    with pytest.raises(DataError, match=r"\b3 .*\b16\b") as caught:
        pack_sequences(source_of("abc"), letters, samples=1, length=16)
    assert "--max-seq-length 3" in caught.value.remedy


def test_overlap_counts_shared_spans():
    first = torch.arange(100).view(1, -1)
    assert overlap(first, first) == 1.0
    assert overlap(first, first + 1000) == 0.0
    # 69 spans of 32 tokens; those that start at 50 or later are shared.
    assert overlap(first, torch.arange(50, 200).view(1, -1)) == pytest.approx(19 / 69)
