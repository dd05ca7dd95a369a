"""Storage dtype of recurrent states, and its measured loss, recorded in config.json. Does not import torch.

States are computed in float32 (float64 in a model of that dtype). In 16 bits they are rounded when a step keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from compress.checkpoint.config import COMPRESSION_KEY, FORMAT_VERSION, compression_block
from compress.common.errors import CheckpointError, ToolkitError

STATE_MEASURED_KEY = "state_measured"
STATE_FLOAT32 = "float32"
STATE_DTYPES = (STATE_FLOAT32, "bfloat16", "float16")
STATE_ITEMSIZE = {STATE_FLOAT32: 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element of a state."""
MAX_KL = 0.01
"""Mean KL in nats above which serving warns; also the default limit of KV cache formats."""


@dataclass(frozen=True, slots=True)
class MeasuredStates:
    """The measured cost of states of one dtype, which were rounded after every token.

    Attributes:
        kl_mean, kl_p999: mean and 99.9 % quantile of the KL to the same checkpoint with states in float32, in nats.
        tokens: number of predicted tokens.
    """

    dtype: str
    kl_mean: float
    kl_p999: float
    perplexity: float
    baseline_perplexity: float
    top1_agreement: float
    tokens: int
    data: str
    data_sha256: str
    protocol: str

    @classmethod
    def of(cls, dtype: str, report: Mapping[str, Any]) -> MeasuredStates:
        """Takes the fields of the report of an evaluation."""
        return cls(dtype, **{each.name: report[each.name] for each in fields(cls) if each.name != "dtype"})

    @property
    def is_costly(self) -> bool:
        """Whether serving warns."""
        return self.kl_mean > MAX_KL

    def __str__(self) -> str:
        return f"mean KL {self.kl_mean:.4g} nats to {STATE_FLOAT32} on {self.tokens:,} tokens of {self.data}"


def measured_states(config: Mapping[str, Any]) -> tuple[MeasuredStates, ...]:
    """Reads the records in a config.json. Raises CheckpointError for one that cannot be understood."""
    try:
        found = tuple(MeasuredStates(**each) for each in compression_block(config).get(STATE_MEASURED_KEY, ()))
        numbers = [each.kl_mean for each in found]
    except TypeError as error:
        raise CheckpointError(f"{STATE_MEASURED_KEY} cannot be read: {error}", "Measure it again") from error
    if not all(isinstance(number, int | float) for number in numbers):
        raise CheckpointError(f"{STATE_MEASURED_KEY} has a KL that is not a number", "Measure it again")
    return found


def with_measured_states(config: Mapping[str, Any], measured: MeasuredStates) -> dict[str, Any]:
    """Returns config.json with an additional record, which replaces an older one of the same dtype."""
    others = [each for each in measured_states(config) if each.dtype != measured.dtype]
    block = {"format_version": FORMAT_VERSION} | compression_block(config)
    return {**config, COMPRESSION_KEY: block | {STATE_MEASURED_KEY: [asdict(each) for each in (*others, measured)]}}


def require_measured(measured: Iterable[MeasuredStates], dtype: str) -> MeasuredStates | None:
    """Returns the measured cost of states of a dtype; None for float32, which costs nothing.

    Raises:
        ToolkitError: nothing was measured.
    """
    if dtype == STATE_FLOAT32:
        return None
    found = next((each for each in measured if each.dtype == dtype), None)
    if found is None:
        raise ToolkitError(
            f"the cost of recurrent states in {dtype} was not measured for this checkpoint",
            f"Measure and record it: compress eval MODEL --ppl --state-dtype {dtype} --record",
        )
    return found
