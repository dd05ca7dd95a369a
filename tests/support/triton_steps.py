"""Steps in Triton for a runner on any device: under the interpreter the registry does not choose it."""

from dataclasses import replace

from runtime.backends.triton import prepare_attention
from runtime.backends.triton.layers import prepare_layers
from runtime.runner.runner import ModelRunner


def use_triton(runner: ModelRunner) -> None:
    """Attention and layers of a runner by Triton, over the pages that it has."""
    kernels, decoder = runner.kernels, runner.decoder
    attention = prepare_attention(decoder, kernels.cache, kernels.windows, runner.memory)
    layers = prepare_layers(decoder, kernels.cache, kernels.windows)
    runner.kernels = replace(kernels, attention=attention, layers=layers, records=True)
