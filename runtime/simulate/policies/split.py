"""Prefill and decode at the same time on parts of one device, whose split moves (Nexus)."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.engine.step_costs import STEP_PART
from runtime.simulate.jobs import Job
from runtime.simulate.policies.apart import Apart
from runtime.simulate.policy import POLICIES
from runtime.simulate.worker import Worker

LEAST_PART = 0.1
"""Part of a device that each engine has at least while both are busy."""


@dataclass(eq=False)
class PartWorker(Worker):
    """An engine on a part of a device while the other engine of the device is busy, and on all of it otherwise. A step
    in a part `s` takes `1 / s` as long.

    Attributes:
        busy_part: part of this engine while both are busy.
        token_seconds: time of a step that this engine's part should allow; None leaves the parts as they are.
        other: the other engine.
    """

    busy_part: float = 0.5
    token_seconds: float | None = None
    other: list[PartWorker] = field(default_factory=list)

    def begin(self) -> None:
        self.runner.part = 1.0
        super().begin()
        self._move_split(self.runner.now - self.events.now)
        if all(other.is_stepping for other in self.other):
            for worker in (self, *self.other):
                worker.resize(worker.busy_part)

    def end(self) -> None:
        super().end()
        if not self.is_busy:
            for other in self.other:
                other.resize(1.0)

    def _move_split(self, seconds: float) -> None:
        """Takes the part in which a step keeps the limit that takes `seconds` on the whole device."""
        if self.token_seconds is not None:
            wanted = seconds / (STEP_PART * self.token_seconds)
            self.busy_part = min(max(wanted, LEAST_PART), 1 - LEAST_PART)
            for other in self.other:
                other.busy_part = 1 - self.busy_part


@POLICIES.register(order=5)
class Split(Apart):
    """Two engines on each device: one for prompts and one for decodes, between which keys and values need not move."""

    name = "split"
    help = "prefill and decode at once on parts of each device, split by the limit of tpot or itl (Nexus)"
    least_devices = 1

    def build(self) -> list[Worker]:
        self.jobs: dict[str, Job] = {}
        self.partners = dict(self._device() for _ in range(self.setup.num_devices))
        self.prefill = [*self.partners]
        self.link_free = dict.fromkeys(self.prefill, 0.0)
        return [*self.prefill, *self.partners.values()]

    def _device(self) -> tuple[Worker, Worker]:
        """Returns the engines of a device, for prompts and for decodes."""
        runner, setup = self.setup.runner, self.setup
        prefill = PartWorker(self.events, runner(), setup.config, self.first_token)
        decode = PartWorker(
            self.events, runner(), self.decode_config(), self.receive, token_seconds=setup.token_seconds
        )
        prefill.other.append(decode)
        decode.other.append(prefill)
        return prefill, decode

    def move_seconds(self, job: Job) -> float:
        return 0.0

    def next_worker(self, first: Worker) -> Worker:
        return self.partners[first]
