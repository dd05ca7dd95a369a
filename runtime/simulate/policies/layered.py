"""Layered prefill: a step computes some layers of whole prompts, instead of all layers of chunks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from runtime.core.request import Delta
from runtime.core.step import StepPlan
from runtime.simulate.costs import StepSize, span_size, total_size
from runtime.simulate.policies.together import Whole
from runtime.simulate.policy import POLICIES
from runtime.simulate.worker import VirtualRunner, Worker


class Waiting(NamedTuple):
    """A request whose prompt the engine does not have yet."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int

    @property
    def size(self) -> StepSize:
        return span_size(0, len(self.prompt), samples=True)


NOTHING = StepSize()


@dataclass
class LayeredRunner(VirtualRunner):
    """A runner whose steps compute one of `parts` equal groups of layers of prompts.

    Attributes:
        group: size of the prompts that are computed and that the engine does not have yet.
    """

    group: StepSize = NOTHING
    parts: int = 1

    def seconds_of(self, plan: StepPlan) -> float:
        sizes = [(entry.num_tokens > 1, self.size_of(entry)) for entry in plan.entries]
        decodes = total_size(size for is_prompt, size in sizes if not is_prompt)
        both = total_size([self.group, *(size for _, size in sizes)])
        alone = self.costs.of_step(decodes)
        return alone + (self.costs.of_step(both) - alone) / self.parts


@dataclass(eq=False)
class LayeredWorker(Worker):
    """An engine that gets prompts for the step of their last layers; the steps before it take time for them.

    Attributes:
        waiting: requests in order of arrival.
        group: requests whose prompts are computed.
        steps_left: steps of the group, the last one included.
    """

    runner: LayeredRunner
    chunk: int = 256
    waiting: deque[Waiting] = field(default_factory=deque)
    group: list[Waiting] = field(default_factory=list)
    steps_left: int = 0

    def submit(self, request_id: str, prompt: tuple[int, ...], max_tokens: int, given: int = 0) -> None:
        self.load += 1
        self.waiting.append(Waiting(request_id, prompt, max_tokens))
        self.start()

    @property
    def has_work(self) -> bool:
        return bool(self.group or self.waiting) or self.engine.has_work

    def step(self) -> list[Delta]:
        if not self.group:
            self._take_group()
        self.steps_left -= 1
        if self.group and self.steps_left == 0:
            for each in self.group:
                self.add(each.request_id, each.prompt, each.max_tokens)
            self.group.clear()
        self.runner.group = total_size(each.size for each in self.group)
        if self.engine.has_work:
            return self.engine.step()
        self.runner.now += self.runner.seconds_of(StepPlan(()))
        return []

    def _take_group(self) -> None:
        """Takes waiting prompts up to the tokens of a chunk, at least one, as far as the engine can admit them."""
        scheduler = self.engine.scheduler
        room, pages = scheduler.config.max_num_seqs - len(scheduler.running), scheduler.pool.num_free
        num_tokens = 0
        while self.waiting and not self.engine.scheduler.waiting and len(self.group) < room:
            num_prompt = len(self.waiting[0].prompt)
            pages -= scheduler.pool.blocks_for(num_prompt) + 1
            if pages < len(scheduler.running) or (self.group and num_tokens + num_prompt > self.chunk):
                break
            num_tokens += num_prompt
            self.group.append(self.waiting.popleft())
        # As many groups of layers as there would be chunks.
        self.runner.parts = self.steps_left = max(1, ceil(num_tokens / self.chunk))


@POLICIES.register(order=3)
class Layered(Whole):
    """Layered prefill, in as many groups of layers as a prompt would have chunks."""

    name = "layered"
    help = "a step computes a group of layers of whole prompts (layered prefill); --prefill-chunk"

    def build(self) -> list[Worker]:
        setup, config = self.setup, self.config()
        runners = (
            LayeredRunner(setup.costs, setup.num_blocks, setup.costs.max_model_len) for _ in range(setup.num_devices)
        )
        chunk = setup.config.max_span_tokens
        return [LayeredWorker(self.events, runner, config, self.receive, chunk=chunk) for runner in runners]
