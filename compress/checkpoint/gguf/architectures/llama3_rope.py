"""Frequency factors of Llama 3.1 and later (`rope_freqs.weight`), and the parameters of config.json that give them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from compress.checkpoint.gguf.architectures.base import FOLDER
from compress.common.errors import CheckpointError

LOW, HIGH, LENGTH = 1.0, 4.0, 8192
"""`low_freq_factor`, `high_freq_factor` and `original_max_position_embeddings` of every published model."""


def frequency_factors(parameters: Mapping[str, Any], channels: int) -> list[float]:
    """Returns the divisors `[channels / 2]` of the frequencies of heads with `channels`."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    length, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    factors = []
    for channel in range(0, channels, 2):
        wavelength = 2 * math.pi * parameters["rope_theta"] ** (channel / channels)
        smooth = min(1.0, max(0.0, (length / wavelength - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def find_parameters(factors: list[float], theta: float) -> dict[str, Any]:
    """Returns the parameters that give the factors of a file, which does not name them.

    Raises:
        CheckpointError: those of the published models do not.
    """
    if all(factor == 1 for factor in factors):
        return {"rope_type": "default"}
    parameters = {
        "rope_type": "llama3",
        "factor": round(max(factors), 4),
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": LENGTH,
    }
    expected = frequency_factors({**parameters, "rope_theta": theta}, 2 * len(factors))
    if any(not math.isclose(own, stored, rel_tol=1e-4) for own, stored in zip(expected, factors, strict=True)):
        raise CheckpointError(
            f"the {len(factors)} factors in rope_freqs.weight (up to {max(factors):g}) are not those of Llama 3",
            FOLDER,
        )
    return parameters
