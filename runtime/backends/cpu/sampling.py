"""Compiled sampling and log-probabilities (`sampling.h`)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_char_p, c_void_p
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from compress.cpu.binding import BEST, absence, library, run_job, struct_fields
from runtime.core.batch import SamplingMetadata, penalty_factors, upload, upload_sampling_tensors
from runtime.core.logit_bias import LogitBias


class _Adjustment(ctypes.Structure):
    _fields_ = struct_fields(
        "pointer mask",
        "int64 mask_bytes",
        "pointer bias_ids biases",
        "int64 num_biases",
        "pointer history",
        "int64 num_prompt num_output",
        "double repetition frequency presence",
    )


class _SampledRows(ctypes.Structure):
    _fields_ = struct_fields(
        "int64 rows vocab",
        "pointer logits seeds positions top_k temperature top_p min_p adjustments tokens",
    )


class _LogprobRows(ctypes.Structure):
    _fields_ = struct_fields("int64 rows vocab num_top", "pointer logits token_ids chosen top_ids top")


class CpuSampling:
    """Sampling of float32 logits on CPUs, a few passes over each row.

    Args:
        instruction_set: of the compiled code.
    """

    def __init__(self, instruction_set: int = BEST) -> None:
        self._instruction_set = instruction_set

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str:
        if device.type != "cpu" or dtype != torch.float32:
            return "reads float32 logits on CPUs"
        return "" if library() is not None else absence()

    def sample(self, logits: Tensor, draws: Sequence[SamplingMetadata]) -> Tensor:
        logits = logits.contiguous()
        tokens = torch.empty(len(draws), dtype=torch.int64)
        _, tensors = upload_sampling_tensors(draws, range(len(draws)), logits.device)
        columns = tensors.seeds, tensors.positions, tensors.top_k, tensors.temperature, tensors.top_p, tensors.min_p
        changes = _Adjustments(draws)
        job = _SampledRows(*logits.shape, logits.data_ptr(), *(column.data_ptr() for column in columns))
        job.adjustments, job.tokens = changes.address, tokens.data_ptr()
        run_job("sample_rows", job, self._instruction_set)
        return tokens

    def logprobs(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        logits, wanted = logits.contiguous(), upload(token_ids, logits.device)
        rows, vocab = logits.shape
        top = logits.new_empty(rows, min(num_top, vocab))
        chosen, top_ids = logits.new_empty(rows), torch.empty(top.shape, dtype=torch.int64)
        tensors = logits, wanted, chosen, top_ids, top
        job = _LogprobRows(rows, vocab, top.shape[1], *(each.data_ptr() for each in tensors))
        run_job("logprob_rows", job, self._instruction_set)
        return chosen, top_ids, top


class _Adjustments:
    """Changes of logits as compiled code reads them.

    Attributes:
        address: of one structure per row; None where no row is changed.
    """

    def __init__(self, draws: Sequence[SamplingMetadata]) -> None:
        self.address: int | None = None
        if any(draw.changes_logits for draw in draws):
            self._histories = [_history(draw) for draw in draws]
            self._rows = (_Adjustment * len(draws))(*map(_adjustment, draws, self._histories))
            self.address = ctypes.addressof(self._rows)


def _history(draw: SamplingMetadata) -> array[int]:
    if not draw.sampling.has_penalties:
        return array("q")
    return array("q", chain(draw.prompt_token_ids, draw.output_token_ids))


def _adjustment(draw: SamplingMetadata, history: array[int]) -> _Adjustment:
    """Points at the mask and the bias of a draw and at its history, and keeps none of them."""
    found = _Adjustment(mask=ctypes.cast(c_char_p(draw.mask), c_void_p).value, mask_bytes=len(draw.mask or b""))
    if bias := cast("LogitBias", draw.sampling.logit_bias):
        found.bias_ids, found.num_biases = bias.token_ids.buffer_info()
        found.biases = bias.values.buffer_info()[0]
    if history:
        found.history = history.buffer_info()[0]
        found.num_prompt = len(draw.prompt_token_ids)
        found.num_output = len(history) - found.num_prompt
        found.repetition, found.frequency, found.presence = penalty_factors(draw.sampling)
    return found
