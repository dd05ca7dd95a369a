"""Logits of whole windows, from the runtime's own model (what is served) or from transformers (the cross-check)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.checkpoint.errors import CheckpointError
from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.reader import PackedCheckpoint

BACKENDS = ("runtime", "transformers")


class Scorer(Protocol):
    """Anything that gives next-token logits."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Causal logits `[B, T, V]` in float32 (float64 for a float64 model) of int64 tokens `[B, T]`."""
        ...


class RuntimeScorer:
    """The decoder that `runtime serve` runs, with the kernels it runs them with."""

    def __init__(self, path: Path, *, device: str = "auto", dtype: str = "auto", kernels: str = "auto") -> None:
        from runtime.model.load import load_model

        self._decoder = load_model(path, device=device, dtype=dtype, kernels=kernels)

    def logits(self, tokens: Tensor) -> Tensor:
        from runtime.model.scoring import score

        return score(self._decoder, tokens)


class TransformersScorer:
    """transformers' own model class, filled with this project's dequantized weights."""

    def __init__(self, path: Path, *, device: str = "auto", dtype: str = "auto") -> None:
        self._model = load_dequantized(path, dtype=dtype).to("cpu" if device == "auto" else device)

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        logits = self._model(tokens.to(self._model.device), use_cache=False).logits
        return logits if logits.dtype == torch.float64 else logits.float()


def open_scorer(path: Path, backend: str = "runtime", *, device: str = "auto", dtype: str = "auto") -> Scorer:
    """A scorer for a dense or packed checkpoint.

    Args:
        backend: `runtime` or `transformers`.
        dtype: `auto` takes the checkpoint's.
    """
    if backend == "runtime":
        return RuntimeScorer(path, device=device, dtype=dtype)
    return TransformersScorer(path, device=device, dtype=dtype)


def load_dequantized(path: Path, *, dtype: str = "auto") -> Any:
    """A transformers model whose packed linears were replaced by their dequantized weights.

    Raises:
        CheckpointError: a weight of the model that the checkpoint does not hold.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = PackedCheckpoint.open(path)
    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    wanted = getattr(torch, dtype) if dtype != "auto" else config.dtype or torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=wanted)
    model.to_empty(device="cpu")
    missing = model.load_state_dict(_dense_state(checkpoint, model, wanted), strict=False).missing_keys
    model.tie_weights()
    tied = getattr(model, "_tied_weights_keys", None) or ()
    absent = [name for name in missing if not (config.tie_word_embeddings and name in tied)]
    if absent:
        raise CheckpointError(f"{path} lacks {len(absent)} weights, {absent[0]} first", "Run compress verify on it")
    _reset_rotary_buffers(model)
    return model.eval()


def _dense_state(checkpoint: PackedCheckpoint, model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    packed = set(checkpoint.modules)
    state = {f"{module}.weight": _dense(checkpoint.weight(module), dtype) for module in packed}
    names = set(checkpoint.files.names())
    for name, _ in model.named_parameters():
        if name not in state and name in names:
            state[name] = checkpoint.tensor(name).to(dtype)
    return state


def _dense(weight: IntegerWeight | Tensor, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(dtype) if isinstance(weight, IntegerWeight) else weight.to(dtype)


def _reset_rotary_buffers(model: Any) -> None:
    """Non-persistent buffers (rotary frequencies) are in no checkpoint: the module computes them anew."""
    for module in model.modules():
        if hasattr(module, "inv_freq") and hasattr(module, "config"):
            module.__init__(module.config)
