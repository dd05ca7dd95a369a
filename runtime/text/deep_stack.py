"""A call with room for deep recursion: compilers of grammars recurse as deep as the grammar is nested."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_BYTES = 2**28
"""Address space, not memory: pages that are never touched cost nothing."""

T = TypeVar("T")
_lock = threading.Lock()


def call_on_deep_stack(function: Callable[[], T]) -> T:
    """Calls the function in a thread with a stack of 256 MiB, and gives its result or raises what it raises."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="deep stack")
    with _lock:  # the size is the process's; a thread that starts elsewhere meanwhile gets the larger one as well
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return future.result()
