"""Prompts and decodes in the same steps, as this runtime serves: in chunks, or whole."""

from __future__ import annotations

from dataclasses import replace

from runtime.core.config import RuntimeConfig
from runtime.simulate.policy import POLICIES, WHOLE, Policy
from runtime.simulate.worker import Worker


@POLICIES.register()
class Chunked(Policy):
    """Chunked prefill: the scheduler as it is."""

    name = "chunked"
    help = "chunked prefill within --max-itl, as runtime serve does"

    def build(self) -> list[Worker]:
        runners = (self.setup.runner() for _ in range(self.setup.num_devices))
        return [Worker(self.events, runner, self.config(), self.receive) for runner in runners]

    def config(self) -> RuntimeConfig:
        """Returns the configuration of an engine."""
        return self.setup.config


@POLICIES.register(order=1)
class Whole(Chunked):
    """Prompts as a whole, for which all decodes wait."""

    name = "whole"
    help = "a prompt is one span of a step, and all decodes wait for it"

    def config(self) -> RuntimeConfig:
        return replace(self.setup.config, max_num_batched_tokens=WHOLE, prefill_chunk=WHOLE, max_itl_ms=0)
