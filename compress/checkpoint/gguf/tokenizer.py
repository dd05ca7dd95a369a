"""tokenizer.json and its companions from the tokenizer data of a GGUF file: byte-level BPE, and SentencePiece's BPE."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.checkpoint.gguf.architectures.base import FOLDER, damaged
from compress.checkpoint.gguf.pretokenizers import PRE_TOKENIZERS, byte_level
from compress.common.errors import CheckpointError

PREFIX = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""Types of tokens that are not plain text."""
SPACE = "\u2581"
NAMED = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""Names of tokens by those in metadata."""
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end an answer in every model that has them."""


@dataclass(frozen=True)
class Vocabulary:
    """The checked tokenizer data of a file.

    Attributes:
        metadata: of the file.
        tokens: texts by id.
        types: kind of each token.
    """

    metadata: Mapping[str, Any]
    tokens: Sequence[str]
    types: Sequence[int]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Checks what every kind of tokenizer needs.

        Raises:
            CheckpointError: tokens that are missing, no texts, of other numbers than their types, or there twice.
        """
        tokens = _list(metadata, "tokens", str)
        types = _list(metadata, "token_type", int) if f"{PREFIX}token_type" in metadata else [1] * len(tokens)
        if len(types) != len(tokens):
            raise damaged(f"{PREFIX}token_type has {len(types)} entries for {len(tokens)} tokens")
        if len(set(tokens)) != len(tokens):
            raise damaged(f"{PREFIX}tokens has {len(tokens) - len(set(tokens))} texts twice")
        return cls(metadata, tokens, types)

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(PREFIX + key, default)

    def named_id(self, name: str) -> int | None:
        """Returns the id of a named token. Raises CheckpointError for one outside of the vocabulary."""
        token = self.get(f"{name}_token_id")
        if token is None or token == 2**32 - 1:
            return None
        if type(token) is not int or not 0 <= token < len(self.tokens):
            raise damaged(f"{PREFIX}{name}_token_id is {token!r}, outside of {len(self.tokens)} tokens")
        return token

    @property
    def named_ids(self) -> dict[str, int]:
        """Ids of the named tokens that are there."""
        found = {name: self.named_id(key) for name, key in NAMED.items()}
        return {name: token for name, token in found.items() if token is not None}

    @property
    def ends(self) -> list[int]:
        """Ids of tokens that end an answer."""
        named = (self.named_id(name) for name in ("eos", "eot", "eom"))
        by_text = (
            token for token, text in enumerate(self.tokens) if text in TURN_ENDS and self.types[token] == CONTROL
        )
        return sorted({token for token in (*named, *by_text) if token is not None})

    def added_tokens(self) -> Iterator[dict[str, Any]]:
        """Yields the tokens that are found in a text before it is cut into words."""
        for token, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in (CONTROL, USER_DEFINED, UNKNOWN):
                # The form in which spaces are written is that of the normalized text.
                flags = {"normalized": kind == USER_DEFINED and SPACE in text, "special": kind != USER_DEFINED}
                yield {"id": token, "content": text, "single_word": False, "lstrip": False, "rstrip": False, **flags}


def tokenizer_files(metadata: Mapping[str, Any], num_rows: int) -> dict[str, str]:
    """Returns the texts of tokenizer.json, tokenizer_config.json, generation_config.json and the chat template.

    Args:
        num_rows: of the embedding.

    Raises:
        CheckpointError: a kind of tokenizer that is not read, or data that are missing or contradict each other.
    """
    vocabulary, kind = Vocabulary.of(metadata), metadata.get(f"{PREFIX}model")
    if len(vocabulary.tokens) > num_rows:
        raise damaged(f"{PREFIX}tokens has {len(vocabulary.tokens)} tokens for {num_rows} rows of the embedding")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"tokenizers of kind {kind!r} are not read, only gpt2 (byte-level BPE) and llama (SentencePiece's BPE)",
            FOLDER,
        )
    parts = _byte_level(vocabulary) if kind == "gpt2" else _sentencepiece(vocabulary)
    names = {f"{name}_token": vocabulary.tokens[token] for name, token in vocabulary.named_ids.items()}
    ids = {f"{name}_token_id": token for name, token in vocabulary.named_ids.items() if name != "unk"}
    files = {
        "tokenizer.json": json.dumps(parts, ensure_ascii=False),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}, indent=2),
        "generation_config.json": json.dumps({**ids, "eos_token_id": vocabulary.ends}, indent=2),
    }
    template = metadata.get("tokenizer.chat_template")
    return files | ({"chat_template.jinja": template} if isinstance(template, str) else {})


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    pre_tokenizer = PRE_TOKENIZERS.find(vocabulary.get("pre"), FOLDER)
    merges = [merge.split(" ") for merge in _list(vocabulary.metadata, "merges", str)]
    ids = {text: token for token, text in enumerate(vocabulary.tokens)}
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= ids.keys():
            raise damaged(f"{PREFIX}merges has {' '.join(merge)!r}, which are not two tokens that join to a third")
    is_llama = pre_tokenizer is PRE_TOKENIZERS["llama-bpe"]
    return {
        **_frame(vocabulary, adds_bos=is_llama),
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": byte_level(True) | {"add_prefix_space": True},
        "model": _bpe(ids, merges, ignore_merges=is_llama),
    }


def _sentencepiece(vocabulary: Vocabulary) -> dict[str, Any]:
    ids = {text: token for token, text in enumerate(vocabulary.tokens)}
    has_prefix = bool(vocabulary.get("add_space_prefix", True))
    to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    to_spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    prefix, strip = {"type": "Prepend", "prepend": SPACE}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders = [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *([strip] if has_prefix else [])]
    unknown = vocabulary.named_id("unknown")
    model = _bpe(ids, list(_merges(vocabulary, ids)), ignore_merges=False)
    model |= {"byte_fallback": True, "fuse_unk": True}
    model |= {"unk_token": None if unknown is None else vocabulary.tokens[unknown]}
    return {
        **_frame(vocabulary, adds_bos=True),
        "normalizer": {"type": "Sequence", "normalizers": [*([prefix] if has_prefix else []), to_marks]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yields all pairs that join to a token, those of the token with the highest score first."""
    scores = _list(vocabulary.metadata, "scores", float)
    if len(scores) != len(ids):
        raise damaged(f"{PREFIX}scores has {len(scores)} entries for {len(ids)} tokens")
    joined = [token for token, kind in enumerate(vocabulary.types) if kind not in (CONTROL, UNKNOWN, BYTE)]
    for token in sorted(joined, key=lambda token: (-scores[token], token)):
        text = vocabulary.tokens[token]
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        found = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        yield from sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _frame(vocabulary: Vocabulary, adds_bos: bool) -> dict[str, Any]:
    """Composes what both kinds have in common; `adds_bos` where the file does not say it."""
    ids = vocabulary.named_ids
    first = ids.get("bos") if vocabulary.get("add_bos_token", adds_bos) else None
    last = ids.get("eos") if vocabulary.get("add_eos_token", False) else None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(vocabulary.added_tokens()),
        "post_processor": _template(vocabulary, first, last),
    }


def _template(vocabulary: Vocabulary, first: int | None, last: int | None) -> dict[str, Any]:
    def around(sequence: str) -> list[dict[str, Any]]:
        texts = [None if token is None else vocabulary.tokens[token] for token in (first, last)]
        before, after = ([] if text is None else [{"SpecialToken": {"id": text, "type_id": 0}}] for text in texts)
        return [*before, {"Sequence": {"id": sequence, "type_id": 0}}, *after]

    named = {vocabulary.tokens[token]: token for token in (first, last) if token is not None}
    special = {text: {"id": text, "ids": [token], "tokens": [text]} for text, token in named.items()}
    pair = [*around("A"), *around("B")]
    return {"type": "TemplateProcessing", "single": around("A"), "pair": pair, "special_tokens": special}


def _bpe(ids: Mapping[str, int], merges: Sequence[Sequence[str]], ignore_merges: bool) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": ids,
        "merges": merges,
    }


def _list(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    values = metadata.get(PREFIX + key)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise damaged(f"{PREFIX}{key} is {'missing' if values is None else f'no list of {kind.__name__}'}")
    return values
