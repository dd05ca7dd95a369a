"""Rules by which byte-level BPE cuts text into words: names in GGUF files, and their entries of tokenizer.json."""

from __future__ import annotations

from typing import Any

from compress.common.errors import CheckpointError
from compress.common.registry import Registry

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    """Composes the pattern of GPT-4: letters with one other character in front, and numbers of at most `digits`."""
    signs = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    return rf"{_CONTRACTIONS}|{_BEFORE_WORD}\p{{L}}+|{digits}{signs}{_LINES_AND_SPACES}"


def _cased_words(digits: str, contractions: str) -> str:
    """Composes the pattern of GPT-4o, which also cuts where a capital follows small letters."""
    words = rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{contractions}|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_LINES_AND_SPACES}"


def byte_level(use_regex: bool) -> dict[str, Any]:
    """Returns the step that spells bytes as characters, and cuts as GPT-2 does where asked to."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _cut(pattern: str) -> dict[str, Any]:
    """Returns the steps that cut text by a regular expression and spell its bytes."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level(False)]}


DIGITS = {"type": "Digits", "individual_digits": True}
PRE_TOKENIZERS: Registry[dict[str, Any]] = Registry("tokenizer.ggml.pre", error=CheckpointError)
"""Entries of tokenizer.json; names of the same rules are aliases."""
PRE_TOKENIZERS.register("gpt-2", aliases=["gpt2"])(byte_level(True))
PRE_TOKENIZERS.register("smollm", aliases=["starcoder", "refact"])(
    {"type": "Sequence", "pretokenizers": [DIGITS, byte_level(True)]}
)
PRE_TOKENIZERS.register("llama-bpe", aliases=["llama3", "llama-v3"])(_cut(_words(r"\p{N}{1,3}")))
PRE_TOKENIZERS.register("qwen2")(_cut(_words(r"\p{N}")))
PRE_TOKENIZERS.register("tekken")(_cut(_cased_words(r"\p{N}", "")))
PRE_TOKENIZERS.register("gpt-4o")(_cut(_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")))
