"""Policies: how devices share requests. A file in `policies` registers one. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from compress.common.registry import Registry
from runtime.core.config import RuntimeConfig
from runtime.core.request import Delta
from runtime.simulate.costs import MeasuredCosts
from runtime.simulate.jobs import Job
from runtime.simulate.routing import ROUTERS
from runtime.simulate.worker import Events, VirtualRunner, Worker

WHOLE = 2**20
"""Tokens of a step that no prompt fills."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Devices, engines and links that policies are compared on.

    Attributes:
        config: sizes of steps and limits of each engine.
        router: name of a router.
        token_seconds: longest time per output token that is good, if there is a limit.
        bandwidth: bytes per second between two devices.
        prefill_devices: devices for prompts alone; None is half of all.
        prediction_error: standard deviation of the logarithm of predicted over true lengths.
    """

    costs: MeasuredCosts
    config: RuntimeConfig
    num_devices: int = 1
    router: str = "least-loaded"
    token_seconds: float | None = None
    bandwidth: float = 25e9
    prefill_devices: int | None = None
    prediction_error: float = 0.5
    seed: int = 0

    @property
    def num_blocks(self) -> int:
        """Pages of the KV cache of a device."""
        return self.costs.kv_tokens // self.config.block_size

    def fits(self, job: Job) -> bool:
        """Returns whether the context and the KV cache of a device hold a request."""
        return job.num_tokens <= min(self.costs.max_model_len, self.num_blocks * self.config.block_size)

    def runner(self) -> VirtualRunner:
        """Returns the runner of a device."""
        return VirtualRunner(self.costs, self.num_blocks, self.costs.max_model_len)


class Policy(ABC):
    """A way in which the devices of a simulation share its requests.

    Args:
        deliver: is told of tokens of answers at the time of an event.

    Attributes:
        workers: all engines.
        least_devices: devices without which it is not possible.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    least_devices: ClassVar[int] = 1

    def __init__(self, setup: Setup, events: Events, deliver: Callable[[Delta], None]) -> None:
        self.setup = setup
        self.events = events
        self.deliver = deliver
        self.workers = self.build()
        self.router = ROUTERS[setup.router]()

    @abstractmethod
    def build(self) -> list[Worker]:
        """Returns the engines of all devices."""

    def submit(self, job: Job) -> None:
        """Takes a request at the time of its event."""
        worker = self.router.choose(self.workers, job)
        worker.submit(job.name, job.token_ids(), job.output_tokens)

    def receive(self, worker: Worker, delta: Delta) -> None:
        """Takes the tokens of a step of an engine."""
        self.deliver(delta)


POLICIES: Registry[type[Policy]] = Registry("policy", "runtime.simulate.policies")
