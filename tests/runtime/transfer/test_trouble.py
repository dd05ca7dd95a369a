"""An engine that fails, hangs or loses its connection: the other one computes the prompt, and nothing is left over."""

import threading

from separate_engines import Separate, alone, answers, separate, until

from runtime.core.request import SamplingParams
from runtime.engine.engine_loop import Run
from runtime.transfer.connectors.shared_memory import MappedRows

PROMPT = [5 + place % 700 for place in range(300)]
SAMPLING = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
REQUEST = [(PROMPT, SAMPLING)]


def ask(both: Separate) -> threading.Thread:
    """Sends a request from a thread and waits until the other engine was asked for its prompt."""

    def run() -> None:
        with alone() as one:
            wanted = answers(one, REQUEST)
        assert answers(both.decode, REQUEST) == wanted
        passed.set()

    passed = threading.Event()
    thread = threading.Thread(target=run)
    thread.passed = passed
    thread.start()
    until(lambda: both.receiver.num_waiting)
    return thread


def finish(thread: threading.Thread) -> None:
    thread.join(60)
    assert thread.passed.is_set()


def hold(both: Separate) -> threading.Event:
    """Stops the engine that computes prompts, until the event is set."""
    event, held = threading.Event(), threading.Event()
    both.prefill.loop.put(Run(held.set), Run(event.wait))
    assert held.wait(60)
    return event


def test_an_engine_that_hangs() -> None:
    with separate() as both:
        both.receiver.peers[0].stall_seconds = 0.2
        event = hold(both)
        finish(ask(both))
        assert both.results == {"failed": 1}
        tier = both.decode.engine.scheduler.pool.tier
        assert len(tier._reserved) == 18, "the other engine may still write there"
        assert not both.receiver.peers[0].link.is_usable
        event.set()
        both.check()
        assert both.receiver.peers[0].link.is_usable


def test_a_connection_that_is_lost_and_comes_back() -> None:
    with separate() as both:
        event, link = hold(both), both.receiver.peers[0].link
        thread = ask(both)
        link.connection.shutdown(2)
        finish(thread)
        assert both.results == {"failed": 1}
        event.set()
        until(lambda: both.receiver.peers[0].link not in (None, link))
        answers(both.decode, [([9, *PROMPT], SAMPLING)])
        assert both.results == {"failed": 1, "received": 1}
        both.check()


def test_a_copy_that_fails(monkeypatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no memory")

    with separate() as both:
        event = hold(both)
        thread = ask(both)
        monkeypatch.setattr(MappedRows, "write", fail)
        event.set()
        finish(thread)
        assert both.results == {"failed": 1}
        both.check()


def test_a_step_that_fails() -> None:
    with separate() as both:
        event = hold(both)
        thread = ask(both)
        both.prefill.engine.runner.kernels = None
        event.set()
        finish(thread)
        assert both.results == {"failed": 1}
        both.check()


def test_a_copy_that_takes_long_holds_back_only_its_blocks(monkeypatch) -> None:
    """A prompt that needs all blocks waits for those that are being copied."""
    started, event, write = threading.Event(), threading.Event(), MappedRows.write

    def wait(self: MappedRows, *arguments: object) -> None:
        started.set()
        event.wait(60)
        write(self, *arguments)

    with separate(num_blocks=24, max_model_len=320) as both:
        monkeypatch.setattr(MappedRows, "write", wait)
        thread = ask(both)
        assert started.wait(60)
        until(lambda: not both.prefill.engine.has_work)
        other = threading.Thread(target=answers, args=(both.prefill, [([4] * 300, SAMPLING)]))
        other.start()
        until(lambda: both.prefill.engine.has_work)
        both.prefill.engine.scheduler.check()
        event.set()
        finish(thread)
        other.join(60)
        both.check()
        assert both.results == {"received": 1}
