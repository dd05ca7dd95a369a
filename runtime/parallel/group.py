"""Collective operations among the ranks of a model, over torch.distributed: gloo on CPUs, NCCL on GPUs.

Imports torch.distributed inside of functions: loaders import this module, and some builds of torch lack it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import partial, reduce
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from compress.common.errors import ToolkitError
from compress.models.cuts import Rank, size
from runtime.core.step import RunnerLostError
from runtime.parallel.stages import Stage

if TYPE_CHECKING:
    from torch.distributed import Store

HOST = "127.0.0.1"
TIMEOUT = timedelta(hours=1)
"""Longest wait of a rank for others. They wait while one compiles kernels, or reads weights from a slow disk."""


class Others:
    """The other ranks, as one that is not the first sees them."""

    def tell(self, message: Any) -> None:
        """Sends a message to all of them. Raises RunnerLostError if one has ended."""

    def explain(self) -> ToolkitError:
        """Says why a collective operation failed."""
        return RunnerLostError("another rank has ended", "See its messages above")

    def close(self) -> None:
        """Ends them."""


class Group:
    """One rank's end of the operations among all. Takes part in no process group that torch knows by default.

    Args:
        rank: its number among those that share the same layers.
        others: ranks that the first one tells what is computed next.
        stage: the layers that these have; None for all.
        host: address of this process, where others reach it on a CPU.
        min_tokens: of a step whose residual stream ranks share by tokens; 0 for none.
    """

    def __init__(
        self,
        rank: Rank,
        store: Store,
        device: torch.device,
        others: Others,
        stage: Stage | None = None,
        host: str = HOST,
        min_tokens: int = 0,
    ) -> None:
        self._min_tokens = min_tokens
        self.rank, self.device, self.others, self.stage = rank, device, others, stage
        self._store = store
        connect = partial(_backend, device=device, host=host)
        self._all = self._summing = self._head = connect(self.index, self.count, store)
        if stage is not None:
            from torch.distributed import PrefixStore

            if rank.count > 1:
                self._summing = connect(rank.index, rank.count, PrefixStore(f"stage {stage.index}", store))
            if self.is_first or stage.is_last:
                index = 0 if self.is_first else 1 + rank.index
                self._head = connect(index, 1 + rank.count, PrefixStore("head", store))

    @property
    def index(self) -> int:
        """Number of this process among all; ranks of one stage follow each other."""
        return self.rank.index + (0 if self.stage is None else self.stage.index * self.rank.count)

    @property
    def count(self) -> int:
        return self.rank.count * (1 if self.stage is None else self.stage.count)

    @property
    def is_first(self) -> bool:
        """Whether this process schedules and samples."""
        return self.index == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Adds up the tensors of all ranks that share the same layers, in place."""
        tensor = tensor.contiguous()
        self._wait(self._summing.allreduce([tensor]))
        return tensor

    def own_rows(self, num_tokens: int) -> slice:
        """Returns the tokens of a step whose residual stream this rank has: all, or its share in steps of many tokens
        (sequence parallelism, arXiv:2205.05198, section 4.2.2)."""
        return self._rows(num_tokens, self.rank.index) if self._shares(num_tokens) else slice(0, num_tokens)

    def sum_rows(self, parts: Tensor) -> Tensor:
        """Adds up the tensors `[T, C]` of all ranks that share the same layers; returns `own_rows` of the sum.

        The reduce-scatter is an all-to-all and a sum: so shares may have other sizes, on all backends.
        """
        if not self._shares(num_tokens := len(parts)):
            return self.sum(parts)
        sizes = [size(self._rows(num_tokens, index)) for index in range(self.rank.count)]
        found = self.exchange(parts, sizes, [sizes[self.rank.index]] * self.rank.count)
        return reduce(torch.add, found.view(self.rank.count, -1, *parts.shape[1:]).unbind())

    def gather_rows(self, own: Tensor, num_tokens: int) -> Tensor:
        """Returns rows `[T, C]` of all tokens of a step, of which this rank has `own_rows` or all."""
        if len(own) == num_tokens:
            return own
        largest = size(self._rows(num_tokens, 0))
        found = own.new_empty(self.rank.count * largest, *own.shape[1:])
        own = own if len(own) == largest else functional.pad(own, (0, 0, 0, largest - len(own)))
        self._wait(self._summing._allgather_base(found, own.contiguous()))
        return found[:num_tokens]

    def exchange(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Sends rows to each of the ranks that share the same layers; returns those that they send to this one.

        Args:
            sent, received: how many, by rank.
        """
        found = tensor.new_empty(sum(received), *tensor.shape[1:])
        self._wait(self._summing.alltoall_base(found, tensor.contiguous(), received, sent))
        return found

    def _shares(self, num_tokens: int) -> bool:
        return self.rank.count > 1 and num_tokens > 1 and 0 < self._min_tokens <= num_tokens

    def _rows(self, num_tokens: int, index: int) -> slice:
        """Returns the share of a rank: those of the last ones are shorter, such that padding is at the end."""
        most = -(-num_tokens // self.rank.count)
        return slice(min(num_tokens, index * most), min(num_tokens, (index + 1) * most))

    def send(self, tensor: Tensor, index: int) -> None:
        """Sends a tensor to the process of this number."""
        self._wait(self._all.send([tensor.contiguous()], index, 0))

    def receive(self, tensor: Tensor, index: int) -> Tensor:
        """Fills a tensor with the one that the process of this number sends."""
        self._wait(self._all.recv([tensor], index, 0))
        return tensor

    def least(self, number: int) -> int:
        """Returns the least number of all ranks."""
        from torch.distributed import ReduceOp

        found = torch.tensor([number], device=self.device)
        self._wait(self._all.allreduce([found], ReduceOp.MIN))
        return int(found)

    def collect_names(self, names: Iterable[str]) -> list[str]:
        """Returns those that any rank gives, each once. All ranks take part."""
        self._store.set(f"names {self.index}", "\n".join(names))
        self.least(0)  # now all have given theirs
        given = (self._store.get(f"names {index}").decode().split("\n") for index in range(self.count))
        return list(dict.fromkeys(chain.from_iterable(given)))

    def broadcast(self, tensor: Tensor) -> None:
        """Copies a tensor of the first rank into those of all others that have a part of the output head."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._wait(self._head.broadcast([tensor], options))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of the same ranks, of one shape, to the first one; nothing to others."""
        from torch.distributed import GatherOptions

        options = GatherOptions()
        options.rootRank = 0
        count = self.rank.count + (self.stage is not None)
        found = [torch.empty_like(tensor) for _ in range(count)] if self.is_first else []
        self._wait(self._head.gather([found] if found else [], [tensor.contiguous()], options))
        return found

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self.others.explain() from error


def _backend(index: int, count: int, store: Store, device: torch.device, host: str) -> Any:
    from torch import distributed

    if device.type == "cuda":
        kind: Any = distributed.ProcessGroupNCCL
        options = kind.Options()
    else:
        kind = distributed.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=host)]
    options._timeout = TIMEOUT
    return kind(store, index, count, options)
