"""Bytes of single tokens."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from compress.common.cli import demo_model_path
from runtime.text.tokenizer import TokenByteTable, Tokenizer, byte_alphabet


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
