"""Ranks of a model in threads of one process, which sum and gather as processes do."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from compress.models.cuts import Rank
from runtime.backends.scores import DenseAttention
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model
from runtime.parallel.group import HOST, Group, Others
from runtime.parallel.vocabulary import ProductWanted

CPU = torch.device("cpu")


def on_ranks(count: int, work: Callable[[Group], Any], *, has_whole_experts: bool = False) -> list[Any]:
    """Results of what each of some ranks does."""
    store = TCPStore(HOST, 0, count, is_master=True, wait_for_workers=False)

    def run(index: int) -> Any:
        own = store if index == 0 else TCPStore(HOST, store.port, count, is_master=False)
        return work(Group(Rank(index, count, has_whole_experts), own, CPU, Others()))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def load_parts(folder: Path, count: int, *, has_whole_experts: bool = False, **options: Any) -> list[Decoder]:
    """The part of each rank."""
    options = {"device": "cpu", "dtype": "float64", "kernels": "reference"} | options
    return on_ranks(
        count, lambda group: load_model(folder, group=group, **options), has_whole_experts=has_whole_experts
    )


def whole_logits(decoder: Decoder, tokens: Tensor) -> Tensor | None:
    """Logits `[T, V]` of one sequence; None of a rank that only follows. Called on all ranks at once."""
    length, positions = len(tokens), torch.arange(len(tokens))
    attention = DenseAttention(length, decoder.config.windows, decoder.dtype, CPU, decoder.scores)
    hidden = decoder.forward(tokens, positions, attention, None, decoder.whole_states([length]))
    group = getattr(decoder.head, "group", None)
    if group is None or group.rank.is_first:
        return decoder.logits(hidden)
    decoder.head.follow(ProductWanted(length), decoder.config.spec.hidden_size, decoder.dtype)
    return None


def shared_logits(folder: Path, count: int, tokens: Tensor, **options: Any) -> Tensor:
    """Logits `[T, V]` of one sequence, computed by some ranks."""
    parts = load_parts(folder, count, **options)
    with ThreadPoolExecutor(count) as pool, torch.inference_mode():
        return next(iter(pool.map(torch.inference_mode()(whole_logits), parts, [tokens] * count)))
