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


class RecordedGroup(Group):
    """Records the numbers of rows that the first rank sends to each rank by an all-to-all."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[list[int]] = []

    def exchange(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        self.sent.append(sent)
        return super().exchange(tensor, sent, received)


def on_ranks(
    count: int, work: Callable[[Group], Any], *, has_whole_experts: bool = False, min_tokens: int = 0
) -> list[Any]:
    """Results of what each of some ranks does."""
    store = TCPStore(HOST, 0, count, is_master=True, wait_for_workers=False)

    def run(index: int) -> Any:
        own = store if index == 0 else TCPStore(HOST, store.port, count, is_master=False)
        return work(RecordedGroup(Rank(index, count, has_whole_experts), own, CPU, Others(), min_tokens=min_tokens))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def load_parts(
    folder: Path, count: int, *, has_whole_experts: bool = False, min_tokens: int = 0, **options: Any
) -> list[Decoder]:
    """The part of each rank."""
    options = {"device": "cpu", "dtype": "float64", "kernels": "reference"} | options
    sharing = {"has_whole_experts": has_whole_experts, "min_tokens": min_tokens}
    return on_ranks(count, lambda group: load_model(folder, group=group, **options), **sharing)


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
    return parts_logits(load_parts(folder, count, **options), tokens)


def parts_logits(parts: list[Decoder], tokens: Tensor) -> Tensor:
    """Logits `[T, V]` of one sequence, computed by ranks that have these parts."""
    with ThreadPoolExecutor(len(parts)) as pool, torch.inference_mode():
        return next(iter(pool.map(torch.inference_mode()(whole_logits), parts, [tokens] * len(parts))))
