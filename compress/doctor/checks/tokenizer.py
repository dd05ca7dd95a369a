"""Tokenizer: round trip of texts, its ids against the embedding, and end-of-sequence ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from compress.common.errors import ToolkitError
from compress.common.tokenizer_file import TOKENIZER_FILE
from compress.doctor.base import CHECKS, Check
from compress.doctor.findings import Finding
from compress.doctor.view import GENERATION_FILE, brief, eos_ids
from runtime.text.tokenizer import Tokenizer

SAMPLES = (
    "The quick brown fox jumps over the lazy dog, twice.",
    "def add(a, b):\n    return a + b  # 12345.678\n",
    "Zürich, São Paulo, Łódź; 東京と北京; Москва",
    "tabs\tand  spaces, {braces} and <tags/>",
)
"""Texts that a round trip through a tokenizer of a language model should preserve."""
COPY = "Copy tokenizer.json and tokenizer_config.json of the source model into the folder"
ID_KEYS = ("bos_token_id", "pad_token_id")


@CHECKS.register()
class TokenizerCheck(Check):
    """Encodes and decodes text, and compares ids with the embedding, config.json and generation_config.json."""

    name: ClassVar[str] = "tokenizer"

    def start(self) -> Iterator[Finding]:
        if self.view.packed is None and not self.view.raw_config:
            return
        tokenizer = self.view.tokenizer
        if tokenizer is None:
            yield self._refused(self.view.tokenizer_refusal)
        else:
            yield from self._round_trips(tokenizer)
            yield from self._vocabulary(tokenizer)
            yield from self._special_tokens(tokenizer)
        yield from self._ids(tokenizer)

    def _refused(self, refusal: ToolkitError | None) -> Finding:
        if refusal and (self.view.path / TOKENIZER_FILE).exists():
            return self.error("unreadable", TOKENIZER_FILE, refusal.problem, refusal.remedy)
        return self.warning("no-tokenizer", TOKENIZER_FILE, refusal.problem if refusal else "missing", COPY)

    def facts(self) -> dict[str, str]:
        tokenizer = self.view.tokenizer
        return {"tokenizer": f"{tokenizer.vocab_size:,} tokens"} if tokenizer else {}

    def _round_trips(self, tokenizer: Tokenizer) -> Iterator[Finding]:
        for text in SAMPLES:
            ids = tokenizer.encode(text, add_special_tokens=False)
            back = tokenizer.decode(ids, skip_special_tokens=False)
            if back.strip() != text.strip():
                problem = f"{brief(text)} is decoded as {brief(back)} ({len(ids)} tokens)"
                yield self.warning("round-trip", "tokenizer.json", problem, COPY)

    def _vocabulary(self, tokenizer: Tokenizer) -> Iterator[Finding]:
        rows = self.view.embedding_rows
        if rows is not None and tokenizer.vocab_size > rows:
            problem = f"it has {tokenizer.vocab_size} tokens, but the embedding has {rows} rows"
            yield self.error("vocabulary-size", "tokenizer.json", problem, COPY)

    def _special_tokens(self, tokenizer: Tokenizer) -> Iterator[Finding]:
        for name, text in sorted(tokenizer.special_tokens.items()):
            if len(tokenizer.encode(text, add_special_tokens=False)) != 1:
                problem = f"{name} is {brief(text)}, which is not a single token of the vocabulary"
                yield self.warning("special-token", "tokenizer_config.json", problem, COPY)

    def _ids(self, tokenizer: Tokenizer | None) -> Iterator[Finding]:
        files = {GENERATION_FILE: self.view.generation_config, "config.json": self._config()}
        rows = self.view.embedding_rows or (tokenizer.vocab_size if tokenizer else None)
        for file, config in files.items():
            single = [config[key] for key in ID_KEYS if isinstance(config.get(key), int) and config[key] != -1]
            outside = [each for each in (*eos_ids(config), *single) if rows is not None and not 0 <= each < rows]
            if outside:
                problem = f"the token ids {outside} are outside of the vocabulary of {rows}"
                yield self.error("token-id", file, problem, f"Correct the ids in {file}")
        own = tokenizer.eos_token_id if tokenizer else None
        generated, configured = eos_ids(files[GENERATION_FILE]), eos_ids(files["config.json"])
        if not generated and not configured and own is None:
            problem = "no file names the token that ends an answer (eos_token_id, eos_token)"
            yield self.warning("no-eos", GENERATION_FILE, problem, f"Set eos_token_id in {GENERATION_FILE}")
        yield from self._agreement(generated, configured, own)

    def _agreement(self, generated: list[int], configured: list[int], own: int | None) -> Iterator[Finding]:
        """Compares end-of-sequence ids: generation_config.json takes precedence over config.json."""
        used = generated or configured
        others = {"config.json": configured, "the tokenizer": [] if own is None else [own]}
        for name, ids in others.items():
            if used and ids and not set(used) & set(ids):
                problem = f"generation ends at {used}, but {name} names {ids}"
                yield self.warning("eos-agreement", GENERATION_FILE, problem, f"Put all of them into {GENERATION_FILE}")

    def _config(self) -> dict[str, object]:
        packed = self.view.packed
        return packed.config if packed else self.view.raw_config
