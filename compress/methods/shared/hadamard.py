"""Random orthogonal matrices with a fast product: signs, then a Hadamard matrix.

QuaRot (Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456, section 3) and SpinQuant (Liu et al. 2024,
https://arxiv.org/abs/2405.16406) rotate a model's hidden states by such a matrix, which spreads outliers over all
channels, and fold it into the adjacent weights.

Orders that are not powers of two are Kronecker products: `n = 2^k m`, where m times a power of two is an order of
Paley's constructions (12, 20, 28, ...). If there is none, a random orthogonal matrix is used for that factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.kv_quant import hadamard_transform

# Number of elements rotated at once, which keeps float64 copies small compared with the tensor.
_CHUNK_ELEMENTS = 1 << 22
# Larger dense factors would cost more than they gain.
_MAX_PALEY = 1024


@dataclass(frozen=True, slots=True)
class Rotation:
    """`Q [n, n] = diag(signs) (F x H) / sqrt(n)`: F is a small factor, orthogonal up to scaling, H a Hadamard matrix.

    Attributes:
        signs: `[n]` float64, 1 or -1.
        factor: `[m, m]` float64, orthogonal.
        kind: description of Q's construction.
    """

    signs: Tensor
    factor: Tensor
    kind: str

    @classmethod
    def random(cls, order: int, seed: int) -> Rotation:
        """Returns the rotation of a seed; the same on every machine up to the last bits of a random factor."""
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (order,), generator=generator).double() * 2 - 1
        odd = order // (order & -order)
        paley = next((each for each in _paley_orders(odd) if order % each == 0), None)
        if odd == 1:
            return cls(signs, torch.ones(1, 1, dtype=torch.float64), f"Hadamard of order {order}")
        if paley is not None:
            factor = paley_matrix(paley) / paley**0.5
            return cls(signs, factor, f"Hadamard of order {order} ({order // paley} x {paley})")
        factor = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64)).Q
        return cls(signs, factor, f"Hadamard of order {order // odd} x random orthogonal matrix of order {odd}")

    @property
    def order(self) -> int:
        return len(self.signs)

    def turn(self, rows: Tensor, scale: Tensor | None = None) -> Tensor:
        """Returns `rows [..., n] @ Q`, computed in float64 and rounded once, to the dtype of `rows`. `scale`: `[n]`
        float64, factors of the columns before they are rotated."""
        factors = self.signs if scale is None else self.signs * scale
        rotated = torch.empty_like(rows, memory_format=torch.contiguous_format)
        for source, target in zip(self._chunks(rows), self._chunks(rotated), strict=True):
            target.copy_(self._mix(source.double() * factors))
        return rotated

    def turn_heads(self, rows: Tensor) -> Tensor:
        """Rotates each head of n channels of `rows [..., h * n]` separately."""
        return self.turn(rows.unflatten(-1, (-1, self.order))).flatten(-2)

    def _chunks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return torch.split(tensor.reshape(-1, self.order), max(1, _CHUNK_ELEMENTS // self.order))

    def _mix(self, rows: Tensor) -> Tensor:
        small = len(self.factor)
        parts: Tensor = rows.unflatten(-1, (small, -1))
        if small > 1:
            parts = torch.einsum("rip,ij->rjp", parts, self.factor)
        return (hadamard_transform(parts) / math.pow(parts.shape[-1], 0.5)).flatten(1)


def paley_matrix(order: int) -> Tensor:
    """Returns a Hadamard matrix `[order, order]` of 1 and -1, float64, by Paley's first or second construction. Raises
    ValueError: neither construction reaches this order from a prime."""
    if _is_prime(order - 1) and order % 4 == 0:
        skew = _conference(order - 1, -1)
        return skew + torch.eye(order, dtype=torch.float64)
    if order % 4 == 0 and _is_prime(order // 2 - 1) and order // 2 % 4 == 2:
        symmetric = _conference(order // 2 - 1, 1)
        ones = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        corner = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(symmetric, ones) + torch.kron(torch.eye(order // 2, dtype=torch.float64), corner)
    raise ValueError(f"no Paley construction of order {order}")


def _conference(prime: int, sign: int) -> Tensor:
    """Returns `C [prime + 1, prime + 1]` with `C C^T = prime I`, zero diagonal and `C^T = sign C`."""
    numbers = torch.arange(prime)
    squares = torch.zeros(prime, dtype=torch.float64) - 1
    squares[numbers[1:].square() % prime] = 1
    squares[0] = 0
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[0, 1:] = 1
    matrix[1:, 0] = sign
    matrix[1:, 1:] = squares[(numbers.unsqueeze(1) - numbers) % prime]
    return matrix


def _paley_orders(odd: int) -> list[int]:
    """Returns multiples of `odd` by powers of two with a Paley construction, smallest first."""
    orders = [odd << power for power in range(2, 10) if odd << power <= _MAX_PALEY]
    return [each for each in orders if _is_prime(each - 1) or (each // 2 % 4 == 2 and _is_prime(each // 2 - 1))]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
