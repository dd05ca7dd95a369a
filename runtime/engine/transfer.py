"""Exchange of computed pages with engines in other processes, as the loop of an engine sees it. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.engine.engine_loop import Add, Events


class Transfer:
    """Exchange of pages; this one exchanges none. Used on the engine's thread, except for `others`."""

    @property
    def num_waiting(self) -> int:
        """Number of requests whose pages are on their way."""
        return 0

    def takes(self, request: Add) -> bool:
        """Returns whether a request waits for pages of another engine. It is added to this engine later."""
        return False

    def abort(self, stream: int) -> None:
        """Forgets the request of a stream."""

    def note_events(self, events: Events) -> None:
        """Learns of the results of a step. Called after each."""

    def others(self, events: Events) -> Events:
        """Takes the results of its own requests out of events. Any thread may call it."""
        return events


NO_TRANSFER = Transfer()
