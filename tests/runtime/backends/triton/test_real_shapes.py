"""Packed linears at the shapes of real models on a GPU: against float64, and the same bits every time."""

import pytest
import torch
from products import BOUND, activations, exact_product, relative_error
from tiny_models import random_weight

from compress.checkpoint.weights import Activations, Int, Scheme
from runtime.backends.base import Target
from runtime.backends.registry import choose_linear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = [(6144, 4096), (4096, 14336)]
SCHEMES = [Int(4, 128), Int(4, 32, False), Int(3, 64), Int(2, 64, False), Int(8), Int(8, 64, False)]
W8A8 = Int(8, None, True, Activations.INT8)
REPEATS = 20


@pytest.mark.parametrize("scheme", [*SCHEMES, W8A8], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_every_packed_form_for_any_number_of_tokens(gpu, shape: tuple[int, int], scheme: Scheme) -> None:
    target = Target(gpu, torch.bfloat16)
    weight = random_weight(shape, scheme)
    linear = choose_linear(scheme, shape[1], target).kernel.prepare(weight, None, target)
    for tokens in (1, 7, 16, 64, 257, 2049):
        x = activations(tokens, shape[1], torch.bfloat16, gpu)
        found = linear(x)
        assert relative_error(found, exact_product(x, weight)) < BOUND[torch.bfloat16], tokens
        assert all(torch.equal(linear(x), found) for _ in range(REPEATS if tokens <= 64 else 2)), tokens
