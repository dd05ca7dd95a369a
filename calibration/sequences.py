"""Documents to fixed-length token sequences, packed without padding."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calibration.sources import Messages, TextSource
from compress.checkpoint.errors import DataError

FEW_TOKENS = 8192
OVERLAP_WINDOW = 32


@dataclass(frozen=True, slots=True)
class SequenceSet:
    """Token sequences ready for a model.

    Attributes:
        tokens: int64 `[N, L]`, no padding anywhere.
        source: name of the text source.
        sha256: hash of the text source.
        description: origin, order and special-token policy in words.
        warnings: what a careful user should know (too little text, ...).
    """

    tokens: Tensor
    source: str
    sha256: str
    description: str
    warnings: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def token_sha256(self) -> str:
        """Hash of the token ids themselves: what a resumed run compares."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()


def encode_documents(documents: Sequence[str | Messages], tokenizer: Any) -> list[list[int]]:
    """Token ids of each document. Chats go through the tokenizer's template; plain text gets no special tokens.

    Args:
        tokenizer: a transformers tokenizer, or any callable from text to ids.
    """
    return [_encode(document, tokenizer) for document in documents]


def _encode(document: str | Messages, tokenizer: Any) -> list[int]:
    if isinstance(document, list):
        if not getattr(tokenizer, "chat_template", None):
            raise DataError("the text holds chats but the model has no chat template", "Give plain text instead")
        document = tokenizer.apply_chat_template(document, tokenize=False)
    if not hasattr(tokenizer, "bos_token_id"):
        return list(tokenizer(document))
    # verbose=False: documents longer than the context are meant to be cut into windows, not warned about.
    return tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]


def separator_token(tokenizer: Any) -> int | None:
    """The id between documents: beginning-of-sequence where the model has one, else end-of-sequence, else none."""
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(tokenizer, name, None) is not None:
            return getattr(tokenizer, name)
    return None


def pack_sequences(source: TextSource, tokenizer: Any, *, samples: int, length: int, seed: int = 0) -> SequenceSet:
    """Packs shuffled documents into `samples` sequences of `length` tokens, each document behind one separator token.

    Documents are shuffled by `seed`, joined, and cut into windows; a random subset of the windows is kept when there
    are more than needed, in an order that `seed` decides too.

    Raises:
        DataError: not even one whole window of text.
    """
    separator = separator_token(tokenizer)
    prefix = [] if separator is None else [separator]
    stream = _token_stream(source, tokenizer, prefix, seed, enough=4 * samples * length)
    windows = len(stream) // length
    if windows == 0:
        raise DataError(
            f"{source.name} gives {len(stream)} tokens, fewer than one sequence of {length}",
            f"Use --length {max(1, len(stream))} or give more text",
        )
    tokens = torch.tensor(stream[: windows * length], dtype=torch.int64).view(windows, length)
    keep = np.random.default_rng(seed + 1).permutation(windows)[:samples]
    tokens = tokens[torch.from_numpy(keep)].contiguous()
    return SequenceSet(tokens, source.name, source.sha256, _describe(source, prefix, seed), _warnings(tokens, samples))


def _token_stream(source: TextSource, tokenizer: Any, prefix: list[int], seed: int, enough: int) -> list[int]:
    """Documents in shuffled order, until there are tokens enough: a large dataset is not encoded to its end."""
    stream: list[int] = []
    for index in np.random.default_rng(seed).permutation(len(source.documents)):
        stream += prefix + _encode(source.documents[index], tokenizer)
        if len(stream) >= enough:
            break
    return stream


def _describe(source: TextSource, prefix: list[int], seed: int) -> str:
    policy = f"token {prefix[0]} before each document" if prefix else "no special tokens"
    return f"{source.description}; shuffled with seed {seed}, packed without padding, {policy}"


def _warnings(tokens: Tensor, samples: int) -> tuple[str, ...]:
    found = []
    if len(tokens) < samples:
        found.append(f"the text fills only {len(tokens)} of {samples} sequences; more text gives better statistics")
    if tokens.numel() < FEW_TOKENS:
        found.append(f"{tokens.numel()} calibration tokens are few; {FEW_TOKENS} or more are advised")
    return tuple(found)


def overlap(first: Tensor, second: Tensor, window: int = OVERLAP_WINDOW) -> float:
    """Fraction of the `window`-token spans of `first` (every span, any offset) that also occur in `second`.

    Args:
        first, second: int64 token ids `[N, L]` or `[L]`.
    """
    seen = {span for row in second.reshape(-1, second.shape[-1]) for span in _spans(row, window)}
    spans = [span for row in first.reshape(-1, first.shape[-1]) for span in _spans(row, window)]
    return sum(span in seen for span in spans) / len(spans) if spans else 0.0


def _spans(row: Tensor, window: int) -> list[bytes]:
    data = row.numpy().astype(np.int32)
    return [data[start : start + window].tobytes() for start in range(len(data) - window + 1)]
