"""Cutting evaluation text: every window is full, the order is the text's, BOS where the tokenizer wants it."""

import pytest

from calibration.sources import TextSource
from compress.common.errors import DataError
from compress.evaluate.perplexity import cut_windows

BOS = 1


class Letters:
    """One token per letter; `adds_bos` decides whether a text gets a beginning token by itself."""

    eos_token_id = 2
    chat_template = None

    def __init__(self, adds_bos: bool) -> None:
        self.bos_token_id = BOS
        self.adds_bos = adds_bos

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        beginning = [BOS] if self.adds_bos and add_special_tokens else []
        return {"input_ids": beginning + [ord(letter) for letter in text]}


def source_of(*documents: str) -> TextSource:
    return TextSource("test", documents, "test text")


def test_windows_are_the_joined_text_in_order():
    windows = cut_windows(source_of("abc", "defg"), Letters(adds_bos=False), length=4)
    assert ["".join(map(chr, row)) for row in windows.tokens.tolist()] == ["abc\n", "\ndef"]
    assert windows.num_predicted == 2 * 3
    assert "the first 2 of 2 non-overlapping windows of 4 tokens, no BOS" in windows.protocol


def test_every_window_begins_with_bos_where_the_tokenizer_adds_one():
    windows = cut_windows(source_of("abcdefgh"), Letters(adds_bos=True), length=4)
    assert windows.tokens.tolist() == [[BOS, *map(ord, "abc")], [BOS, *map(ord, "def")]]
    assert f"token {BOS} before each window" in windows.protocol


def test_max_tokens_keeps_the_first_windows():
    windows = cut_windows(source_of("abcdefghij"), Letters(adds_bos=False), length=2, max_tokens=5)
    assert ["".join(map(chr, row)) for row in windows.tokens.tolist()] == ["ab", "cd"]
    assert "the first 2 of 5" in windows.protocol
    assert len(cut_windows(source_of("abcdefghij"), Letters(adds_bos=False), length=4, max_tokens=1).tokens) == 1


@pytest.mark.parametrize("adds_bos", [False, True])
def test_too_short_a_text_is_refused_with_a_length_that_works(adds_bos: bool):
    tokenizer = Letters(adds_bos)
    with pytest.raises(DataError, match=r"5 tokens.*16") as caught:
        cut_windows(source_of("abcde"), tokenizer, length=16)
    advised = 6 if adds_bos else 5
    assert f"--max-seq-length {advised}" in caught.value.remedy
    assert len(cut_windows(source_of("abcde"), tokenizer, length=advised).tokens) == 1


def test_a_window_that_predicts_nothing_is_refused():
    with pytest.raises(DataError, match="predict nothing"):
        cut_windows(source_of("abc"), Letters(adds_bos=False), length=1)
    with pytest.raises(DataError, match="--tokens 0"):
        cut_windows(source_of("abc"), Letters(adds_bos=False), length=2, max_tokens=0)
