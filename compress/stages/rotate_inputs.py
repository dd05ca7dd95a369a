"""Rotation of inputs as they come, where no rotation of the whole model reaches them: after an activation function.

QuaRot (Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456, section 4) and SpinQuant's R4 (Liu et al. 2024,
https://arxiv.org/abs/2405.16406).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from compress.checkpoint.weights import RotatedInputs
from compress.checkpoint.weights.rotated_inputs import LARGEST_ORDER
from compress.common.cli import Key, option
from compress.common.errors import RecipeError
from compress.methods import base as methods
from compress.plan import LayerPlan
from compress.stages.base import STAGES, TensorStage


@STAGES.register(order=1)
@dataclass(frozen=True, kw_only=True)
class RotateInputsStage(TensorStage):
    """Multiplies the inputs of quantized linears by Hadamard matrices at run time, before they are rounded, and the
    weights by their inverse before they are quantized: preserves the function of the model. Follows the quantize stage
    of its linears."""

    name: ClassVar[str] = "rotate_inputs"
    added_by: ClassVar[Key | None] = (
        "rotate_inputs",
        list[str] | None,
        option(
            "--rotate-inputs",
            default=None,
            metavar="LAYER",
            help="Multiply the inputs of these layers by Hadamard matrices as they come, before they are rounded: a "
            "name (down_proj), a glob, or re:PATTERN. For rounded inputs that --rotate does not reach. Repeatable.",
        ),
    )
    label = "rotated-inputs"

    largest_order: int = option(
        default=LARGEST_ORDER,
        limits={"at least": 2, "at most": LARGEST_ORDER},
        help="Largest order of the Hadamard matrices, a power of two.",
    )

    def apply(self, before: LayerPlan, in_features: int, ignored: bool) -> LayerPlan:
        scheme = before.quantized
        if ignored:
            return before
        if scheme is None or before.method is None:
            raise RecipeError(
                "rotate_inputs takes a layer that no stage before it quantizes",
                "Put it after quantize, and give it targets that are quantized",
            )
        rotated = RotatedInputs.for_inputs(scheme, in_features, self.largest_order)
        methods.require_supported(before.method, rotated)
        return before.changed(scheme=rotated)

    def work_keys(self) -> dict[str, Any]:
        return {"largest_order": self.largest_order}
