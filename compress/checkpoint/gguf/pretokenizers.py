"""Rules by which byte-level BPE cuts text into words: the names in GGUF files beside the entries of tokenizer.json."""

from __future__ import annotations

from typing import Any

from compress.common.errors import CheckpointError

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


PATTERNS = {
    "llama-bpe": _words(r"\p{N}{1,3}"),
    "qwen2": _words(r"\p{N}"),
    "tekken": _cased_words(r"\p{N}", ""),
    "gpt-4o": _cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),
}
"""Regular expressions by name."""
SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "starcoder": "smollm", "refact": "smollm", "gpt2": "gpt-2"}
"""Names of the same rules."""


def byte_level(use_regex: bool) -> dict[str, Any]:
    """Returns the step that spells bytes as characters, and cuts as GPT-2 does where asked to."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


PRE_TOKENIZERS = {
    "gpt-2": byte_level(True),
    "smollm": _sequence({"type": "Digits", "individual_digits": True}, byte_level(True)),
    **{name: _sequence(_split(pattern), byte_level(False)) for name, pattern in PATTERNS.items()},
}
"""Entries of tokenizer.json by name."""


def find_pre_tokenizer(name: Any) -> tuple[str, dict[str, Any]]:
    """Returns the name of the rules, of several the first, and their entry.

    Raises:
        CheckpointError: rules that are not known.
    """
    known = SAME.get(name, name) if isinstance(name, str) else None
    if known not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {name!r}; known are {', '.join(PRE_TOKENIZERS)}",
            "Name the model's safetensors folder",
        )
    return known, PRE_TOKENIZERS[known]
