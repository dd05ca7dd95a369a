"""Tokenizers from the data of GGUF files: token ids are those of the tokenizer that the data were taken from."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from compress.checkpoint.gguf.pretokenizers import PRE_TOKENIZERS
from compress.checkpoint.gguf.tokenizer import SPACE, tokenizer_files
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError
from runtime.text.tokenizer import Tokenizer as ServedTokenizer

TEXTS = (
    "Hello world, it's 12345 o'clock.",
    "  two  spaces\n\n\tand a tab ",
    "größer 漢字 🙂 e\u0301",
    "a<|im_start|>user\nhi<|im_end|>",
    "",
)


def demo_metadata() -> dict[str, Any]:
    """Returns the tokenizer of the demo model as metadata."""
    stored = json.loads((demo_model_path() / "tokenizer.json").read_text())
    tokens = {token: text for text, token in stored["model"]["vocab"].items()}
    special = {each["id"]: each["content"] for each in stored["added_tokens"]}
    tokens |= special
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [tokens[token] for token in range(len(tokens))],
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in stored["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 3,
        "tokenizer.chat_template": (demo_model_path() / "chat_template.jinja").read_text(),
    }


def read(metadata: dict[str, Any], folder: Path) -> ServedTokenizer:
    folder.mkdir(exist_ok=True)
    for name, text in tokenizer_files(metadata, 10**6).items():
        (folder / name).write_text(text, encoding="utf-8")
    return ServedTokenizer.open(folder)


def test_byte_level_tokens_are_those_of_the_source(tmp_path):
    ours, source = read(demo_metadata(), tmp_path / "t"), ServedTokenizer.open(demo_model_path())
    assert ours.count_differences(source) == 0
    for text in TEXTS:
        assert ours.encode(text) == source.encode(text)
        assert ours.decode(ours.encode(text)) == source.decode(source.encode(text))
    messages = [{"role": "user", "content": "hi"}]
    assert ours.encode_chat(messages, add_generation_prompt=True) == source.encode_chat(
        messages, add_generation_prompt=True
    )
    assert ours.special_ids == source.special_ids
    assert (ours.bos_token_id, ours.eos_token_id) == (None, 0)


def test_the_first_token_is_added_where_the_file_says_so(tmp_path):
    metadata = demo_metadata() | {"tokenizer.ggml.bos_token_id": 1}
    plain = read(metadata, tmp_path / "a").encode("hi")
    with_both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert read(metadata | with_both, tmp_path / "b").encode("hi") == [1, *plain, 0]
    assert read(metadata | {"tokenizer.ggml.pre": "llama-bpe"}, tmp_path / "c").encode("hi") == [1, *plain]


def test_ends_of_answers_are_named_and_known_tokens(tmp_path):
    files = tokenizer_files(demo_metadata() | {"tokenizer.ggml.eot_token_id": 7}, 10**6)
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [0, 2, 7]


def trained() -> tuple[Tokenizer, dict[str, Any]]:
    """Trains a tokenizer of the kind of Llama 2, and returns it with its data as GGUF files have them."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>", *bytes_]
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    text = (Path(tokenizers.__file__).parent / "__init__.py").read_text()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False, max_token_length=9)
    tokenizer.train_from_iterator([line for line in text.splitlines() for _ in range(2)], trainer)
    stored = json.loads(tokenizer.to_str())
    stored["added_tokens"] = [each for each in stored["added_tokens"] if each["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(stored))
    vocab = stored["model"]["vocab"]
    ranks = {"".join(merge): rank for rank, merge in reversed([*enumerate(stored["model"]["merges"])])}
    tokens = sorted(vocab, key=vocab.__getitem__)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.scores": [float(-ranks.get(token, 1e6)) for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return tokenizer, metadata


def test_sentencepiece_tokens_are_those_of_the_source(tmp_path):
    source, metadata = trained()
    ours = read(metadata, tmp_path / "t")
    for text in (*TEXTS, "def from_file(path): return Tokenizer.from_str(path)"):
        expected = source.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == expected
        assert ours.encode(text) == [1, *expected]
        assert ours.decode(expected) == source.decode(expected)


def test_sentencepiece_without_a_space_in_front(tmp_path):
    _, metadata = trained()
    ours = read(metadata | {"tokenizer.ggml.add_space_prefix": False}, tmp_path / "t")
    assert ours.decode(ours.encode(" from")) == " from"
    assert ours.encode("from") != ours.encode(" from")


def test_sentencepiece_needs_scores(tmp_path):
    _, metadata = trained()
    with pytest.raises(CheckpointError, match="scores has 1 entries"):
        tokenizer_files(metadata | {"tokenizer.ggml.scores": [1.0]}, 10**6)


def test_more_tokens_than_rows_are_refused():
    with pytest.raises(CheckpointError, match="8192 tokens for 99 rows"):
        tokenizer_files(demo_metadata(), 99)


def test_user_defined_tokens_are_found_before_text_is_cut(tmp_path):
    metadata = demo_metadata()
    types = [*metadata["tokenizer.ggml.token_type"]]
    types[500] = 4
    ours = read(metadata | {"tokenizer.ggml.token_type": types}, tmp_path / "t")
    text = metadata["tokenizer.ggml.tokens"][500]
    assert 500 in ours.encode(f"xq{text}xq")
    assert text not in ours.special_ids


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_rule_can_be_built_and_keeps_all_text(name):
    stored = json.loads(Tokenizer(models.BPE()).to_str()) | {"pre_tokenizer": PRE_TOKENIZERS[name]}
    cut = Tokenizer.from_str(json.dumps(stored)).pre_tokenizer.pre_tokenize_str("Hello WorldHello 12345's\n x")
    assert cut[0][1][0] == 0
    assert cut[-1][1][1] == len("Hello WorldHello 12345's\n x")
