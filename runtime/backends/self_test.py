"""Products of a kernel compared with plain torch, when the first weight of a form is prepared."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.weights import Weight
from runtime.backends.backend import LinearKernel
from runtime.backends.base import Linear, Target
from runtime.backends.registry import Choice, compilers
from runtime.backends.torch.quantized_linear import ReferenceLinear

logger = logging.getLogger("runtime.backends")

MOST_ERROR = 0.1
"""Largest error that passes, in root mean squares of the product: roundings to 16 bits make some hundredths."""
EDGE_ROWS = 128
"""Rows at each end of a weight that are compared."""


def prepare_tested(
    weight: Weight | Tensor,
    bias: Tensor | None,
    target: Target,
    choose: Callable[[], Choice[LinearKernel[Any]]],
    excluded: dict[str, str],
    passed: set[tuple[str, str]],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Choice[LinearKernel[Any]], Linear]:
    """Prepares a linear by the first kernel that multiplies as plain torch does.

    Args:
        choose: the choice with the kernels in `excluded` left out.
        excluded: receives names of kernels that err, with the reason.
        passed: receives names of kernels and the forms that they multiply rightly, which are not tested again.
        report: is told how many kernels are compiled, where some have to be.
    """
    while True:
        choice = choose()
        kernel = choice.kernel
        tested = kernel.name, "" if isinstance(weight, Tensor) else str(weight.scheme)
        if isinstance(weight, Tensor) or not kernel.tested_tokens or tested in passed:
            return choice, kernel.prepare(weight, bias, target)
        report(0, 0)
        try:
            linear = kernel.prepare(weight, bias, target)
            refusal = find_error(kernel.tested_tokens, linear, weight, bias, target, report)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler, a driver or a package of others may raise anything
            refusal = f"failed: {next(iter(str(error).splitlines()), '') or type(error).__name__}"
        else:
            if not refusal:
                passed.add(tested)
                return choice, linear
        logger.warning("kernel %s is not used: it %s", kernel.name, refusal)
        excluded[kernel.name] = refusal


def find_error(
    num_tokens: tuple[int, ...],
    linear: Linear,
    weight: Weight,
    bias: Tensor | None,
    target: Target,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Compares products of a linear for each of these numbers of tokens, over the first and the last of its rows.

    Returns:
        The first error above `MOST_ERROR`, in words; "" for none.
    """
    part = weight.changed(_ends) if weight.scheme.fuses else weight
    exact = ReferenceLinear(part.to(target.device), None)
    x = _activations(max(num_tokens), weight.shape[1], target)

    def multiply() -> None:
        for tokens in num_tokens:
            linear(x[:tokens])

    for compiler in compilers(target.device):  # several kernels at a time
        compiler.compile(compiler.missing(multiply, target.device), target.device, report)
    for tokens in num_tokens:
        expected = exact(x[:tokens].float())
        expected = expected.T if weight.scheme.fuses else _ends(expected.T)
        expected = expected if bias is None else expected + _ends(bias)[:, None].float()
        distance = (_ends(linear(x[:tokens]).T).float() - expected).abs().max()
        error = (distance / expected.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)).item()
        if not error <= MOST_ERROR:  # also where it is NaN
            return f"errs by {error:.2f} root mean squares for {tokens} tokens of {weight.scheme}"
    return ""


def _ends(rows: Tensor) -> Tensor:
    return torch.cat((rows[:EDGE_ROWS], rows[-EDGE_ROWS:]))


def _activations(tokens: int, inputs: int, target: Target) -> Tensor:
    """Numbers `[tokens, inputs]` between -1 and 1 that do not repeat, the same everywhere."""
    places = torch.arange(tokens * inputs, device=target.device, dtype=torch.float64)
    return places.mul_(2.399963).sin_().view(tokens, inputs).to(target.dtype)  # the golden angle
