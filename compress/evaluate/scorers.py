"""Logits of whole windows, from the runtime's model (as served) or from transformers (a cross-check)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.checkpoint.expert_files import join_experts
from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme
from compress.checkpoint.meta_model import auto_class, read_transformers_config
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.state_dtype import STATE_FLOAT32
from compress.common.errors import CheckpointError, DataError, NumericsError
from compress.evaluate.positions import Distribution
from compress.models.wrappers import OUTER

if TYPE_CHECKING:
    from runtime.core.model_config import DecoderConfig

BACKENDS = ("runtime", "transformers")


class Scorer(ABC):
    """Source of next-token distributions.

    Attributes:
        vocab_size: numbers that `predict` gives for each position.
    """

    vocab_size: int

    @abstractmethod
    def states(self, tokens: Tensor) -> Any:
        """Returns what predictions are made from, `[B, T, ...]`, of int64 tokens `[B, T]`; slices of it are taken."""

    def head(self, states: Tensor) -> Tensor:
        """Returns causal logits `[B, T, V]` in float32 (float64 for a float64 model)."""
        return states

    def predict(self, states: Any, who: str) -> Distribution:
        """Returns log-probabilities of a slice of states. Raises NumericsError: `who` gave NaN or infinite logits."""
        logits = self.head(states)
        if not torch.isfinite(logits).all():
            raise NumericsError(f"{who} gave NaN or infinite logits", "Run compress verify on the checkpoint")
        return torch.log_softmax(logits, dim=-1)

    def logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits of whole windows, which take B * T * V * 4 bytes."""
        return self.head(self.states(tokens))


class RuntimeScorer(Scorer):
    """The decoder of `runtime serve`, with its kernels.

    Attributes:
        kv_cache: form in which keys and values are cached and read.
        state_dtype: dtype in which recurrent states are kept.

    Args:
        as_dense: dequantizes packed weights at load, as transformers' model always does.
    """

    def __init__(
        self,
        path: Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kernels: str = "auto",
        kv_cache: KVCacheScheme = UNCOMPRESSED,
        as_dense: bool = False,
        trust_remote_code: bool = False,
        state_dtype: str = STATE_FLOAT32,
    ) -> None:
        from runtime.model.loader import load_model

        self.decoder = load_model(
            path, device=device, dtype=dtype, kernels=kernels, as_dense=as_dense, trust_remote_code=trust_remote_code
        )
        check_states(self.decoder.config, path, state_dtype)
        self.vocab_size = self.decoder.config.spec.vocab_size
        self.kv_cache, self.state_dtype = kv_cache, state_dtype

    def states(self, tokens: Tensor) -> Tensor:
        from runtime.model.scoring import hidden_states

        return hidden_states(self.decoder, tokens, self.kv_cache, self.state_dtype)

    def reading(self, kv_cache: KVCacheScheme) -> RuntimeScorer:
        """Returns a scorer of the same decoder that reads keys and values in another form."""
        other = copy(self)
        other.kv_cache = kv_cache
        return other

    @torch.inference_mode()
    def head(self, states: Tensor) -> Tensor:
        return self.decoder.logits(states.flatten(0, 1)).view(*states.shape[:2], -1)


def check_states(config: DecoderConfig, path: Path, state_dtype: str) -> None:
    """Raises DataError where a model has no states to keep in a dtype."""
    if state_dtype != STATE_FLOAT32 and not config.state_fields:
        raise DataError(f"{path} has no recurrent layers", "Leave out --state-dtype")


class TransformersScorer(Scorer):
    """transformers' model class with dequantized weights."""

    def __init__(self, path: Path, *, device: str = "auto", dtype: str = "auto") -> None:
        self._model = load_dequantized(path, dtype=dtype).to("cpu" if device == "auto" else device)
        self.vocab_size = self._model.config.get_text_config().vocab_size

    @torch.inference_mode()
    def states(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self._model(tokens.to(self._model.device), use_cache=False).logits
        return logits if logits.dtype == torch.float64 else logits.float()


def default_backend(folder: Path) -> str:
    """Names the backend that computes the checkpoint in a folder: `transformers` where the runtime refuses it."""
    from runtime.model.loader import read_model

    try:
        read_model(PackedCheckpoint.open(folder))
    except CheckpointError:
        return "transformers"
    return "runtime"


def open_scorer(
    path: Path, backend: str = "runtime", *, device: str = "auto", dtype: str = "auto", **options: Any
) -> Scorer:
    """Opens a scorer for a dense or packed checkpoint; `options` of `RuntimeScorer` hold for backend `runtime` only."""
    if backend == "runtime":
        return RuntimeScorer(path, device=device, dtype=dtype, **options)
    return TransformersScorer(path, device=device, dtype=dtype)


def load_dequantized(path: Path, *, dtype: str = "auto") -> Any:
    """Loads a transformers model with its packed linears dequantized, by the names and buffers that it converts itself.
    Raises CheckpointError: the checkpoint lacks a weight, or one has another shape."""
    from accelerate import init_empty_weights

    checkpoint = PackedCheckpoint.open(path)
    config = read_transformers_config(path, checkpoint.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    wanted = checkpoint.dtype if dtype == "auto" else getattr(torch, dtype)
    with init_empty_weights():
        model_class: Any = type(auto_class(config.model_type).from_config(config))
    # Grouped products of experts are 16-bit only.
    options = {"dtype": wanted, "experts_implementation": "eager", "ignore_mismatched_sizes": True}
    state = _dense_state(checkpoint, wanted)
    model, loading = model_class.from_pretrained(
        None, config=config, state_dict=state, output_loading_info=True, **options
    )
    if misshapen := sorted(loading["mismatched_keys"]):
        name, found, expected = misshapen[0]
        raise CheckpointError(
            f"{path} does not fit its own config.json: {name} has shape {tuple(found)}, not {tuple(expected)}",
            "Run compress verify on it",
        )
    if absent := sorted(loading["missing_keys"]):
        raise CheckpointError(f"{path} lacks {len(absent)} weights, {absent[0]} first", "Run compress verify on it")
    return model.eval()


def _dense_state(checkpoint: PackedCheckpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns every tensor under its name in a dense checkpoint of the text model, packed modules dequantized."""
    others = checkpoint.files.other_parts
    state = {f"{module}.weight": checkpoint.values(module, dtype) for module in checkpoint.modules}
    state |= {name: checkpoint.tensor(name) for name in checkpoint.dense_names() if name not in others}
    # Only the text model of a multimodal model.
    return join_experts(state, {key: value for key, value in checkpoint.config.items() if key != OUTER})
