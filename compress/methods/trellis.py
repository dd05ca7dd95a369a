"""Trellis codes (EXL3): both sides turned by Hadamard matrices, blocks of inputs encoded one after the other.

QTIP (Tseng et al. 2024, https://arxiv.org/abs/2406.11235, section 4) with the feedback of LDLQ (QuIP, Chee et al. 2023,
https://arxiv.org/abs/2307.13304, section 3): a block of 16 inputs absorbs the errors of those before it. The scales of
outputs are then those of least error under the Hessian.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from compress.checkpoint.weights import Exl3, Scheme
from compress.methods.base import Layer, Needs, QuantizationMethod, register

if TYPE_CHECKING:
    from compress.checkpoint.trellis_search import TurnedHessian
    from compress.checkpoint.weights import Weight
    from compress.methods.shared.hessian import HessianCache


@register
class Trellis(QuantizationMethod):
    """Trellis codes."""

    name: ClassVar[str] = "trellis"
    help: ClassVar[str] = "trellis codes of EXL3 with error feedback, slower and best at 2 and 3 bits"
    keeps_zeros: ClassVar[bool] = False
    data: ClassVar[Needs] = Needs(inputs=True, hessian=True)

    def unsupported(self, scheme: Scheme) -> str:
        return "" if isinstance(scheme, Exl3) else f"it writes trellis codes, and {scheme} has none"

    def default_scheme(self) -> Scheme:
        return Exl3.target()

    def compress(self, layer: Layer) -> Weight:
        from compress.checkpoint.trellis_search import encode_trellis

        hessian, facts = layer.inputs.shared(self.name, lambda: turned_hessian(layer.inputs))
        layer.details |= facts
        if not isinstance(layer.scheme, Exl3):
            raise TypeError(f"{layer.scheme} holds no trellis codes")
        return encode_trellis(layer.weight, layer.scheme, hessian)


def turned_hessian(inputs: HessianCache) -> tuple[TurnedHessian, dict[str, float | str | None]]:
    """Turns the Hessian of inputs and factorizes it by blocks. Returns it with the facts for the report. Raises
    NumericsError: NaN or infinity in the Hessian."""
    import torch

    from compress.checkpoint.trellis_search import TurnedHessian, turned_inputs
    from compress.checkpoint.weights.exl3 import TILE
    from compress.methods.shared.hessian import HessianOptions, factorize

    values = turned_inputs(turned_inputs(inputs.hessian.float()).T)
    factor = factorize(values, HessianOptions(activation_order=False))
    if factor.feedback is None:
        return TurnedHessian(values, None), factor.facts()
    feedback = factor.feedback
    for first in range(0, len(values), TILE):
        block = slice(first, first + TILE)
        own = feedback[block, block].clone()
        feedback[:, block] = torch.linalg.solve_triangular(
            own, feedback[:, block], upper=True, left=False, unitriangular=True
        )
    return TurnedHessian(values, feedback), factor.facts()
