"""Norms, rotary embedding, gating and sampling in plain torch: any dtype and device, the oracle of other backends.

Adding Gumbel noise to log-probabilities and taking the largest draws from the distribution exactly. Because the noise
of a token depends on nothing but its request's seed, its position in the sequence and its id, a seed gives the same
tokens whatever the batch, the chunking, preemption or speculation, on any device.

The hash is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) in wrapping
int64 arithmetic: its finalizer turns (seed, position) into the state of a stream, and the token id is the index in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from compress.models.clamped_gate import ClampedGate
from runtime.backends.base import NormWeights
from runtime.core.batch import SamplingTensors


class TorchOps:
    """Any dtype and device; the oracle of the others."""

    def add_rms_norm(self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if update is not None:
            hidden += update
        return rms_norm(hidden, weight, eps)

    def rotate(self, heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(heads if weight is None else rms_norm(heads, weight, eps), cos, sin)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate).mul_(up)

    def activate_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        if activation in ("silu", "swish"):
            return self.silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return ACTIVATIONS[activation](gate).mul_(up)

    def clamp_and_mul(self, gate_up: Tensor, gate: ClampedGate) -> Tensor:
        clamped: Tensor = gate(*gate_up.chunk(2, -1))
        return clamped

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return ACTIVATIONS[activation](x)

    def normalize(self, hidden: Tensor, norm: NormWeights) -> Tensor:
        wide = hidden.to(norm.weight.dtype)
        if norm.squares is not None:
            found = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
            found = (found * (norm.squares(found) + norm.eps).rsqrt()).to(wide.dtype)
        elif norm.centered:
            found = functional.layer_norm(wide, wide.shape[-1:], None, None, norm.eps)
        else:
            found = functional.rms_norm(wide, wide.shape[-1:], None, norm.eps)
        found = found.mul_(norm.weight)
        return (found if norm.bias is None else found.add_(norm.bias)).to(hidden.dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads `[T, heads, D]` by cosine and signed sine `[T, 1, D]` into a new tensor."""
    return heads.roll(heads.shape[-1] // 2, -1).mul_(sin).add_(heads * cos)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension. 16-bit input is normalized in float32, rounded, and then multiplied by the
    weight."""
    return functional.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "silu": functional.silu,
    "swish": functional.silu,
}


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


GAMMA = _signed(0x9E3779B97F4A7C15)
MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
UNIFORM_BITS = 52


def gumbel_argmax(scores: Tensor, token_ids: Tensor, tensors: SamplingTensors) -> Tensor:
    """The id `[R]` with the highest sum of score `[R, K]` and noise, the first of equal ones; ids `[R or 1, K]`."""
    winner = gumbel_noise(tensors.seeds, tensors.positions, token_ids).add_(scores).argmax(-1, keepdim=True)
    return token_ids.expand(len(scores), -1).gather(-1, winner).squeeze(-1)


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64.

    Args:
        seeds, positions: int64 `[R]`, one stream per row; position is the one the drawn token will have.
        token_ids: int64 `[V]` or `[R, V]`.

    Returns:
        `[R, V]`, between about -3.6 and 36.7.
    """
    streams = _mix(_mix(seeds + GAMMA).bitwise_xor_((positions + 1) * GAMMA))
    words = _mix(streams.unsqueeze(-1) + (token_ids + 1) * GAMMA)
    # 52 bits and a half: never 0 nor 1, and exact in float64.
    uniform = _shift_right_(words, 64 - UNIFORM_BITS).double().add_(0.5).mul_(2.0**-UNIFORM_BITS)
    return uniform.log_().neg_().log_().neg_()


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finalizer, a bijection of 64-bit words in which every input bit moves half of the output bits.
    Overwrites `words`: with a large vocabulary, new memory would cost more than the arithmetic."""
    words.bitwise_xor_(_shift_right_(words.clone(), 30)).mul_(MULTIPLIERS[0])
    words.bitwise_xor_(_shift_right_(words.clone(), 27)).mul_(MULTIPLIERS[1])
    return words.bitwise_xor_(_shift_right_(words.clone(), 31))


def _shift_right_(words: Tensor, bits: int) -> Tensor:
    """Logical shift in place; torch's shift of int64 copies the sign."""
    return words.bitwise_right_shift_(bits).bitwise_and_((1 << (64 - bits)) - 1)


def argmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the highest scores of every row, int64 `[R]`, and whether all of the row are finite, bool `[R]`."""
    return scores.argmax(-1), scores.sum(-1).isfinite()  # a sum is finite only if all of its terms are
