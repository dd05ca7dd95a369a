"""Prefill and decode on devices apart (DistServe): keys and values of a prompt move once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from runtime.core.config import RuntimeConfig
from runtime.core.request import Delta
from runtime.simulate.jobs import Job
from runtime.simulate.policy import POLICIES, WHOLE, Policy
from runtime.simulate.worker import Worker


@POLICIES.register(order=4)
class Apart(Policy):
    """Some devices compute prompts and first tokens, the others all further tokens.

    A device sends the keys and values of one prompt after the other, at the bandwidth of its link. The pages of a
    sequence are free on the first device once its first token is known.
    """

    name = "apart"
    help = "prefill and decode on devices apart (DistServe); --prefill-devices, --bandwidth"
    least_devices = 2

    def build(self) -> list[Worker]:
        number = self.setup.num_devices
        num_prefill = min(max(1, self.setup.prefill_devices or number // 2), number - 1)
        runners = [self.setup.runner() for _ in range(number)]
        prefill, decode = runners[:num_prefill], runners[num_prefill:]
        self.prefill = [Worker(self.events, runner, self.setup.config, self.first_token) for runner in prefill]
        self.decode = [Worker(self.events, runner, self.decode_config(), self.receive) for runner in decode]
        self.jobs: dict[str, Job] = {}
        self.link_free = dict.fromkeys(self.prefill, 0.0)
        return [*self.prefill, *self.decode]

    def decode_config(self) -> RuntimeConfig:
        """Returns the configuration for decodes. Prompts are given, so the tokens of a step do not limit it."""
        return replace(
            self.setup.config,
            max_num_batched_tokens=WHOLE,
            prefill_chunk=WHOLE,
            max_itl_ms=0,
            prefix_caching=False,
        )

    def submit(self, job: Job) -> None:
        self.jobs[job.name] = job
        self.router.choose(self.prefill, job).submit(job.name, job.token_ids(), 1)

    def move_seconds(self, job: Job) -> float:
        """Returns the time that the keys and values of a prompt take from device to device."""
        return job.prompt_tokens * self.setup.costs.kv_bytes / self.setup.bandwidth

    def next_worker(self, first: Worker) -> Worker:
        """Returns the engine that goes on with a request of an engine for prompts."""
        return min(self.decode, key=lambda worker: worker.load)

    def first_token(self, worker: Worker, delta: Delta) -> None:
        """Delivers the first token of a request, and moves its keys and values."""
        job = self.jobs.pop(delta.request_id)
        if job.output_tokens == 1:
            self.deliver(delta)
            return
        self.deliver(replace(delta, finish_reason=None))
        self.link_free[worker] = max(self.events.now, self.link_free[worker]) + self.move_seconds(job)
        self.events.at(self.link_free[worker], partial(self._go_on, worker, job))

    def _go_on(self, first: Worker, job: Job) -> None:
        self.next_worker(first).submit(job.name, (*job.token_ids(), 0), job.output_tokens - 1, given=job.prompt_tokens)
