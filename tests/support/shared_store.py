"""Folders that a test session makes once and all of its workers read."""

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path


class SharedStore:
    """Tiny models and checkpoints packed from them, by what they were made of. Tests only read them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str, key: object, make: Callable[[Path], object]) -> Path:
        """A folder called `name` that `make` filled, by the first worker that asks for this name and key."""
        room = self.root / hashlib.sha256(repr((name, key)).encode()).hexdigest()[:12]
        room.mkdir(parents=True, exist_ok=True)
        with (room / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (room / "done").exists():
                shutil.rmtree(room / name, ignore_errors=True)
                make(room / name)
                (room / "done").touch()
        return room / name
