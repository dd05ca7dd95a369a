"""Engines over small decoders, and what comes out of engines."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from poisoned_memory import poison, poison_states
from torch import Tensor

from runtime.core.attention_window import held_blocks
from runtime.core.config import RuntimeConfig
from runtime.core.request import Delta, SamplingParams
from runtime.engine.engine import Engine
from runtime.runner.runner import build_runner
from runtime.speculative.build import build_speculator

Tokens = dict[tuple[str, int], list[int]]
"""By request and answer."""


def small_engine(
    decoder: Any, folder: Path | str = "", tokenizer: Any = None, faults: Any = None, **options: Any
) -> Engine:
    """Blocks of four tokens; what was never written is NaN, and guessing goes on where it does not pay."""
    config = RuntimeConfig(**({"block_size": 4, "num_blocks": 200} | options))
    runner = build_runner(decoder, config)
    poison(runner.pages.memory)
    if runner.states is not None:
        poison_states(runner.states)
    speculator = build_speculator(folder, decoder, runner, config)
    if speculator is not None:
        speculator.gate = None
    return Engine(runner, tokenizer, config, speculator=speculator, before_step=faults)


def collect(engine: Engine, deltas: dict[str, list[Delta]]) -> None:
    """One step, after which invariants hold."""
    for delta in engine.step():
        deltas.setdefault(delta.request_id, []).append(delta)
    engine.scheduler.check()


def drain(
    engine: Engine, deltas: dict[str, list[Delta]] | None = None, after_step: Callable[[], object] = lambda: None
) -> dict[str, list[Delta]]:
    """Steps until there is no work. Then every block is free."""
    deltas = {} if deltas is None else deltas
    while engine.has_work:
        collect(engine, deltas)
        after_step()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return deltas


def tokens_of(deltas: Iterable[Delta], index: int | None = None) -> list[int]:
    """Tokens of one answer, or of the only one."""
    return [token for delta in deltas if index in (None, delta.index) for token in delta.token_ids]


def blocks_held(engine: Engine) -> list[int]:
    """Number of blocks that each running sequence holds."""
    return [len(held_blocks(sequence.block_ids)) for sequence in engine.scheduler.running]


def answer_all(
    engine: Engine, requests: Iterable[tuple[str, list[int], SamplingParams]], gap: int = 0, **drained: Any
) -> Tokens:
    """Tokens of requests that arrive some steps apart. None of them fails."""
    deltas: dict[str, list[Delta]] = {}
    for name, prompt, sampling in requests:
        engine.add_request(prompt, sampling, name)
        for _ in range(gap):
            collect(engine, deltas)
    found: Tokens = {}
    for name, parts in drain(engine, deltas, **drained).items():
        for delta in parts:
            assert not delta.error, delta.error
            found.setdefault((name, delta.index), []).extend(delta.token_ids)
    return found


class Recorder:
    """A decoder that remembers the logits at each position of the only sequence there is."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.logits_at: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def forward(self, token_ids: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        hidden = self.decoder.forward(token_ids, positions, *rest)
        self.logits_at |= dict(zip(positions.tolist(), self.decoder.logits(hidden), strict=True))
        return hidden
