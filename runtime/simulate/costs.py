"""Measured seconds of a step as a function of its size, in a JSON file. No torch.

The time of a step is a curve over its tokens, linear between measured sizes (products of weights: flat while they are
bound by memory, then growing), plus a coefficient times each further amount of a `StepSize`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compress.common.errors import DataError
from runtime.core.step import StepPlan

ROUNDS = 8
"""Rounds of reweighting, from least squares towards least absolute deviations."""
LEAST_DEVIATION = 0.02
"""Relative deviation below which a step keeps its whole weight."""
SWEEPS = 1000


class StepSize(NamedTuple):
    """Amounts of work in a step.

    Attributes:
        tokens: all tokens.
        answers: sequences that get a token.
        decode_context: tokens that single tokens attend to, summed.
        prompt_pairs: pairs of a token of a longer span and a token before it.
        prompts: longer spans.
    """

    tokens: float = 0
    answers: float = 0
    decode_context: float = 0
    prompt_pairs: float = 0
    prompts: float = 0


def span_size(start: int, num_tokens: int, *, samples: bool) -> StepSize:
    """Returns the size of one span, whose last token may be followed by a sampled one."""
    if num_tokens == 1:
        return StepSize(1, samples, start)
    return StepSize(num_tokens, samples, 0, num_tokens * start + num_tokens * (num_tokens - 1) // 2, 1)


def total_size(sizes: Iterable[StepSize]) -> StepSize:
    """Returns the sum of sizes."""
    return StepSize(*map(sum, zip(StepSize(), *sizes, strict=True)))


def step_size(plan: StepPlan) -> StepSize:
    """Returns the size of a planned step."""
    return total_size(span_size(each.start, each.num_tokens, samples=each.samples) for each in plan.entries)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs of the steps of one model on one device.

    Attributes:
        model, machine, date, command: what was measured, on which processor, when and how.
        tokens, seconds: the curve: seconds of a step by its tokens, ascending.
        answer, decode_context, prompt_pair, prompt: seconds for each unit of these amounts.
        request: seconds that a request spends in the server and on the way, over HTTP, before and after the engine.
        error: median of the relative differences between measured and modelled seconds.
        max_model_len: longest prompt plus output in tokens.
        kv_tokens: tokens that the KV cache holds.
        kv_bytes: bytes of the keys and values of a token.
        hidden_bytes: bytes of the hidden state of a token.
        num_layers: layers of the model.
        mlp_share: share of the curve that MLPs and experts take, by their parameters in the layers.
        max_num_batched_tokens, prefill_chunk: default sizes of steps on that device.
    """

    model: str
    machine: str
    date: str
    command: str
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    answer: float
    decode_context: float
    prompt_pair: float
    prompt: float
    request: float
    error: float
    max_model_len: int
    kv_tokens: int
    kv_bytes: float
    hidden_bytes: float
    num_layers: int
    mlp_share: float
    max_num_batched_tokens: int
    prefill_chunk: int

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or len(self.tokens) != len(self.seconds) or sorted(set(self.tokens)) != [*self.tokens]:
            raise DataError("a curve of costs needs ascending numbers of tokens with seconds each", "Measure it again")

    def of_tokens(self, tokens: float) -> float:
        """Returns the curve at a number of tokens; its last part goes on after the largest measured step."""
        if tokens <= 0:
            return 0.0
        right = min(max(bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        low, high = self.tokens[right - 1], self.tokens[right]
        share = max(0.0, (tokens - low) / (high - low))
        return self.seconds[right - 1] + share * (self.seconds[right] - self.seconds[right - 1])

    def of_rest(self, size: StepSize) -> float:
        """Returns the seconds of attention, sampling and spans, which the curve does not contain."""
        return (
            self.answer * size.answers
            + self.decode_context * size.decode_context
            + self.prompt_pair * size.prompt_pairs
            + self.prompt * size.prompts
        )

    def of_step(self, size: StepSize) -> float:
        """Returns the seconds of a step."""
        return self.of_tokens(size.tokens) + self.of_rest(size)

    def save(self, file: Path) -> None:
        """Writes the JSON file."""
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


BUNDLED = files("runtime.simulate") / "measured"


def bundled_names() -> list[str]:
    """Returns the names of measured costs that come with the package."""
    return sorted(each.name.removesuffix(".json") for each in BUNDLED.iterdir() if each.name.endswith(".json"))


def read_costs(name: str) -> MeasuredCosts:
    """Reads a JSON file, or the bundled costs of a name.

    Raises:
        DataError: there is no such file, or it is not one of costs.
    """
    file, bundled = Path(name), BUNDLED / f"{name}.json"
    if not file.is_file() and not bundled.is_file():
        remedy = (
            f"Name one of {', '.join(bundled_names())}, or measure: runtime simulate --measure MODEL --costs {name}"
        )
        raise DataError(f"there are no costs {name!r}", remedy)
    text = file.read_text(encoding="utf-8") if file.is_file() else bundled.read_text(encoding="utf-8")
    try:
        return costs_from(json.loads(text))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{name} is not a file of costs: {error}", "Write it with runtime simulate --measure"
        ) from error


def costs_from(values: dict[str, Any]) -> MeasuredCosts:
    """Builds costs from the values of a JSON file. Raises TypeError or ValueError for missing or other values."""
    checked: dict[str, Any] = dict(values)
    for each in fields(MeasuredCosts):
        value = checked.get(each.name)
        is_text, is_curve = each.type == "str", str(each.type).startswith("tuple")
        numbers = [] if is_text else value if is_curve and isinstance(value, list) else [value]
        if (is_text and not isinstance(value, str)) or not all(isinstance(n, int | float) and n >= 0 for n in numbers):
            raise ValueError(f"{each.name} is {value!r}")
        checked[each.name] = tuple(numbers) if is_curve else value
    return MeasuredCosts(**checked)


class Fit(NamedTuple):
    """Seconds at the knots of the curve, of each further amount, and the median relative difference."""

    seconds: tuple[float, ...]
    rest: tuple[float, ...]
    error: float


def fit(sizes: Sequence[StepSize], seconds: Sequence[float], knots: Sequence[int]) -> Fit:
    """Fits non-negative costs to measured steps, by least absolute relative differences: a few interrupted steps change
    little.

    Args:
        knots: numbers of tokens between which the curve is linear, ascending.
    """
    measured = np.array(seconds)
    amounts = np.array(sizes, dtype=float)
    hats = np.stack([np.interp(amounts[:, 0], knots, unit) for unit in np.eye(len(knots))], axis=1)
    inputs = np.concatenate([hats, amounts[:, 1:]], axis=1)
    relative, solution = np.ones(len(measured)), np.zeros(inputs.shape[1])
    for _ in range(ROUNDS):
        weights = 1 / measured / np.sqrt(np.maximum(abs(relative), LEAST_DEVIATION))
        solution = _least_squares(inputs * weights[:, None], measured * weights)
        relative = (inputs @ solution - measured) / measured
    curve, rest = solution[: len(knots)], solution[len(knots) :]
    # A step of more tokens is never faster; knots that no step is near have no value of their own.
    return Fit(tuple(np.maximum.accumulate(curve).tolist()), tuple(rest.tolist()), float(np.median(abs(relative))))


def _least_squares(inputs: NDArray[np.float64], outputs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the non-negative solution of least squares, by coordinate descent."""
    scale = np.sqrt((inputs**2).sum(0))
    scale[scale == 0] = 1
    gram, target = (inputs / scale).T @ (inputs / scale), (inputs / scale).T @ outputs
    solution: NDArray[np.float64] = np.zeros(len(target))
    for _ in range(SWEEPS):
        for place in range(len(target)):
            rest = target[place] - gram[place] @ solution + gram[place, place] * solution[place]
            solution[place] = max(0.0, rest / gram[place, place]) if gram[place, place] else 0.0
    result: NDArray[np.float64] = solution / scale
    return result
