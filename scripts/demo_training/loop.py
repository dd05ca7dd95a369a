"""The training loop: a schedule, a budget in steps or minutes, snapshots, and a line of progress."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.nn import functional

from demo_training import snapshot
from demo_training.optimizer import MuonAdam
from demo_training.texts import Sampler


@dataclass(frozen=True)
class Budget:
    """End of a run: a number of steps, or of minutes of training, whichever is given."""

    steps: int | None = None
    minutes: float | None = None

    def used(self, progress: snapshot.Progress) -> float:
        by_steps = progress.step / self.steps if self.steps else 0.0
        by_time = progress.seconds / (60 * self.minutes) if self.minutes else 0.0
        return max(by_steps, by_time)


def learning_rate_scale(used: float, warm_up: float = 0.02, decay: float = 0.5) -> float:
    """Up linearly, then constant, then down linearly to nothing over the last `decay` of the budget."""
    return max(0.0, min(1.0, (used + 1e-3) / warm_up, (1 - used) / decay))


@dataclass
class Trainer:
    model: torch.nn.Module
    optimizer: MuonAdam
    sampler: Sampler
    budget: Budget
    folder: Path  # for snapshots
    settings: dict[str, object]
    snapshot_minutes: float = 5.0
    compiled: bool = False
    progress: snapshot.Progress = field(default_factory=snapshot.Progress)

    def run(self, console: Console) -> snapshot.Progress:
        loss_of = torch.compile(self.loss, dynamic=False) if self.compiled else self.loss
        self.load()
        report, saved = Reporter(console, self.budget), time.monotonic()
        with report.bar:
            while self.budget.used(self.progress) < 1:
                report.add(self.progress, self.step(loss_of))
                if time.monotonic() - saved > 60 * self.snapshot_minutes:
                    self.save()
                    saved = time.monotonic()
        self.save()
        return self.progress

    def load(self) -> None:
        self.progress = snapshot.restore(self.folder, self.settings, self.optimizer)

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def step(self, loss_of: Callable[[Tensor], Tensor]) -> float:
        began = time.monotonic()
        ids = torch.from_numpy(self.sampler(self.progress.step)).to(self.device)
        loss = loss_of(ids)
        loss.backward()
        value = float(loss.detach())
        if value != value:
            raise FloatingPointError(f"the loss is not a number at step {self.progress.step}: lower the learning rates")
        self.optimizer.step(self.progress.step, learning_rate_scale(self.budget.used(self.progress)))
        self.progress.step += 1
        self.progress.tokens += ids.shape[0] * (ids.shape[1] - 1)
        self.progress.seconds += time.monotonic() - began
        return value

    def loss(self, ids: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bool(self.settings["autocast"])):
            hidden = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = functional.linear(hidden.flatten(0, 1), self.model.lm_head.weight).float()
            chosen = logits.gather(1, ids[:, 1:].reshape(-1, 1)).squeeze(1)
            return (logits.logsumexp(-1) - chosen).mean()

    def save(self) -> None:
        snapshot.save(self.folder, self.progress, self.settings, self.optimizer)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


class Reporter:
    """A live bar on a terminal, a line every half minute elsewhere."""

    def __init__(self, console: Console, budget: Budget) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
        self.bar = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("training", total=1.0)
        self.console, self.budget, self.every = console, budget, 2.0 if console.is_terminal else 30.0
        self.losses: list[float] = []
        self.last, self.last_tokens, self.last_used = time.monotonic(), -1, 0.0

    def add(self, progress: snapshot.Progress, loss: float) -> None:
        self.losses.append(loss)
        used = self.budget.used(progress)
        if self.last_tokens < 0:  # the first step compiles: it says nothing about speed
            self.last_tokens, self.last_used, self.last = progress.tokens, used, time.monotonic()
        passed = time.monotonic() - self.last
        if passed < self.every and used < 1:
            return
        mean = sum(self.losses) / len(self.losses)
        progress.losses.append((progress.step, round(mean, 4)))
        rate = (progress.tokens - self.last_tokens) / max(passed, 1e-9)
        left = max(0.0, 1 - used) * passed / max(used - self.last_used, 1e-9)
        self._show(progress, mean, rate, left, used)
        self.losses, self.last = [], time.monotonic()
        self.last_tokens, self.last_used = progress.tokens, used

    def _show(self, progress: snapshot.Progress, loss: float, rate: float, left: float, used: float) -> None:
        line = (
            f"step {progress.step}  {progress.tokens / 1e6:.2f}M tokens  loss {loss:.3f}  "
            f"{rate:,.0f} tokens/s  {left / 60:.1f} min left"
        )
        self.bar.update(self.task, completed=min(used, 1.0), description=line)
        if not self.console.is_terminal:
            self.console.print(line, highlight=False)
