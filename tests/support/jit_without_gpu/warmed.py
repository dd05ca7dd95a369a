"""A decoder that is warmed up without a GPU, and then serves requests of all kinds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jit_without_gpu.builds import Build
from jit_without_gpu.cases import FORMS
from jit_without_gpu.decoders import GREEDY, make_decoder, make_runner
from jit_without_gpu.session import DEVICE, gpu_without_hardware
from runtime.backends.triton.kernel_cache import cache_folder, kernel_facts, noting_entries, pack_kernels
from runtime.core.config import RuntimeConfig
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import ScheduledSequence, StepPlan
from runtime.runner.runner import ModelRunner
from runtime.runner.warm_up import warm_up

PLAIN = (GREEDY, SamplingParams(temperature=1), SamplingParams(temperature=1, top_p=0.9))
PENALIZED = SamplingParams(temperature=1, presence_penalty=0.5, top_k=5)
"""Only captured steps draw penalized tokens without the host's help, which needs numbers."""
NUM_STEPS = 200


@dataclass(frozen=True)
class Warmed:
    """Builds of the warm-up, and those that requests made afterwards.

    Attributes:
        reported: stages that were reported, each with its last number of parts.
    """

    before: list[Build]
    after: list[Build]
    reported: dict[str, int]


def warm_up_and_serve(form: str, archive: Path | None = None, **options: object) -> Warmed:
    """Warms up one layer of an 8B decoder, serves random steps, and packs what was compiled.

    Args:
        options: of the configuration.
    """
    sizes = {"max_num_seqs": 20, "num_blocks": 1024, "max_num_batched_tokens": 256, "prefill_chunk": 100}
    config, reported = RuntimeConfig(**(sizes | {"warm_up": True} | options)), dict[str, int]()
    with gpu_without_hardware() as gpu, noting_entries() as entries:
        case = FORMS[form]
        runner = make_runner(make_decoder(case.read_config(num_hidden_layers=1), case.scheme, case.head), config)
        warm_up(runner, config, lambda stage, done, total: reported.update({stage: total}))
        number = len(gpu.builds)
        for plan in random_steps(runner, config):
            runner.execute(plan)
        if archive is not None:
            pack_kernels(cache_folder(), archive, facts=kernel_facts(DEVICE), only=entries)
        return Warmed(gpu.builds[:number], gpu.builds[number:], reported)


def random_steps(runner: ModelRunner, config: RuntimeConfig) -> Iterator[StepPlan]:
    """Prompts, chunks of prompts after earlier ones, decodes, and steps with all of them."""
    draw = random.Random(0)
    for _ in range(NUM_STEPS):
        sampling, most = draw.choice(PLAIN), config.num_speculative_tokens * bool(config.speculative_model)
        others = PLAIN if most else (*PLAIN, PENALIZED)
        prompts = [(0, draw.randint(1, 20), 0, sampling) for _ in range(draw.randint(0, 3))]
        chunks = [(draw.randint(1, 4000), draw.randint(1, 70), 0, sampling)][: draw.randint(0, 1)]
        contexts = [int(2 ** draw.uniform(0, 12.5)) for _ in range(draw.choice([0, 1, draw.randint(2, 16)]))]
        decodes = [(context, 1, draw.randint(0, most), draw.choice(others)) for context in contexts]
        if spans := prompts + chunks + decodes:
            yield StepPlan(tuple(_span(runner, number, *span) for number, span in enumerate(spans)))


def _span(
    runner: ModelRunner, number: int, start: int, length: int, num_drafts: int, sampling: SamplingParams
) -> ScheduledSequence:
    """A span of a sequence that ends with it and with drafts; without numbers sequences may share their blocks."""
    stop = start + length
    blocks = list(range(-(-(stop + num_drafts) // runner.block_size)))
    sequence = Sequence(Request(str(number), (0,) * stop, sampling, 0), [0] * stop, block_ids=blocks)
    sequence.draft_token_ids = [0] * num_drafts
    return ScheduledSequence(sequence, start, length + num_drafts)
