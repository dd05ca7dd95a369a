"""The training loop: optimizers, a schedule, a budget in steps or minutes, snapshots, and a line of progress."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.nn import functional
from torch.optim import Adam, Muon, Optimizer

from demo_training import snapshot
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


def make_optimizers(model: torch.nn.Module, muon_lr: float, adam_lr: float) -> list[Optimizer]:
    """Muon (Jordan et al., 2024) on the matrices, Adam on embeddings, norms and routers."""
    named = dict(model.named_parameters())
    lookups = "embed", "lm_head", ".gate."
    matrices = {n: p for n, p in named.items() if p.ndim == 2 and not any(part in n for part in lookups)}
    others = [parameter for name, parameter in named.items() if name not in matrices]
    return [
        Muon(matrices.values(), lr=muon_lr, weight_decay=0.0, momentum=0.95),
        Adam(others, lr=adam_lr, betas=(0.9, 0.95), eps=1e-8),
    ]


@dataclass
class Trainer:
    model: torch.nn.Module
    learning_rates: tuple[float, float]  # peaks of Muon and Adam
    sampler: Sampler
    budget: Budget
    folder: Path  # for snapshots
    settings: dict[str, object]
    snapshot_minutes: float = 5.0
    compiled: bool = False
    progress: snapshot.Progress = field(default_factory=snapshot.Progress)

    def __post_init__(self) -> None:
        self.optimizers = make_optimizers(self.model, *self.learning_rates)

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
        self.progress = snapshot.restore(self.folder, self.settings, [self.model, *self.optimizers])

    def save(self) -> None:
        snapshot.save(self.folder, self.progress, self.settings, [self.model, *self.optimizers])

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
        scale = learning_rate_scale(self.budget.used(self.progress))
        for optimizer, peak in zip(self.optimizers, self.learning_rates, strict=True):
            optimizer.param_groups[0]["lr"] = peak * scale
            optimizer.step()
            optimizer.zero_grad()
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

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


class Reporter:
    """A live bar on a terminal, a line every half minute elsewhere."""

    def __init__(self, console: Console, budget: Budget) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("training", total=1.0)
        self.console, self.budget, self.every = console, budget, 2.0 if console.is_terminal else 30.0
        self.losses: list[float] = []
        self.last = time.monotonic()

    def add(self, progress: snapshot.Progress, loss: float) -> None:
        self.losses.append(loss)
        used = self.budget.used(progress)
        if time.monotonic() - self.last < self.every and used < 1:
            return
        mean = sum(self.losses) / len(self.losses)
        progress.losses.append((progress.step, round(mean, 4)))
        left = progress.seconds * max(0.0, 1 / used - 1)
        line = (
            f"step {progress.step}  {progress.tokens / 1e6:.2f}M tokens  loss {mean:.3f}  "
            f"{progress.tokens / progress.seconds:,.0f} tokens/s  {left / 60:.1f} min left"
        )
        self.bar.update(self.task, completed=min(used, 1.0), description=line)
        if not self.console.is_terminal:
            self.console.print(line, highlight=False)
        self.losses, self.last = [], time.monotonic()
