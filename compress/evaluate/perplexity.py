"""Perplexity of a model and its divergence from another, window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from calibration.sequences import encode_documents
from calibration.sources import TextSource
from compress.common.errors import DataError
from compress.common.evaluation import Evaluation
from compress.evaluate.positions import Positions, compare_positions, summarize
from compress.evaluate.scorers import Scorer


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of evaluation text.

    Attributes:
        tokens: int64 `[N, L]`; every token but the first of a window is predicted.
        protocol: one line from which the measurement can be repeated.
        vocabulary: number of tokens that the tokenizer has; None where that is unknown.
    """

    tokens: Tensor
    protocol: str
    source: str
    sha256: str
    vocabulary: int | None = None

    @property
    def num_predicted(self) -> int:
        return self.tokens.shape[0] * (self.tokens.shape[1] - 1)


def cut_windows(source: TextSource, tokenizer: Any, *, length: int, max_tokens: int | None = None) -> Windows:
    """Joins the documents with blank lines, tokenizes once, cuts windows of `length`; the incomplete rest is dropped.

    When the tokenizer puts a beginning-of-sequence token before a text, every window starts with one. Raises DataError:
    less than one window of text, or windows of fewer than two tokens. `max_tokens`: keep only the first windows, up to
    this many tokens (one window at least).
    """
    if length < 2:
        raise DataError(f"windows of {length} tokens predict nothing", "Use --max-seq-length 2 or more")
    if max_tokens is not None and max_tokens < 1:
        raise DataError(f"--tokens {max_tokens} leaves nothing to predict", "Use --tokens 16384, or leave it out")
    bos = _beginning(tokenizer)
    step = length - len(bos)
    ids = _joined_ids(source, tokenizer)
    count = len(ids) // step
    if count == 0:
        problem = f"{source.name} gives {len(ids)} tokens, fewer than one window of {length}"
        raise DataError(problem, f"Use --max-seq-length {max(2, len(ids) + len(bos))} or give more text with --data")
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
    return Windows(tokens, protocol, source.name, source.sha256, len(tokenizer))


def _beginning(tokenizer: Any) -> list[int]:
    """Returns the token that the tokenizer puts before every text by itself, if any."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [bos] if bos is not None and tokenizer("a")["input_ids"][0] == bos else []


def _joined_ids(source: TextSource, tokenizer: Any) -> list[int]:
    if all(isinstance(document, str) for document in source.documents):
        return encode_documents(["\n\n".join(source.documents)], tokenizer)[0]  # type: ignore[arg-type]
    return [token for ids in encode_documents(source.documents, tokenizer) for token in ids]


BATCH_LOGITS = 1 << 24
"""Logits of one model in memory at once, at most; those of one position at least."""


def evaluate(
    model: Scorer,
    windows: Windows,
    baseline: Scorer | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Scores every window with the model and, side by side, with the baseline. See `score_positions`."""
    (positions,) = score_positions([model], windows, baseline, on_progress)
    return summarize(positions, baseline is not None)


@torch.inference_mode()
def score_positions(
    models: Sequence[Scorer],
    windows: Windows,
    baseline: Scorer | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Positions]:
    """Scores every window with each model. All models are resident, and of the logits of each model a slice. Raises
    NumericsError: a model gave NaN or infinite logits; CheckpointError: a model and the baseline have different
    vocabularies.

    Args:
        baseline: reference model; None compares each model with itself.
        on_progress: called with (windows done, windows in all).
    """
    size = most_tokens(models if baseline is None else [*models, baseline])
    done, found = 0, []
    for batch in batches(windows.tokens, size):
        found.append(list(_score_batch(models, baseline, batch, slices(batch, size), windows.vocabulary)))
        done += len(batch)
        if on_progress:
            on_progress(done, len(windows.tokens))
    return [_joined(parts, 0) for parts in zip(*found, strict=True)]


def most_tokens(scorers: Sequence[Scorer]) -> int:
    """Returns the size of the largest vocabulary."""
    return max(scorer.vocab_size for scorer in scorers)


def batches(tokens: Tensor, vocabulary: int) -> list[Tensor]:
    """Splits windows `[N, T]` into those whose hidden states are in memory at once; the first one alone shows early how
    long they take."""
    size = max(1, BATCH_LOGITS // ((tokens.shape[1] - 1) * vocabulary))
    return [tokens[:1], *(tokens[1:].split(size) if len(tokens) > 1 else ())]


def slices(tokens: Tensor, vocabulary: int) -> list[slice]:
    """Splits the positions of windows `[B, T]`, but the last, into those whose logits are in memory at once: all
    logits of a long window over a large vocabulary would not fit."""
    size, length = max(1, BATCH_LOGITS // (len(tokens) * vocabulary)), tokens.shape[1] - 1
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]


def _score_batch(
    models: Sequence[Scorer], baseline: Scorer | None, tokens: Tensor, parts: Sequence[slice], known: int | None
) -> Iterator[Positions]:
    """Yields the positions of each model in one batch of windows `[B, T]`."""
    states, following = [model.states(tokens) for model in models], tokens[:, 1:]
    exact: Any = None if baseline is None else baseline.states(tokens)
    scored: list[list[Positions]] = [[] for _ in models]
    for part in parts:
        places = (slice(None), part)
        reference = None if baseline is None else baseline.predict(exact[places], "the baseline")
        for model, own, positions in zip(models, states, scored, strict=True):
            predicted = model.predict(own[places], "the model")
            positions.append(compare_positions(predicted, reference, following[places], known))
    return (_joined(each, 1) for each in scored)


def _joined(parts: Sequence[Positions], dim: int) -> Positions:
    return Positions(*(torch.cat(each, dim) for each in zip(*parts, strict=True)))
