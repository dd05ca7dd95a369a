"""Training of scales, norms and biases by the divergence from the dense model (DWQ in mlx-lm; the second phase of
EfficientQAT, Chen et al. 2024, https://arxiv.org/abs/2407.11062, section 3.3, with the dense model's logits in place of
the next token).

Some sequences are withheld from all steps. The state with the least divergence on them is kept; the start is one of
the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.writer import BlockStore
from compress.common.errors import DataError
from compress.pipeline.capture import BlockInputs
from compress.pipeline.distillation.streamed_model import StreamedModel
from compress.pipeline.distillation.targets import Teacher, top_divergence
from compress.pipeline.memory import first_micro_batch
from compress.pipeline.resume import RunDisplay
from compress.stages.finish import FinishStage

WITHHELD = 8
"""One micro-batch of this many is withheld from training."""
NUM_CHECKS = 10
"""Number of times that the withheld sequences are scored and the state is saved."""
RATE = 0.006
"""Learning rate for a KL of 1 at the start. KL is quadratic in errors of weights: what corrects them is a share of its
square root."""
WARM_UP = 10
"""The learning rate rises for one of this many parts of the steps: the first steps of Adam have all the same size."""
BETAS = (0.9, 0.95)
STATE = "state"


@dataclass(frozen=True, slots=True)
class Finish:
    """Outcome of training.

    Attributes:
        numbers: how many were trained.
        step: after which the best state was seen; 0 if nothing was better than the start.
        kl_before, kl_after: mean divergence on the withheld sequences, in nats per token, of the start and the best.
        trained_sequences, withheld_sequences: of the calibration.
    """

    stage: FinishStage
    numbers: int
    step: int
    kl_before: float
    kl_after: float
    trained_sequences: int
    withheld_sequences: int

    def describe(self) -> str:
        """Returns the outcome in one line."""
        text = f"on {self.withheld_sequences} sequences that no step saw"
        if not self.step:
            return f"nothing changed: no step was better than the start (KL {self.kl_before:.5f} {text})"
        share = 1 - self.kl_after / self.kl_before
        return f"KL {self.kl_before:.5f} -> {self.kl_after:.5f} (-{share:.0%}) {text}, {self.numbers:,} numbers trained"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for the report."""
        return asdict(self)


@dataclass
class Training:
    """Training of one model.

    Attributes:
        store: pieces with targets and state, from which an interrupted training continues.
        seed: of the order of the sequences.
    """

    model: StreamedModel
    teacher: Teacher
    tokens: Tensor
    stage: FinishStage
    seed: int
    store: BlockStore

    def run(self, display: RunDisplay) -> Finish:
        """Trains, and leaves the best state in the model. Raises DataError: too few sequences."""
        stage, (count, length) = self.stage, self.tokens.shape
        micro_batch = min(stage.batch, first_micro_batch(length, self.model.device.type), max(1, count // 2))
        numbers = range(-(-count // micro_batch))
        withheld, trained = numbers[::WITHHELD], [each for each in numbers if each % WITHHELD]
        if not trained:
            raise DataError(f"{count} sequence is too few to train and to select", "Use --num-calibration-samples 64")
        display.step("logits of the dense model")
        self._find_targets(numbers, micro_batch)
        self.model.train_parts(stage.rank, self.seed)
        inputs = self.model.capture(self.tokens, micro_batch)
        state = _State(self.model, self.store)
        if not state.restore():
            state.judge(0, self._divergence(inputs, withheld))
            state.save(0)
        checks = sorted({max(1, round(stage.steps * (number + 1) / NUM_CHECKS)) for number in range(NUM_CHECKS)})
        for done, check in zip([0, *checks], checks, strict=False):
            if check <= state.step:
                continue
            for step in range(done, check):
                display.step(f"step {step + 1} of {stage.steps}", step / stage.steps)
                self._take_step(inputs, step, trained, state)
            found = self._divergence(inputs, withheld)
            state.judge(check, found)
            state.save(check)
            display.say(f"finish: step {check} of {stage.steps}: KL {found:.5f} (start {state.before:.5f})")
        state.leave_best()
        sequences = sum(len(self.tokens[inputs.rows(number)]) for number in withheld)
        sizes = sum(each.numel() for each in self.model.offsets.values())
        return Finish(stage, sizes, state.best_step, state.before, state.best, count - sequences, sequences)

    def _take_step(self, inputs: BlockInputs, step: int, trained: Sequence[int], state: _State) -> None:
        chosen = [*_chosen(step, -(-self.stage.batch // inputs.micro_batch), trained, self.seed)]
        positions = self._num_positions(chosen)
        losses = {number: partial(self._loss, number, 1 / positions) for number in chosen}
        self.model.gradients(inputs, self.tokens, losses)
        largest = self.stage.learning_rate or RATE * math.sqrt(state.before)
        state.descend(largest * _share_of_rate(step, self.stage.steps))

    def _loss(self, number: int, share: float, logits: Tensor) -> Tensor:
        return top_divergence(logits, self._targets(number)) * share

    @torch.no_grad()
    def _divergence(self, inputs: BlockInputs, numbers: Sequence[int]) -> float:
        """Returns the mean divergence of micro-batches in nats per token."""
        outside, total = self.model.outside(), 0.0
        for number, states in zip(numbers, self.model.outputs(inputs, numbers), strict=True):
            logits = self.model.logits(outside, self.tokens[inputs.rows(number)], states)
            total += float(self._loss(number, 1.0, logits))
        return total / self._num_positions(numbers)

    def _num_positions(self, numbers: Sequence[int]) -> int:
        """Returns how many positions of some micro-batches have targets."""
        return sum(self._targets(number)["indices"][..., 0].numel() for number in numbers)

    def _find_targets(self, numbers: Sequence[int], micro_batch: int) -> None:
        """Stores the targets of every micro-batch, unless an earlier process did."""
        if all(self.store.has(_key(number)) for number in numbers):
            return
        for number, found in enumerate(self.teacher.targets(self.tokens, micro_batch, self.stage.top_k)):
            self.store.write(_key(number), found)

    def _targets(self, number: int) -> dict[str, Tensor]:
        piece = self.store.open(_key(number))
        return {name: piece.tensor(name) for name in piece.entries}


class _State:
    """Offsets, moments of Adam and the best offsets seen; twelve bytes for each number, and four for the best."""

    def __init__(self, model: StreamedModel, store: BlockStore) -> None:
        self._offsets: Mapping[str, Tensor] = model.offsets
        self._store = store
        self._adam = torch.optim.Adam(self._offsets.values(), betas=BETAS)
        self._best = {name: offset.detach().clone() for name, offset in self._offsets.items()}
        self.step = self.best_step = 0
        self.before = self.best = float("inf")

    def descend(self, rate: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._adam.zero_grad()

    def judge(self, step: int, divergence: float) -> None:
        """Keeps the offsets if they are the best so far."""
        if step == 0:
            self.before = divergence
        if divergence < self.best:
            self.best, self.best_step = divergence, step
            self._best = {name: offset.detach().clone() for name, offset in self._offsets.items()}

    def save(self, step: int) -> None:
        self.step = step
        tensors = {f"offset {name}": offset.detach().cpu() for name, offset in self._offsets.items()}
        tensors |= {f"best {name}": offset.cpu() for name, offset in self._best.items()}
        for name, offset in self._offsets.items():
            moments = self._adam.state.get(offset, {})
            tensors |= {f"{kind} {name}": moment.cpu() for kind, moment in moments.items()}
        facts = {"step": step, "best_step": self.best_step, "best": self.best, "before": self.before}
        self._store.write(STATE, tensors, facts)

    @torch.no_grad()
    def restore(self) -> bool:
        """Continues from the saved state. Returns whether there is one."""
        if not self._store.has(STATE):
            return False
        piece, facts = self._store.open(STATE), self._store.read_metadata(STATE)
        for name, offset in self._offsets.items():
            offset.copy_(piece.tensor(f"offset {name}"))
            self._best[name].copy_(piece.tensor(f"best {name}"))
            kinds = [kind for kind in ("step", "exp_avg", "exp_avg_sq") if f"{kind} {name}" in piece.entries]
            if kinds:
                moments = {kind: piece.tensor(f"{kind} {name}").clone() for kind in kinds}
                self._adam.state[offset] = {
                    kind: moment if kind == "step" else moment.to(offset.device) for kind, moment in moments.items()
                }
        self.step, self.best_step = facts["step"], facts["best_step"]
        self.best, self.before = facts["best"], facts["before"]
        return True

    @torch.no_grad()
    def leave_best(self) -> None:
        for name, offset in self._offsets.items():
            offset.copy_(self._best[name])


def _share_of_rate(step: int, steps: int) -> float:
    """Returns the part of the learning rate for a step: it rises in the first tenth, and falls linearly to 0."""
    return min(1.0, WARM_UP * (step + 1) / steps) * (1 - step / steps)


def _chosen(step: int, count: int, trained: Sequence[int], seed: int) -> Iterator[int]:
    """Yields the micro-batches of a step: each one comes once in an epoch, in an order that the seed decides."""
    for place in range(step * count, (step + 1) * count):
        epoch, position = divmod(place, len(trained))
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        yield trained[int(torch.randperm(len(trained), generator=generator)[position])]


def _key(number: int) -> str:
    return f"targets-{number:05d}"
