"""llama.cpp through llama-cpp-python: its quantizer, with and without an importance matrix, its logits and tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from calibration.sequences import load_tokenizer, pack_sequences
from calibration.sources import load_texts
from compress.checkpoint.gguf.model_metadata import architecture_of
from compress.evaluate.scorers import Scorer
from compress.recipe import CalibrationOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

THREADS = 1


class LlamaScorer(Scorer):
    """Logits that llama.cpp computes of windows of `length` tokens, from a file whose weights stay packed."""

    def __init__(self, path: Path, length: int) -> None:
        from llama_cpp import Llama

        sizes = {"n_ctx": length, "n_batch": length, "n_ubatch": length}
        self._model = Llama(str(path), logits_all=True, verbose=False, n_threads=THREADS, **sizes)
        self.vocab_size = self._model.n_vocab()

    def states(self, tokens: Tensor) -> Tensor:
        """Returns causal logits float32 `[B, T, V]` of int64 tokens `[B, T]`."""
        return torch.stack([self._window(row) for row in tokens.tolist()])

    def _window(self, tokens: Sequence[int]) -> Tensor:
        self._model.reset()
        self._model.eval(tokens)
        return torch.from_numpy(self._model.scores[: len(tokens)].copy())

    def continue_greedily(self, prompt: Sequence[int], count: int) -> list[int]:
        """Returns a prompt followed by `count` tokens, each the most likely one after those before it."""
        tokens = list(prompt)
        self._model.reset()
        self._model.eval(tokens)
        for _ in range(count):
            tokens.append(int(np.argmax(self._model.scores[len(tokens) - 1])))
            self._model.eval(tokens[-1:])
        return tokens


def quantize(dense: Path, out: Path, file_type: int, importance: Mapping[str, Tensor] | None = None) -> Path:
    """Quantizes a file to a mix of llama.cpp.

    Args:
        file_type: its number in llama.cpp.
        importance: mean square of each input float32 `[I]`, by names of tensors in files.

    Raises:
        RuntimeError: llama.cpp refused.
    """
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = file_type, THREADS
    if importance is not None:
        options.imatrix = _importance_array(importance)
    llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
    if status := llama_cpp.llama_model_quantize(str(dense).encode(), str(out).encode(), options):
        raise RuntimeError(f"llama.cpp did not quantize {dense}: status {status}")
    return out


def _ignore(_level: int, _text: bytes, _data: int) -> None: ...


_SILENT: Any = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_ignore)


def _importance_array(importance: Mapping[str, Tensor]) -> Any:
    """Returns a list of structures that ends with one without a name; it keeps the values alive."""
    from llama_cpp import llama_model_imatrix_data

    entries = (llama_model_imatrix_data * (len(importance) + 1))()
    for entry, (name, values) in zip(entries, importance.items(), strict=False):
        numbers = (ctypes.c_float * values.numel())(*values.tolist())
        entry.name, entry.data, entry.size = name.encode(), numbers, values.numel()
    return entries


@torch.inference_mode()
def importance_matrix(model: Path, calibration: CalibrationOptions) -> dict[str, Tensor]:
    """Returns the mean square of each input channel of all linears of a dense model, by names of tensors in files."""
    from transformers import AutoModelForCausalLM

    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    architecture, sums = architecture_of(loaded.config.to_dict()), dict[str, Tensor]()
    for name, module in loaded.named_modules():
        own = architecture.file_name(f"{name}.weight")
        if isinstance(module, torch.nn.Linear) and own is not None:
            module.register_forward_hook(_adding(sums, own))
    text = load_texts(str(calibration.source))
    sizes = {"samples": calibration.samples, "length": calibration.length}
    tokens = pack_sequences(text, load_tokenizer(model), **sizes).tokens
    for row in tokens:
        loaded(row.unsqueeze(0), use_cache=False)
    return {name: (total / tokens.numel()).float() for name, total in sums.items()}


def _adding(sums: dict[str, Tensor], name: str) -> Any:
    def add(_module: torch.nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        squares = inputs[0].flatten(0, -2).double().square().sum(0)
        sums[name] = sums.get(name, torch.zeros_like(squares)) + squares

    return add
