"""Vocabulary of a model, for grammars."""

from __future__ import annotations

from runtime.text.tokenizer import Tokenizer

SPECIAL_MARK = b"\xff"
"""First byte of special tokens, which keeps them from matching text. Not a valid byte of UTF-8."""


class TokenTable:
    """Vocabulary with the interface that llguidance expects: these attributes, and a call that tokenizes."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        special = set(tokenizer.special_ids.values())
        known = min(vocab_size, tokenizer.vocab_size)
        spelled = [(SPECIAL_MARK if i in special else b"") + tokenizer.token_bytes(i) for i in range(known)]
        self.tokens = [*spelled, *[b""] * (vocab_size - known), SPECIAL_MARK + b"<end of the grammar>"]
        self.special_token_ids = [*(i for i in sorted(special) if i < known), vocab_size]
        self.eos_token_id = vocab_size
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)
