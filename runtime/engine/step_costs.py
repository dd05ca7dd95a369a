"""Measured cost of steps in seconds, and the time that a step has for prompts while answers are generated. Pure; no
torch.

All decodes of a step wait for its end. The time of a step is modelled as a sum of parts, each an amount of work
(`Work`) times a coefficient. The first measurement sets the scale of all coefficients; each later one corrects them in
proportion to their part in the prediction (normalized least mean squares):

* Steps without prompts correct the parts of decodes, others the parts of prompts. So an error in the time of prompts
  never makes decodes seem slower, which would allow longer steps.
* Until a step without prompts was measured, decodes cost what they do relative to prompt tokens in `INITIAL_RATIOS`:
  the first step of a process is slow, and while all steps have prompts, nothing would correct its cost of decodes.
* Upwards at once, to at most twice the prediction, so that one outlier (a compilation, a page fault) does not last.
* Downwards by half of the difference, so that the model tends to overestimate.

The initial ratios of coefficients overestimate prompts, their context and their scores, and the prompt tokens of a step
with decodes grow by at most half from step to step: the first chunk is small, and larger ones follow what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import NamedTuple

from runtime.core.request import Sequence
from runtime.core.step import ScheduledSequence

DEFAULT_MAX_ITL_MS = 50.0
"""Default of `--max-itl` in milliseconds."""
STEP_PART = 0.8
"""Part of that time that a step is planned to take: measured times vary, and tokens reach clients a little later."""
DECODE_STEPS = 4
"""By default a step may take at least this number of decode steps, which leaves most of it to prompts on slow machines.
"""
LEAST_CHUNK = 16
"""Prompt tokens for which a step has time, whatever decodes leave: prompts advance with every step."""
CONTEXT_UNIT = 1024
MAX_GROWTH = 1.5
"""Maximum ratio of the prompt tokens of a step with decodes to those of recent steps, whose costs were measured."""
MEMORY = 0.8
"""Factor per step by which earlier steps count less for `MAX_GROWTH`."""
DOWNWARD_GAIN = 0.5
MAX_RISE = 2.0
LEAST_SECONDS = 1e-9
"""Minimum of a coefficient: corrections are proportional to it."""


class Work(NamedTuple):
    """Amounts of work in a step, or seconds for each of them.

    Attributes:
        steps: 1.
        decode_tokens: tokens of decodes, drafts included.
        prompt_tokens: other tokens.
        context: prompt tokens times the number of tokens before their span, in units of `CONTEXT_UNIT`.
        scored_tokens: prompt tokens whose log-probabilities are returned.
    """

    steps: float = 0.0
    decode_tokens: float = 0.0
    prompt_tokens: float = 0.0
    context: float = 0.0
    scored_tokens: float = 0.0


NUM_DECODE_PARTS = 2
"""Number of the first fields of `Work`, which steps without prompts have."""
INITIAL_RATIOS = Work(steps=8, decode_tokens=1, prompt_tokens=1, context=0.5, scored_tokens=4)


def prompt_work(sequence: Sequence, start: int, num_tokens: int) -> Work:
    """Returns the work of a span of a prompt."""
    scored = num_tokens if sequence.request.sampling.prompt_logprobs is not None else 0
    return Work(prompt_tokens=num_tokens, context=num_tokens * start / CONTEXT_UNIT, scored_tokens=scored)


def step_work(entries: Listed[ScheduledSequence]) -> Work:
    """Returns the work of a planned step. A span of one known token and its drafts is a decode."""
    prompts = [e for e in entries if e.num_tokens > 1 and e.num_tokens - e.num_draft_tokens > 1]
    works = [prompt_work(entry.sequence, entry.start, entry.num_tokens) for entry in prompts]
    num_tokens = sum(entry.num_tokens for entry in entries)
    decodes = Work(steps=1, decode_tokens=num_tokens - sum(entry.num_tokens for entry in prompts))
    return Work(*map(sum, zip(decodes, *works, strict=True)))


@dataclass(slots=True)
class StepCosts:
    """Seconds for each kind of work, estimated from the steps so far.

    Attributes:
        seconds: coefficients; their ratios are guesses before the first measurement.
        is_known: whether any step was measured.
        knows_decodes: whether a step without prompts was measured.
        num_tried_tokens: most prompt tokens of recent steps with decodes.
    """

    seconds: Work = INITIAL_RATIOS
    is_known: bool = False
    knows_decodes: bool = False
    num_tried_tokens: float = 0.0

    def predict(self, work: Work) -> float:
        """Returns the predicted seconds of some work."""
        return sum(self._parts(work))

    def of_prompt_token(self, sequence: Sequence) -> float:
        """Returns the predicted seconds of the next prompt token of a sequence."""
        return self.predict(prompt_work(sequence, sequence.num_computed_tokens, 1))

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum prompt tokens of the next step with decodes."""
        return max(LEAST_CHUNK, int(MAX_GROWTH * self.num_tried_tokens))

    def observe(self, work: Work, seconds: float) -> None:
        """Corrects the coefficients by a measured step. Without time between two readings of the clock nothing
        changes."""
        if seconds <= 0:
            return
        if work.prompt_tokens and work.decode_tokens:
            self.num_tried_tokens = max(work.prompt_tokens, MEMORY * self.num_tried_tokens)
        parts = self._parts(work)
        predicted = sum(parts)
        if not self.is_known:
            self.seconds, self.is_known = Work(*(each * seconds / predicted for each in self.seconds)), True
            self.knows_decodes = not work.prompt_tokens
            return
        parts = [0.0] * NUM_DECODE_PARTS + parts[NUM_DECODE_PARTS:] if work.prompt_tokens else parts
        error = max(-1.0, min((seconds - predicted) / sum(parts), MAX_RISE - 1))
        gain = (error if error > 0 else error * DOWNWARD_GAIN) * sum(parts) / sum(part * part for part in parts)
        factors = (1 + gain * part for part in parts)
        corrected = [max(LEAST_SECONDS, each * factor) for each, factor in zip(self.seconds, factors, strict=True)]
        self.knows_decodes = self.knows_decodes or not work.prompt_tokens
        if not self.knows_decodes:
            token = corrected[NUM_DECODE_PARTS] / INITIAL_RATIOS.prompt_tokens
            corrected[:NUM_DECODE_PARTS] = [token * each for each in INITIAL_RATIOS[:NUM_DECODE_PARTS]]
        self.seconds = Work(*corrected)

    def _parts(self, work: Work) -> list[float]:
        return [amount * each for amount, each in zip(work, self.seconds, strict=True)]


def prompt_seconds(costs: StepCosts, num_decode_tokens: int, max_itl_ms: float | None) -> float:
    """Returns the time in seconds that decodes leave to the prompts of a step, at least that of `LEAST_CHUNK` tokens.

    Args:
        max_itl_ms: longest wait in milliseconds for the next token; None is `DEFAULT_MAX_ITL_MS`, or `DECODE_STEPS`
            times the decodes alone if that is more.
    """
    decode = costs.predict(Work(steps=1, decode_tokens=num_decode_tokens))
    aim = STEP_PART * (DEFAULT_MAX_ITL_MS if max_itl_ms is None else max_itl_ms) / 1000
    if max_itl_ms is None:
        aim = max(aim, DECODE_STEPS * decode)
    return max(aim - decode, costs.predict(Work(prompt_tokens=LEAST_CHUNK)))
