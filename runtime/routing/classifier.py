"""Choice between a small and a large model from the text of a prompt alone: no model computes anything for it.

A linear function of hashed n-grams (K. Weinberger et al., "Feature hashing for large scale multitask learning", 2009)
predicts how far the answers of the small model are from those of the large one; `scripts/train_router.py` learns it.
No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from zlib import crc32

NUM_FEATURES = 4096
LAST_CHARACTERS = 1000
"""Characters at the end of a prompt that are read."""
LONGEST_GRAM = 3


def read_features(text: str) -> dict[int, float]:
    """Returns the square roots of the counts of n-grams of characters and of words, with a norm of 1, by their hash."""
    text = text[-LAST_CHARACTERS:]
    lengths = range(1, LONGEST_GRAM + 1)
    grams = [text[start : start + length] for length in lengths for start in range(len(text) - length + 1)]
    grams += [f"word {word}" for word in text.lower().split()]
    counts = Counter(crc32(gram.encode("utf-8", "replace")) % NUM_FEATURES for gram in grams)
    norm = math.sqrt(max(1, counts.total()))
    return {number: math.sqrt(count) / norm for number, count in counts.items()}


@dataclass(frozen=True, slots=True)
class Predictor:
    """A linear function of the features of a text.

    Attributes:
        weights: one for each of `NUM_FEATURES`.
    """

    bias: float
    weights: tuple[float, ...]

    def predict(self, text: str) -> float:
        """Returns the expected KL divergence of a small model's answer, per token in nats."""
        return self.bias + sum(self.weights[number] * value for number, value in read_features(text).items())


@dataclass(frozen=True, slots=True)
class Classifier:
    """A small model for prompts that it is expected to answer as the large one does, and the large one for others.

    Attributes:
        most_kl: highest expected KL divergence, per token in nats, of prompts for the small model.
    """

    small: str
    large: str
    predictor: Predictor
    most_kl: float

    def choose(self, text: str) -> str:
        """Returns the model for a prompt."""
        return self.small if self.predictor.predict(text) <= self.most_kl else self.large
