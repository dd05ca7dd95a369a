"""Default sizes of steps by device, and those that are asked for."""

import pytest

from runtime.core.config import RuntimeConfig
from runtime.core.step_sizes import GIB, default_step_sizes


@pytest.mark.parametrize(
    ("gpu_bytes", "tokens", "chunk"),
    [
        (None, 512, 256),
        (8 * GIB, 1024, 256),
        (24 * GIB - 2**28, 2048, 512),
        (44 * GIB, 4096, 1024),
        (79 * GIB, 8192, 2048),
        (141 * GIB, 8192, 2048),
    ],
)
def test_steps_are_longer_on_larger_gpus(gpu_bytes: int | None, tokens: int, chunk: int) -> None:
    found = RuntimeConfig().with_step_sizes(gpu_bytes)
    assert (found.step_tokens, found.max_span_tokens) == (tokens, chunk)
    assert found.step_sizes_reason == default_step_sizes(gpu_bytes).reason


def test_what_is_asked_for_is_kept() -> None:
    found = RuntimeConfig(max_num_batched_tokens=300).with_step_sizes(141 * GIB)
    assert (found.step_tokens, found.max_span_tokens) == (300, 300)
    assert RuntimeConfig(prefill_chunk=64).with_step_sizes(141 * GIB).step_tokens == 8192
    assert found.step_sizes_reason != default_step_sizes(141 * GIB).reason


def test_without_a_device_sizes_are_those_of_a_cpu() -> None:
    assert (RuntimeConfig().step_tokens, RuntimeConfig().max_span_tokens) == default_step_sizes()[:2]
