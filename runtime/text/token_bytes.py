"""The bytes behind one token. Decoding a token alone cannot tell them: half a character has no text."""

from __future__ import annotations

import re
from functools import cache

import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@cache
def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells bytes as characters: printable ones as themselves, the others as those from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenByteTable:
    """Bytes of tokens, for byte-level vocabularies and for those that spell spaces as U+2581 and bytes as `<0xAB>`."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._is_byte_level = "ByteLevel" in repr(backend.decoder)

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token; none for an id beyond the vocabulary."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id) or ""
        if self._is_byte_level:
            alphabet = byte_alphabet()
            return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in token)
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()
