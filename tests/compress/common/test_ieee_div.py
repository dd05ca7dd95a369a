"""Division rounds once on every device: a GPU may not be given the number in host memory."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compress.common.device import divide


class Divisors(TorchDispatchMode):
    """Keeps what is divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.div.Tensor:
            self.found.append(args[1])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [127, 448.0, 15, 2**0.5])
def test_quotients_are_those_of_a_cpu(gpu, number: float) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    exact = (x.double() / torch.tensor(number, dtype=torch.float32).double()).float()
    assert torch.equal(divide(x.to(gpu), number).cpu(), exact)


def test_the_number_is_where_the_rest_is() -> None:
    x = torch.empty(3, device="meta")
    with Divisors() as divisors:
        divide(x, 127)
    (number,) = divisors.found
    assert isinstance(number, Tensor)
    assert number.device == x.device
