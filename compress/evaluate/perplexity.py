"""Perplexity of a model and its divergence from another, window by window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calibration.sequences import encode_documents
from calibration.sources import TextSource
from compress.common.errors import CheckpointError, DataError, NumericsError
from compress.evaluate.scorers import Scorer


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of evaluation text.

    Attributes:
        tokens: int64 `[N, L]`; every token but the first of a window is predicted.
        protocol: one line from which the measurement can be repeated.
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
        DataError: less than one window of text, or windows of fewer than two tokens.
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
    return Windows(tokens, protocol, source.name, source.sha256)


def _beginning(tokenizer: Any) -> list[int]:
    """Returns the token that the tokenizer puts before every text by itself, if any."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [bos] if bos is not None and tokenizer("a")["input_ids"][0] == bos else []


def _joined_ids(source: TextSource, tokenizer: Any) -> list[int]:
    if all(isinstance(document, str) for document in source.documents):
        return encode_documents(["\n\n".join(source.documents)], tokenizer)[0]  # type: ignore[arg-type]
    return [token for ids in encode_documents(source.documents, tokenizer) for token in ids]


BATCH_LOGITS = 1 << 24


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of one pass over the windows.

    Attributes:
        perplexity: exp of the mean negative log-likelihood (natural log) of the predicted tokens.
        tokens: number of predicted tokens.
        baseline_perplexity: the same of the baseline, if there is one.
        kl_mean, kl_p999: mean and 99.9 % quantile over positions of KL(baseline || model), in nats.
        kl_standard_error: standard error of `kl_mean` over windows; None for a single window.
        top1_agreement: share of positions where both rank the same token first.
    """

    perplexity: float
    tokens: int
    baseline_perplexity: float | None = None
    kl_mean: float | None = None
    kl_p999: float | None = None
    kl_standard_error: float | None = None
    top1_agreement: float | None = None

    @classmethod
    def of(cls, positions: Positions, compared: bool) -> Evaluation:
        """Sums up positions; `compared` says whether there was a baseline."""
        perplexity, tokens = _perplexity(positions.losses), positions.losses.numel()
        if not compared:
            return cls(perplexity, tokens)
        return cls(
            perplexity,
            tokens,
            baseline_perplexity=_perplexity(positions.baseline_losses),
            kl_mean=positions.divergence.mean().item(),
            kl_p999=_quantile(positions.divergence.flatten(), 0.999),
            kl_standard_error=_standard_error(positions.divergence.mean(-1)),
            top1_agreement=positions.agreement.mean().item(),
        )

    def to_dict(self) -> dict[str, float | int | None]:
        return asdict(self)


class Positions(NamedTuple):
    """Figures of every predicted position of some windows, each `[N, T-1]` float64.

    Attributes:
        losses, baseline_losses: negative log-likelihood of the actual token, in nats.
        divergence: KL(baseline || model), in nats.
        agreement: 1 where both rank the same token first, else 0.
    """

    losses: Tensor
    baseline_losses: Tensor
    divergence: Tensor
    agreement: Tensor


def evaluate(
    model: Scorer,
    windows: Windows,
    baseline: Scorer | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Scores every window with the model and, side by side, with the baseline. See `score_positions`."""
    (positions,) = score_positions([model], windows, baseline, on_progress)
    return Evaluation.of(positions, baseline is not None)


@torch.inference_mode()
def score_positions(
    models: Sequence[Scorer],
    windows: Windows,
    baseline: Scorer | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Positions]:
    """Scores every window with each model. All models are resident, and the logits of one batch of windows of two.

    Args:
        baseline: reference model; None compares each model with itself.
        on_progress: called with (windows done, windows in all).

    Raises:
        NumericsError: a model gave NaN or infinite logits.
        CheckpointError: a model and the baseline have different vocabularies.
    """
    batches = list(_score_batches(models, windows.tokens, baseline, on_progress))
    return [Positions(*map(torch.cat, zip(*each, strict=True))) for each in zip(*batches, strict=True)]


def _score_batches(
    models: Sequence[Scorer], tokens: Tensor, baseline: Scorer | None, on_progress: Callable[[int, int], None] | None
) -> Iterator[list[Positions]]:
    done, size = 0, 1
    while done < len(tokens):
        batch = tokens[done : done + size]
        reference = None if baseline is None else log_probabilities(baseline.logits(batch)[:, :-1], "the baseline")
        scored, vocabulary = [], 0
        for model in models:
            logp = log_probabilities(model.logits(batch)[:, :-1], "the model")
            own = logp if reference is None else reference.to(logp.device)
            scored.append(compare_positions(logp, own, batch))
            vocabulary = logp.shape[-1]
        yield scored
        done += len(batch)
        if on_progress:
            on_progress(done, len(tokens))
        # The first window alone showed how many logits one has.
        size = _batch_size(batch.shape[1], vocabulary)


def _batch_size(length: int, vocabulary: int) -> int:
    """Returns as many windows as memory for their logits allows."""
    return max(1, BATCH_LOGITS // ((length - 1) * vocabulary))


def batches(tokens: Tensor, vocabulary: int) -> Iterator[Tensor]:
    """Yields the batches of windows `[N, T]` in which `score_positions` asks for logits."""
    yield tokens[:1]
    if len(tokens) > 1:
        yield from tokens[1:].split(_batch_size(tokens.shape[1], vocabulary))


def log_probabilities(logits: Tensor, who: str) -> Tensor:
    """Returns log-probabilities of logits `[B, T, V]`, in their dtype. Raises NumericsError for NaN and infinity."""
    if not torch.isfinite(logits).all():
        raise NumericsError(f"{who} gave NaN or infinite logits", "Run compress verify on the checkpoint")
    return torch.log_softmax(logits, dim=-1)


def compare_positions(logp: Tensor, reference: Tensor, tokens: Tensor) -> Positions:
    """Compares T positions by log-probabilities `[B, T, V]` of a model and of its baseline, and the tokens
    `[B, T + 1]`, whose first is not predicted. Raises CheckpointError when vocabularies differ."""
    if logp.shape != reference.shape:
        raise CheckpointError(
            f"the model has {logp.shape[-1]} tokens in its vocabulary and the baseline {reference.shape[-1]}",
            "Name the dense model it was made from with --baseline",
        )
    return Positions(
        losses=_losses(logp, tokens),
        baseline_losses=_losses(reference, tokens),
        divergence=(reference.exp() * (reference - logp)).sum(-1).double(),
        agreement=(reference.argmax(-1) == logp.argmax(-1)).double(),
    )


def _losses(logp: Tensor, tokens: Tensor) -> Tensor:
    target = tokens[:, 1:].to(logp.device)
    return -logp.gather(-1, target.unsqueeze(-1)).squeeze(-1).double()


def _perplexity(losses: Tensor) -> float:
    return losses.mean().exp().item()


def _quantile(values: Tensor, share: float) -> float:
    """Returns the smallest value not below `share` of all values. torch.quantile takes at most 16M values."""
    rank = max(1, math.ceil(share * values.numel()))
    return values.kthvalue(rank).values.item()


def _standard_error(per_window: Tensor) -> float | None:
    return (per_window.std() / math.sqrt(len(per_window))).item() if len(per_window) > 1 else None
