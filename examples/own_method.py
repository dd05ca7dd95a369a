"""Adds a rounding method from outside the package: `python examples/own_method.py quantize --method stochastic`.

The method appears in `--method`, `--help`, recipes and reports, and its options become command-line options.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from compress.cli import make_app
from compress.common.cli import option
from compress.methods.base import Layer, QuantizationMethod, register


@dataclass(frozen=True)
class Options:
    noise_seed: int = option(default=0, help="Seed of the random numbers that decide between the two nearest codes.")


@register
class StochasticRounding(QuantizationMethod):
    """Rounds each weight up or down with the probability that keeps its mean."""

    name: ClassVar[str] = "stochastic"
    help: ClassVar[str] = "stochastic rounding, without calibration"
    Options: ClassVar[type] = Options

    def compress(self, layer: Layer) -> Any:
        import torch

        scales = layer.integers.round(layer.weight, layer.importance, layer.dtype).scales.float()
        steps = scales.repeat_interleave(layer.weight.shape[1] // scales.shape[1], 1)
        generator = torch.Generator(layer.weight.device).manual_seed(layer.options.noise_seed)
        noise = torch.rand(layer.weight.shape, generator=generator, device=layer.weight.device) - 0.5
        return layer.integers.round(layer.weight + noise * steps, layer.importance, layer.dtype)


if __name__ == "__main__":
    make_app()()
