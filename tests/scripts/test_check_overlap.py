"""The check of overlapping kernels: which replays count as different, and which kernel is named."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compress.common.errors import ToolkitError


def replays_of(*steps: torch.Tensor) -> Any:
    from check_overlap import Replays

    found = Replays(lambda *_: {})
    for logits in steps:
        found((), logits, None)
    return found


def changed(logits: torch.Tensor, count: int) -> torch.Tensor:
    other = logits.clone()
    other.view(-1)[:count] += 1
    return other


def test_replays_are_compared_bit_by_bit_with_the_first_step() -> None:
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = torch.nan
    same = replays_of(logits, logits.clone(), logits.clone())
    assert (same.count, same.different, same.first_different, same.elements) == (2, 0, 0, 0)
    other = replays_of(logits, logits.clone(), changed(logits, 3), changed(logits, 5))
    assert (other.count, other.different, other.first_different, other.elements) == (3, 2, 2, 3)


def test_the_distance_is_that_of_log_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0]])
    assert replays_of(logits).distance(replays_of(logits + 3)) < 1e-6
    swapped = replays_of(torch.tensor([[0.0, 5.0, 5.001]])).distance(replays_of(torch.tensor([[0.0, 5.001, 5.0]])))
    assert swapped == pytest.approx(0.001, rel=0.01)  # the better of two equal tokens does not matter
    assert replays_of(logits).distance(replays_of(logits * torch.nan)) == float("inf")


@pytest.mark.parametrize("plain_differs", [False, True])
def test_a_kernel_without_which_replays_are_equal_is_named(
    plain_differs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import check_overlap

    from runtime.backends.triton import launcher

    logits, written = torch.zeros(1, 4), list[dict[str, Any]]()

    def repeat(decoder: Any, count: int, launch: str, replays: int) -> tuple[Any, float]:
        is_wrong = plain_differs if launch == "off" else "guilty" not in launcher._one_after_the_other.get()
        return replays_of(logits, changed(logits, 2) if is_wrong else logits), 1.0

    monkeypatch.setattr(check_overlap, "repeat", repeat)
    monkeypatch.setattr(check_overlap, "overlapping_kernels", lambda: ["guilty", "other"])
    decoder, rows = SimpleNamespace(device=torch.device("cuda")), SimpleNamespace(add=lambda **row: written.append(row))
    with pytest.raises(ToolkitError) as caught:
        check_overlap.check(decoder, 10, rows)
    found = {row["kernel"]: row["different"] for row in written if "kernel" in row}
    assert found == ({} if plain_differs else {"guilty": 0, "other": 1})
    assert ("guilty" in caught.value.problem) == (not plain_differs)
    assert "other" not in caught.value.problem.rpartition(":")[2]


def test_kernels_of_layers_are_among_those_that_can_be_left_out() -> None:
    from check_overlap import overlapping_kernels

    import runtime.backends.triton.kernels.norm_act
    import runtime.backends.triton.kernels.w4a16  # noqa: F401

    assert {"add_rms_norm_kernel", "w4a16_skinny_gemm"} <= set(overlapping_kernels())
