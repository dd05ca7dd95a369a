#!/usr/bin/env python
"""Learns from the text of a prompt whether a small model answers as a large one does, for `classifier` of `--route`.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python scripts/train_router.py SMALL LARGE --output router.json

Prompts are pieces of a text. The small model answers each greedily, and the KL divergence from the large model at the
tokens of the answer is what a ridge regression predicts. The table is of prompts that were not learned from.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from bench_router import PROMPT_TOKENS, compare, generate
from torch import Tensor

from calibration.sources import load_texts
from compress.checkpoint.gguf.folder import folder_of
from compress.checkpoint.locate import find_model
from compress.common.files import atomic_file, read_text
from compress.evaluate.scorers import RuntimeScorer
from runtime.core.config import RuntimeConfig
from runtime.llm import LLM
from runtime.routing.classifier import NUM_FEATURES, read_features

FOLDS, PIECES, RIDGE = 5, 20, 1.0
FIRST_TOKENS = 8
SHARES = (0.25, 0.5, 0.75)


def measure(small: Path, large: Path, text: str, num_prompts: int, num_tokens: int) -> tuple[list[str], Tensor, Tensor]:
    """Returns prompts, the KL divergence of the small model's answers, and its confidence in their first tokens."""
    model = LLM(small, RuntimeConfig(device="cpu", prefix_caching=False, kv_memory_bytes=128 * 2**20))
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    step = len(ids) // num_prompts
    prompts = [ids[index * step :][:PROMPT_TOKENS] for index in range(num_prompts)]
    answers = generate(model, prompts, num_tokens).completions
    confidence = torch.tensor([[each.logprob for each in answer.logprobs[:FIRST_TOKENS]] for answer in answers])
    divergence = compare(answers, RuntimeScorer(small, device="cpu"), RuntimeScorer(large, device="cpu")).divergence
    texts = [model.tokenizer.decode(prompt) for prompt in prompts]
    return texts, divergence.double().mean(1), confidence.double().mean(1)


def matrix(texts: list[str]) -> Tensor:
    """Returns the features of texts, `[N, F]`."""
    features = torch.zeros(len(texts), NUM_FEATURES, dtype=torch.float64)
    for row, text in zip(features, texts, strict=True):
        found = read_features(text)
        row[list(found)] = torch.tensor(list(found.values()), dtype=torch.float64)
    return features


def fit(features: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    """Returns bias and weights of a ridge regression."""
    mean, target = features.mean(0), targets.mean()
    centered = features - mean
    gram = centered @ centered.T + RIDGE * torch.eye(len(features), dtype=torch.float64)
    weights = centered.T @ torch.linalg.solve(gram, targets - target)
    return float(target - mean @ weights), weights


def main() -> None:
    """Writes the file and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small", help="folder of a checkpoint, or demo")
    parser.add_argument("large")
    parser.add_argument("--text", type=Path, help="file with text such as the prompts; by default the bundled text")
    parser.add_argument("--prompts", type=int, default=640)
    parser.add_argument("--tokens", type=int, default=12, help="tokens of an answer")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    bundled = "\n\n".join(each for each in load_texts("bundled").documents if isinstance(each, str))
    text = bundled if given.text is None else read_text(given.text)
    texts, divergence, confidence = measure(
        *(folder_of(find_model(each)) for each in (given.small, given.large)), text, given.prompts, given.tokens
    )
    features = matrix(texts)
    # Neighbouring prompts are of one text: whole pieces are left out.
    folds = torch.arange(len(texts)) * PIECES // len(texts) % FOLDS
    predicted = torch.zeros_like(divergence)
    for fold in range(FOLDS):
        bias, weights = fit(features[folds != fold], divergence[folds != fold])
        predicted[folds == fold] = bias + features[folds == fold] @ weights
    print("| to the large | most_kl | KL | at random | by confidence | by the true KL |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for share in SHARES:
        kept = len(texts) - int(share * len(texts))
        orders = (predicted, -confidence, divergence)
        chosen, confident, best = (divergence[order.argsort()[:kept]].sum() / len(texts) for order in orders)
        limit, random = predicted.quantile(1 - share), divergence.mean() * (1 - share)
        print(f"| {share:.0%} | {limit:.3f} | {chosen:.3f} | {random:.3f} | {confident:.3f} | {best:.3f} |")
    bias, weights = fit(features, divergence)
    found = {"bias": bias, "weights": [round(weight, 5) for weight in weights.tolist()]}
    with atomic_file(given.output) as file:
        file.write(json.dumps(found).encode())


if __name__ == "__main__":
    main()
