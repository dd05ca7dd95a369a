#!/usr/bin/env python
"""Measures cascades of bundled models at several thresholds of confidence: what they cost, and how far answers are from
those of the large model alone.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python scripts/bench_router.py

Prompts are pieces of the bundled text. Engines run in this process, so processor time is that of the answers; a request
that changes models pays for the first tokens of the small one as well, as it does in the server.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from calibration.sources import load_texts
from compress.common.cli import bundled_path, demo_model_path, draft_model_path
from compress.evaluate.perplexity import Windows, score_positions
from compress.evaluate.positions import Positions
from compress.evaluate.scorers import RuntimeScorer, Scorer
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.llm import LLM, Completion
from runtime.routing.routes import Cascade, Confidence

if TYPE_CHECKING:
    from torch import Tensor

PAIRS = {
    "draft, demo": (draft_model_path(), demo_model_path()),
    "draft, mixture": (draft_model_path(), bundled_path("demo-mixture")),
}
PROMPT_TOKENS = 48
THRESHOLDS = (-math.inf, -2.75, -2.5, -2.25, -2.0, -1.75, -1.5, 0.0)


@dataclass(frozen=True)
class Answers:
    """Answers to all prompts, and the processor time of them in seconds."""

    completions: list[Completion]
    seconds: float


def generate(model: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> Answers:
    """Answers prompts greedily with log-probabilities, as a cascade asks."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=0, ignore_eos=True)
    start = time.process_time()
    return Answers(model.generate(prompts, sampling) if prompts else [], time.process_time() - start)


def is_kept(answer: Completion, cascade: Cascade) -> bool:
    """Returns whether the small model's confidence in its first tokens reaches the threshold."""
    confidence = Confidence(cascade, num_answers=1)
    confidence.note(0, [each.logprob for each in answer.logprobs], has_ended=True)
    return confidence.is_high


def compare(answers: Sequence[Completion], model: Scorer, baseline: Scorer) -> Positions:
    """Returns the figures of the tokens of answers, `[N, T]`."""
    tokens: Tensor = torch.tensor([[*answer.prompt_token_ids, *answer.token_ids] for answer in answers])
    (positions,) = score_positions([model], Windows(tokens, "greedy answers", "bundled", ""), baseline)
    return Positions(*(each[:, PROMPT_TOKENS - 1 :] for each in positions))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--first", type=int, default=8, help="first tokens that decide")
    given = parser.parse_args()
    print("| small, large | threshold | kept | tokens by the large | processor time | KL | perplexity |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, paths in PAIRS.items():
        measure_pair(name, *paths, given.prompts, given.tokens, given.first)


def measure_pair(name: str, small_path: Path, large_path: Path, num_prompts: int, num_tokens: int, first: int) -> None:
    """Prints the rows of two models."""
    config = RuntimeConfig(device="cpu", prefix_caching=False, kv_memory_bytes=128 * 2**20)
    small, large = LLM(small_path, config), LLM(large_path, config)
    scorers = RuntimeScorer(small_path, device="cpu"), RuntimeScorer(large_path, device="cpu")
    text = "\n\n".join(each for each in load_texts("bundled").documents if isinstance(each, str))
    ids = small.tokenizer.encode(text, add_special_tokens=False)
    step = len(ids) // num_prompts
    prompts = [ids[index * step :][:PROMPT_TOKENS] for index in range(num_prompts)]
    for model in (small, large):
        generate(model, prompts[:4], num_tokens)  # kernels are chosen at first use
    drafts, alone = generate(small, prompts, num_tokens).completions, generate(large, prompts, num_tokens)
    own, others = compare(drafts, *scorers), compare(alone.completions, scorers[1], scorers[1])
    for threshold in THRESHOLDS:
        cascade = Cascade("small", "large", threshold, first)
        kept = torch.tensor([is_kept(draft, cascade) for draft in drafts])
        deferred = [prompt for prompt, is_own in zip(prompts, kept, strict=True) if not is_own]
        stay = [prompt for prompt, is_own in zip(prompts, kept, strict=True) if is_own]
        work = (small, stay, num_tokens), (small, deferred, first), (large, deferred, num_tokens)
        seconds = sum(generate(*each).seconds for each in work)
        divergence = torch.where(kept[:, None], own.divergence, 0.0).mean()
        losses = torch.where(kept[:, None], own.baseline_losses, others.losses).mean()
        cells = (f"{threshold:g}", f"{kept.float().mean():.0%}", f"{1 - kept.float().mean():.0%}")
        costs = (f"{seconds / alone.seconds:.2f}", f"{divergence:.4f}", f"{losses.exp():.2f}")
        print(f"| {name} | {' | '.join((*cells, *costs))} |", flush=True)


if __name__ == "__main__":
    main()
