"""The scan of Mamba-2 equals transformers' functions, in chunks and token by token."""

from dataclasses import replace

import pytest
import torch
from tiny_models import StayInFloat64
from torch import Tensor
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)

from runtime.model.mixers.mamba2 import CHUNK, ScanInputs, scan

COUNT, GROUPS, SHARED, SIZE, STATE = 150, 2, 3, 5, 8


def random_parts() -> dict[str, Tensor]:
    """Arguments of transformers' functions for two sequences: `[B, n, heads or groups, ...]`."""
    generator = torch.Generator().manual_seed(0)
    heads = GROUPS * SHARED
    shapes = {"x": (heads, SIZE), "dt": (heads,), "B": (GROUPS, STATE), "C": (GROUPS, STATE)}
    found = {
        name: torch.randn(2, COUNT, *shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }
    state = torch.randn(2, heads, SIZE, STATE, generator=generator, dtype=torch.float64)
    return found | {"dt": found["dt"].abs(), "A": -torch.linspace(0.01, 8, heads, dtype=torch.float64), "state": state}


def as_inputs(parts: dict[str, Tensor]) -> tuple[ScanInputs, Tensor]:
    """Inputs of the scan, and the state before them."""
    heads, decay = parts["x"] * parts["dt"].unsqueeze(-1), parts["A"] * parts["dt"]
    heads, decay = (part.unflatten(2, (GROUPS, SHARED)).movedim(1, 3) for part in (heads, decay))
    write, read = (parts[name].unsqueeze(3).movedim(1, 3) for name in "BC")
    return ScanInputs(heads, write, read, decay), parts["state"].mT.unflatten(1, (GROUPS, SHARED))


def assert_equal(found: Tensor, after: Tensor, expected: Tensor, last: Tensor) -> None:
    torch.testing.assert_close(found.flatten(1, 2).transpose(1, 2), expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(after.flatten(1, 2).mT, last, rtol=0, atol=1e-9)


@pytest.mark.parametrize("chunk", [1, 7, CHUNK])
def test_scan_equals_the_chunks_of_transformers(chunk: int) -> None:
    parts = random_parts()
    with StayInFloat64():
        expected, last = mamba2_chunk_scan(
            *(parts[name] for name in ("x", "dt", "A", "B", "C")),
            chunk_size=16,
            initial_states=parts["state"],
            return_final_states=True,
        )
    assert_equal(*scan(*as_inputs(parts), chunk), expected, last)


def test_scan_equals_the_steps_of_transformers() -> None:
    parts = random_parts()
    state, outputs = parts["state"].clone(), []
    with StayInFloat64():
        for token in range(COUNT):
            x, step, write, read = (parts[name][:, token] for name in ("x", "dt", "B", "C"))
            step, decay = step.unsqueeze(-1).expand_as(x), parts["A"][:, None, None]
            outputs.append(mamba2_selective_state_update(state, x, step, decay, write, read))
    assert_equal(*scan(*as_inputs(parts)), torch.stack(outputs, 1), state)


@pytest.mark.parametrize("count", [1, CHUNK, CHUNK + 1])
def test_a_state_that_decays_to_nothing_stays_finite(count: int) -> None:
    inputs, state = as_inputs(random_parts())
    inputs = inputs.tokens(0, count)
    found, after = scan(replace(inputs, decay=torch.full_like(inputs.decay, -1e4)), state)
    assert found.isfinite().all()
    assert after.isfinite().all()
