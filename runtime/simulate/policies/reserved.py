"""Length prediction (S3): a request starts once pages for its prompt and its predicted output are free."""

from __future__ import annotations

import random
from collections import deque
from math import exp

from runtime.core.request import Delta
from runtime.simulate.jobs import Job
from runtime.simulate.policies.together import Chunked
from runtime.simulate.policy import POLICIES
from runtime.simulate.worker import Worker


@POLICIES.register(order=2)
class Reserved(Chunked):
    """Chunked prefill whose engines admit by predicted lengths, and preempt only where a prediction was too low."""

    name = "reserved"
    help = "chunked, admitting by predicted output lengths (S3)"

    def build(self) -> list[Worker]:
        self.generator = random.Random(f"{self.setup.seed}/predictions")
        self.waiting: dict[Worker, deque[tuple[Job, int]]] = {}
        self.reserved: dict[Worker, dict[str, int]] = {}
        workers = super().build()
        for worker in workers:
            self.waiting[worker], self.reserved[worker] = deque(), {}
        return workers

    def submit(self, job: Job) -> None:
        worker = self.router.choose(self.workers, job)
        worker.load += 1  # while it waits here
        predicted = job.output_tokens * exp(self.generator.gauss(0, self.setup.prediction_error))
        num_blocks = worker.engine.scheduler.pool.blocks_for(job.prompt_tokens + max(1, round(predicted)))
        self.waiting[worker].append((job, min(num_blocks, worker.runner.num_blocks)))
        self._admit(worker)

    def receive(self, worker: Worker, delta: Delta) -> None:
        super().receive(worker, delta)
        if delta.finish_reason is not None:
            del self.reserved[worker][delta.request_id]
            self._admit(worker)

    def _admit(self, worker: Worker) -> None:
        waiting, reserved = self.waiting[worker], self.reserved[worker]
        while waiting and sum(reserved.values()) + waiting[0][1] <= worker.runner.num_blocks:
            job, reserved[job.name] = waiting.popleft()
            worker.load -= 1
            worker.submit(job.name, job.token_ids(), job.output_tokens)
