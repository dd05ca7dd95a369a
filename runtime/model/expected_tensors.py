"""Tensors that a decoder reads from a checkpoint, checked from headers before any is read."""

from __future__ import annotations

from collections.abc import Iterator

from compress.checkpoint.reader import PackedCheckpoint
from compress.common.errors import CheckpointError
from compress.models.linear import Linear as LinearSpec
from runtime.core.model_config import DecoderConfig

REMEDY = "Check that config.json and the weights belong to the same model"


def check_tensors(checkpoint: PackedCheckpoint, config: DecoderConfig) -> None:
    """Checks from headers that every tensor the decoder needs is there, with the right shape.

    Raises:
        CheckpointError: the first tensor that is missing, has another shape than config.json says, or holds integers
            that no quantization_config explains.
    """
    for linear in expected_linears(config, checkpoint):
        _check_shape(f"{linear.name}.weight", checkpoint.shape(linear.name), linear.shape)
        _check_numbers(checkpoint, linear.name)
    for linear in (*config.spec.linears(), config.spec.head):
        if linear.bias and f"{linear.name}.bias" not in checkpoint.files:
            raise CheckpointError(
                f"{checkpoint.path} has no tensor {linear.name}.bias, which this {config.model_type} model needs",
                REMEDY,
            )
    for embedding, matrix in config.spec.embeddings.items():
        _check_shape(f"{embedding}.weight", checkpoint.shape(embedding), matrix)
    for linear in config.spec.routers():
        _check_shape(f"{linear.name}.weight", checkpoint.files.shape(f"{linear.name}.weight"), linear.shape)
        if linear.bias:
            _check_shape(f"{linear.name}.bias", checkpoint.files.shape(f"{linear.name}.bias"), linear.shape[:1])
    for name, shape in config.spec.vectors().items():
        _check_shape(name, checkpoint.files.shape(name), shape)
    for norm in config.spec.norms():
        for name in (norm.tensor, f"{norm.name}.bias")[: 1 + norm.bias]:
            _check_shape(name, checkpoint.files.shape(name), (norm.size,))


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(f"{name} has shape {found}, config.json says {expected}", REMEDY)


def _check_numbers(checkpoint: PackedCheckpoint, module: str) -> None:
    """Raises CheckpointError for integers that no scheme explains."""
    if checkpoint.scheme(module) is None:
        dtype = checkpoint.files.dtype(f"{module}.weight")
        if not dtype.is_floating_point:
            raise CheckpointError(f"{module}.weight holds {str(dtype).removeprefix('torch.')}, not weights", REMEDY)


def expected_linears(config: DecoderConfig, checkpoint: PackedCheckpoint) -> Iterator[LinearSpec]:
    """Yields every linear that is loaded, the head last where it is a matrix of its own."""
    yield from config.spec.linears()
    if config.has_embedding:
        yield from config.spec.projections
    if config.has_head and not head_is_embedding(checkpoint, config):
        yield config.spec.head


def head_is_embedding(checkpoint: PackedCheckpoint, config: DecoderConfig) -> bool:
    """Whether logits are products with the embedding; a head that was quantized on its own is not."""
    return checkpoint.tied and config.spec.names.head not in checkpoint.schemes
