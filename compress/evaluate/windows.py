"""Evaluation text cut by the standard protocol: joined, tokenized once, non-overlapping windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from calibration.sequences import encode_documents
from calibration.sources import TextSource
from compress.checkpoint.errors import DataError


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of evaluation text.

    Attributes:
        tokens: int64 `[N, L]`; every token but the first of a window is predicted.
        protocol: one line that lets somebody else repeat the measurement.
        source: name of the text source.
        sha256: hash of the text source.
    """

    tokens: Tensor
    protocol: str
    source: str
    sha256: str

    @property
    def num_predicted(self) -> int:
        return self.tokens.shape[0] * (self.tokens.shape[1] - 1)


def cut_windows(source: TextSource, tokenizer: Any, *, length: int, max_tokens: int | None = None) -> Windows:
    """Joins the documents with blank lines, tokenizes once, cuts windows of `length`; the incomplete rest is dropped.

    When the tokenizer puts a beginning-of-sequence token before a text, every window starts with one.

    Args:
        tokenizer: a transformers tokenizer.
        max_tokens: keep only the first windows, up to this many tokens (one window at least).

    Raises:
        DataError: not one whole window of text, or a window too short to predict anything.
    """
    if length < 2:
        raise DataError(f"windows of {length} tokens predict nothing", "Use --length 2 or more")
    if max_tokens is not None and max_tokens < 1:
        raise DataError(f"--tokens {max_tokens} leaves nothing to predict", "Use --tokens 16384, or leave it out")
    bos = _beginning(tokenizer)
    step = length - len(bos)
    ids = _joined_ids(source, tokenizer)
    count = len(ids) // step
    if count == 0:
        problem = f"{source.name} gives {len(ids)} tokens, fewer than one window of {length}"
        raise DataError(problem, f"Use --length {max(2, len(ids) + len(bos))} or give more text with --data")
    whole = count
    if max_tokens is not None:
        count = min(count, max(1, max_tokens // length))
    body = torch.tensor(ids[: count * step], dtype=torch.int64).view(count, step)
    tokens = torch.cat([torch.tensor(bos, dtype=torch.int64).expand(count, -1), body], dim=1).contiguous()
    policy = f"token {bos[0]} before each window" if bos else "no BOS"
    protocol = (
        f"{source.description}, joined by blank lines, the first {count} of {whole} non-overlapping windows of "
        f"{length} tokens, {policy}, mean over predicted tokens"
    )
    return Windows(tokens, protocol, source.name, source.sha256)


def _beginning(tokenizer: Any) -> list[int]:
    """The token that this tokenizer puts before every text by itself, if any."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [bos] if bos is not None and tokenizer("a")["input_ids"][0] == bos else []


def _joined_ids(source: TextSource, tokenizer: Any) -> list[int]:
    if all(isinstance(document, str) for document in source.documents):
        return encode_documents(["\n\n".join(source.documents)], tokenizer)[0]  # type: ignore[arg-type]
    return [token for ids in encode_documents(source.documents, tokenizer) for token in ids]
