"""Runs that die on the way."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from compress.pipeline.resume import Progress


@contextmanager
def killed_after_block(last: int) -> Iterator[None]:
    """Interrupts the code inside once the block of that number is saved; fails the test if it gets past it."""
    save_block = Progress.save_block

    def save_and_die(self: Progress, index: int, *rest: object, **options: object) -> None:
        save_block(self, index, *rest, **options)
        if index == last:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "save_block", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            yield
