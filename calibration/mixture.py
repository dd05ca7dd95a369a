"""Token sequences of one calibration text, or of several with weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calibration.parts import Part, share_out
from calibration.sequences import PackedPart, SequenceSet, few_tokens, pack_sequences
from calibration.sources import SELF, load_texts

Sampler = Callable[[int, int, int], Tensor]
"""Samples text from the model: number of sequences, length and seed to tokens `[N, L]`."""

SELF_DESCRIPTION = "text sampled from the source model itself at temperature 1"


def pack_parts(
    parts: Sequence[Part], tokenizer: Any, *, samples: int, length: int, seed: int = 0, sampler: Sampler | None = None
) -> SequenceSet:
    """Packs one text or a mixture into token sequences. Equal arguments give equal sequences in equal order.

    Weights count tokens: each part is packed alone into its share of the sequences; all are shuffled by the seed.

    Args:
        sampler: writes the text of a `self` part; without one, zeros of the same shape stand in for it, for a plan.

    Raises:
        DataError: a text that cannot be used, or that does not fill one sequence.
    """
    counts = share_out(parts, samples)
    packed = [
        _pack(part.source, tokenizer, count, length, seed, sampler) for part, count in zip(parts, counts, strict=True)
    ]
    mixed = packed[0] if len(packed) == 1 else _mix(parts, packed, seed)
    return replace(mixed, warnings=mixed.warnings + few_tokens(mixed.tokens))


def _pack(source: str, tokenizer: Any, samples: int, length: int, seed: int, sampler: Sampler | None) -> SequenceSet:
    if source != SELF:
        return pack_sequences(load_texts(source), tokenizer, samples=samples, length=length, seed=seed)
    description = f"{SELF_DESCRIPTION} with seed {seed}"
    if sampler is None:
        return SequenceSet(torch.zeros(samples, length, dtype=torch.int64), SELF, "", description)
    tokens = sampler(samples, length, seed)
    return SequenceSet(tokens, SELF, hashlib.sha256(tokens.numpy().tobytes()).hexdigest(), description)


def _mix(parts: Sequence[Part], packed: Sequence[SequenceSet], seed: int) -> SequenceSet:
    total = sum(part.weight for part in parts)
    records = tuple(
        PackedPart(part.source, each.sha256, part.weight / total, len(each.tokens))
        for part, each in zip(parts, packed, strict=True)
    )
    tokens = torch.cat([each.tokens for each in packed])
    order = np.random.default_rng(seed + 2).permutation(len(tokens))
    return SequenceSet(
        tokens[torch.from_numpy(order)].contiguous(),
        ",".join(f"{part.source}:{part.weight:g}" for part in parts),
        _joint_hash(records),
        "; ".join(f"{part.weight / total:.0%} {each.description}" for part, each in zip(parts, packed, strict=True)),
        tuple(warning for each in packed for warning in each.warnings),
        records,
    )


def _joint_hash(records: Sequence[PackedPart]) -> str:
    """Hashes the texts and weights of a mixture in their order; empty while a text does not exist yet."""
    if not all(record.sha256 for record in records):
        return ""
    facts = [[record.sha256, record.weight] for record in records]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
