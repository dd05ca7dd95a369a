"""The tensors a decoder is made of: their names, shapes and biases, checked against a checkpoint before it is read."""

from __future__ import annotations

from collections.abc import Iterator

from compress.checkpoint.errors import CheckpointError
from compress.checkpoint.reader import PackedCheckpoint
from runtime.model.config import DecoderConfig

EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
REMEDY = "Check that config.json and the weights belong to the same model"


Expected = tuple[str, tuple[int, int], bool]
"""Module, shape of its weight, and whether a bias must be there."""


def check_tensors(checkpoint: PackedCheckpoint, config: DecoderConfig) -> None:
    """Every tensor the decoder needs is there, with the right shape; reads headers only.

    Raises:
        CheckpointError: the first tensor that is missing, has another shape than config.json says, or holds integers
            that no quantization_config explains.
    """
    for module, shape, needs_bias in expected_linears(config, checkpoint):
        _check_shape(f"{module}.weight", checkpoint.shape(module), shape)
        _check_numbers(checkpoint, module)
        if needs_bias and f"{module}.bias" not in checkpoint.files:
            raise CheckpointError(
                f"{checkpoint.path} has no tensor {module}.bias, which this {config.model_type} model needs", REMEDY
            )
    _check_shape(f"{EMBEDDING}.weight", checkpoint.shape(EMBEDDING), (config.vocab_size, config.hidden_size))
    for name, size in expected_norms(config):
        _check_shape(name, checkpoint.files.shape(name), (size,))


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(f"{name} has shape {found}, config.json says {expected}", REMEDY)


def _check_numbers(checkpoint: PackedCheckpoint, module: str) -> None:
    """Raises CheckpointError for integers where nothing says what they mean."""
    if checkpoint.scheme(module) is None:
        dtype = checkpoint.files.dtype(f"{module}.weight")
        if not dtype.is_floating_point:
            raise CheckpointError(f"{module}.weight holds {str(dtype).removeprefix('torch.')}, not weights", REMEDY)


def expected_linears(config: DecoderConfig, checkpoint: PackedCheckpoint) -> Iterator[Expected]:
    """Every linear that is loaded."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for layer in range(config.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        yield f"{attention}.q_proj", (queries, hidden), config.qkv_bias
        yield f"{attention}.k_proj", (keys, hidden), config.qkv_bias
        yield f"{attention}.v_proj", (keys, hidden), config.qkv_bias
        yield f"{attention}.o_proj", (hidden, queries), config.output_bias
        yield f"{mlp}.gate_proj", (inner, hidden), config.mlp_bias
        yield f"{mlp}.up_proj", (inner, hidden), config.mlp_bias
        yield f"{mlp}.down_proj", (hidden, inner), config.mlp_bias
    if not head_is_embedding(checkpoint):
        yield HEAD, (config.vocab_size, hidden), False


def expected_norms(config: DecoderConfig) -> Iterator[tuple[str, int]]:
    """Every norm weight and its length."""
    for layer in range(config.num_layers):
        yield f"model.layers.{layer}.input_layernorm.weight", config.hidden_size
        yield f"model.layers.{layer}.post_attention_layernorm.weight", config.hidden_size
        if config.qk_norm:
            yield f"model.layers.{layer}.self_attn.q_norm.weight", config.head_dim
            yield f"model.layers.{layer}.self_attn.k_norm.weight", config.head_dim
    yield f"{NORM}.weight", config.hidden_size


def head_is_embedding(checkpoint: PackedCheckpoint) -> bool:
    """Whether logits are products with the embedding; a head that was quantized on its own is not."""
    return checkpoint.tied and HEAD not in checkpoint.schemes
