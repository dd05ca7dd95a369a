"""A step that is read later: its tokens go to the host while the device computes what is submitted next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from runtime.backends.backend import UNDECIDED
from runtime.core.batch import upload
from runtime.core.request import TokenLogprobs
from runtime.core.step import KNOWN, SampledToken, ScheduledSequence, StepOutput
from runtime.sampling.sampler import ERRORS, RowLogprobs

NUM_COPIES = 2
"""Steps that are not read yet: one that is computed, and the one before."""


class DeviceEvent:
    """Marks a place in the work of a device; on a CPU, which works synchronously, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        """Marks what was launched so far on the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Waits for what `record` has marked last."""
        if self._event is not None:
            self._event.synchronize()


@dataclass(frozen=True, slots=True)
class _Copy:
    tokens: Tensor
    arrival: DeviceEvent


class TokenCopies:
    """Room in host memory for the tokens of the last `NUM_COPIES` steps, pinned where the device is a GPU."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        tokens = torch.zeros(NUM_COPIES, num_rows, dtype=torch.int64, pin_memory=is_pinned)
        self._copies = [_Copy(each, DeviceEvent(device)) for each in tokens]

    def send(self, tokens: Tensor) -> Callable[[], Tensor]:
        """Starts a copy of int64 `[n]`. Returns what waits for it; good until `NUM_COPIES` more are started."""
        copy = self._copies.pop(0)
        self._copies.append(copy)
        host = copy.tokens[: len(tokens)]
        host.copy_(tokens, non_blocking=True)
        copy.arrival.record()

        def receive() -> Tensor:
            copy.arrival.wait()
            return host

        return receive


class LogprobCopies:
    """Log-probabilities on their way to the memory of the host, pinned where the device is a GPU."""

    def __init__(self, found: Sequence[RowLogprobs]) -> None:
        self._copies = [RowLogprobs(each.rows, *map(_send, (each.chosen, each.top_ids, each.top))) for each in found]
        self._arrival = DeviceEvent(found[0].chosen.device) if found else None
        if self._arrival is not None:
            self._arrival.record()

    def receive(self) -> dict[int, TokenLogprobs]:
        """Waits for them and returns them by row."""
        if self._arrival is not None:
            self._arrival.wait()
        return dict(chain.from_iterable(self._copies))


def _send(tensor: Tensor) -> Tensor:
    """Starts a copy to the host."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Tokens of a submitted step on its device, which the next step may begin with.

    Attributes:
        tokens: int64 `[n]`, below 0 where none was drawn.
        rows: row of each entry of the step; anything for an entry that samples nothing.
    """

    tokens: Tensor
    rows: Sequence[int]

    def put_into(self, token_ids: Tensor, rows: Sequence[int], entries: Sequence[ScheduledSequence]) -> None:
        """Writes the first tokens of some entries of the next step, those that have a source, to rows of its token
        ids."""
        pairs = zip(rows, (entry.source_row for entry in entries), strict=True)
        known = [(row, self.rows[source]) for row, source in pairs if source != KNOWN]
        if known:
            targets, sources = (_index(each, token_ids.device) for each in zip(*known, strict=True))
            token_ids[targets] = self.tokens[sources].clamp(min=0)


def unread_token(before: DrawnTokens | None, entry: ScheduledSequence) -> Tensor | None:
    """Returns the token, int64 `[]`, that the penalties of an entry count before it is read; None without one."""
    if before is None or entry.source_row == KNOWN or not entry.sequence.request.sampling.has_penalties:
        return None
    return before.tokens[before.rows[entry.source_row]]


def _index(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Index of some rows; of the first ones without an upload."""
    return slice(0, len(rows)) if list(rows) == list(range(len(rows))) else upload(rows, device)


@dataclass(slots=True, eq=False)
class PendingStep:
    """A step without drafts, whose tokens are drawn.

    Attributes:
        entries: those that sample.
        receive: waits for int64 `[n]`, the tokens of the entries.
        sample: makes tokens by sequence id of these, and looks at the logits where they are not decided.
        compute_logprobs: launches what computes the wanted log-probabilities of the tokens on the device.
        is_late: another step has replaced the logits, or began with the tokens as they are.
    """

    entries: Sequence[ScheduledSequence]
    receive: Callable[[], Tensor]
    sample: Callable[[Tensor], dict[str, list[SampledToken]]]
    path: str
    compute_logprobs: Callable[[], Sequence[RowLogprobs]]
    is_late: bool = False
    _logprobs: LogprobCopies | None = None
    feeds_next: ClassVar[bool] = True

    def leave(self) -> None:
        """Takes what is wanted of the logits, which the next step replaces."""
        self.is_late, self._logprobs = True, LogprobCopies(self.compute_logprobs())

    @torch.inference_mode()
    def result(self) -> StepOutput:
        chosen = self.receive()
        return StepOutput(self._decided(chosen.tolist()) if self.is_late else self.sample(chosen), path=self.path)

    def _decided(self, chosen: list[int]) -> dict[str, list[SampledToken]]:
        logprobs = self._logprobs.receive() if self._logprobs else {}
        rows = enumerate(zip(self.entries, chosen, strict=True))
        return {e.sequence.id: [_sampled(token, logprobs.get(row))] for row, (e, token) in rows if token != UNDECIDED}


def _sampled(token: int, logprobs: TokenLogprobs | None) -> SampledToken:
    return SampledToken(token, logprobs) if token >= 0 else SampledToken(-1, error=ERRORS[token])
