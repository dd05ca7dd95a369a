"""Workers in virtual time: an engine whose runner computes nothing and takes the time that a step would. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from runtime.core.config import RuntimeConfig
from runtime.core.request import Delta, RequestOptions, SamplingParams
from runtime.core.step import ComputedStep, Runner, SampledToken, ScheduledSequence, StepOutput, StepPlan
from runtime.engine.engine import Engine
from runtime.simulate.costs import MeasuredCosts, StepSize, span_size, total_size

TOKEN = SampledToken(0)
NO_TEXT = RequestOptions(detokenize=False)


class Events:
    """Calls in the order of virtual time; those at the same time in the order in which they were added.

    Attributes:
        now: seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Adds a call at a time, which is now or later."""
        heappush(self._calls, (seconds, next(self._number), call))

    def run(self) -> None:
        """Makes all calls, and those that they add."""
        while self._calls:
            self.now, _, call = heappop(self._calls)
            call()


@dataclass
class VirtualRunner(Runner):
    """A runner that samples the same token for every sequence and advances a clock by the seconds of each step.

    Attributes:
        now: time at the end of the last step.
        part: part of the device that the last step had.
        given: number of prompt tokens whose keys and values another device has computed, by sequence id.
    """

    costs: MeasuredCosts
    num_blocks: int
    max_model_len: int
    now: float = 0.0
    part: float = 1.0
    given: dict[str, int] = field(default_factory=dict)

    vocab_size = 2**62

    def submit(self, plan: StepPlan) -> ComputedStep:
        """Advances the clock, and returns a token of each sequence that samples."""
        self.now += self.seconds_of(plan)
        return ComputedStep(StepOutput({each.sequence.id: [TOKEN] for each in plan.entries if each.samples}))

    def seconds_of(self, plan: StepPlan) -> float:
        """Returns the seconds of a step."""
        return self.costs.of_step(total_size(map(self.size_of, plan.entries)))

    def size_of(self, entry: ScheduledSequence) -> StepSize:
        """Returns the size of a span without its given tokens, which are computed only after a preemption."""
        given = 0 if entry.sequence.num_preemptions else self.given.get(entry.sequence.id, 0)
        start = min(max(entry.start, given), entry.start + entry.num_tokens)
        num_tokens = entry.start + entry.num_tokens - start
        return span_size(start, num_tokens, samples=entry.samples) if num_tokens else StepSize()


@dataclass(eq=False)
class Worker:
    """An engine, and the device or devices that it has.

    Attributes:
        deliver: is told of the tokens of a step when it ends.
        load: requests that wait or run.
        num_devices: devices that the engine has.
        busy_seconds: time of all steps, those on a part of a device by that part.
    """

    events: Events
    runner: VirtualRunner
    config: RuntimeConfig
    deliver: Callable[[Worker, Delta], None]
    num_devices: int = 1
    load: int = 0
    busy_seconds: float = 0.0
    is_busy: bool = False
    engine: Engine = field(init=False)
    _ends: float = 0.0
    _moves: int = 0
    _deltas: list[Delta] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = Engine(self.runner, None, self.config, clock=lambda: self.runner.now)

    def submit(self, request_id: str, prompt: tuple[int, ...], max_tokens: int, given: int = 0) -> None:
        """Queues a request.

        Args:
            given: leading tokens whose keys and values exist.
        """
        self.load += 1
        if given:
            self.runner.given[request_id] = given
        self.add(request_id, prompt, max_tokens)
        self.start()

    def add(self, request_id: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Gives a request to the engine."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        self.engine.add_request(prompt, sampling, request_id, NO_TEXT)

    def start(self) -> None:
        """Starts a step at the next event of this time, if none is under way and there is work."""
        if not self.is_busy and self.has_work:
            self.is_busy = True
            # Later than all that happens at the same time: requests that arrive together enter one step.
            self.events.at(self.events.now, self.begin)

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def step(self) -> list[Delta]:
        """Computes a step, which advances the runner's clock from now."""
        return self.engine.step()

    def begin(self) -> None:
        """Starts a step."""
        self.runner.now = self.events.now
        self._deltas = self.step()
        self.busy_seconds += (self.runner.now - self.events.now) * self.runner.part
        self._end_at(self.runner.now)

    @property
    def is_stepping(self) -> bool:
        """Whether a step is under way, not only about to start or to end."""
        return self._ends > self.events.now

    def resize(self, part: float) -> None:
        """Changes the part of the device that the step under way has from now on."""
        if self.is_stepping and part != self.runner.part:
            self._end_at(self.events.now + (self._ends - self.events.now) * self.runner.part / part)
        self.runner.part = part

    def end(self) -> None:
        """Ends the step under way, and starts the next one if there is work."""
        self.is_busy = False
        for delta in self._deltas:
            if delta.finish_reason is not None:
                self.load -= 1
                self.runner.given.pop(delta.request_id, None)
            self.deliver(self, delta)
        self.start()

    def _end_at(self, seconds: float) -> None:
        """Ends the step under way at a time, instead of that of an earlier call."""
        self._ends, self._moves = seconds, self._moves + 1
        self.events.at(seconds, partial(self._end_unless_moved, self._moves))

    def _end_unless_moved(self, moves: int) -> None:
        if moves == self._moves:
            self.end()
