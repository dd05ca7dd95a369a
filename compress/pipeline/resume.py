"""Progress on disk: the pieces in `<out>.partial/`, from which an interrupted run is resumed.

    progress.json            identity of the run
    pieces/survey-00003...   observations of a first pass, if the recipe needs one
    pieces/embedding, head   embedding and head, if the recipe changes them
    pieces/mtp               packed multi-token prediction head
    pieces/block-00003...    finished blocks, each complete or absent
    inputs/hidden-00004...   hidden states entering the first unfinished block

The hidden states of block i+1 are written before piece i, and those of block i are removed after it: the first missing
piece always has its inputs.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from torch import Tensor

from compress.checkpoint.safetensors import MappedFile, TensorFiles
from compress.checkpoint.weights import Scheme
from compress.checkpoint.weights.base import StoredTensors, digest
from compress.checkpoint.writer import BlockStore, assemble
from compress.common import work_folder
from compress.common.errors import CheckpointError, ToolkitError
from compress.common.files import partial_folder
from compress.pipeline.block import check_finite

EMBEDDING, HEAD, MTP, REST = "embedding", "head", "mtp", "rest"
BLOCK, SURVEY = "block", "survey"
_HIDDEN, _REFERENCE, _PASSED = "hidden", "reference", "passed_on."
_OTHER = "Run that configuration to finish it, choose another --out, or add --restart to discard the progress"


@dataclass(frozen=True, slots=True)
class Progress:
    """Unfinished work on one output folder.

    Attributes:
        folder: `<out>.partial`.
        identity: inputs that determine the result; runs with another identity must not resume this one.
        phase: blocks to count: those of the run itself, or of its first pass.
    """

    folder: Path
    identity: dict[str, Any]
    phase: str = BLOCK

    @classmethod
    def open(cls, out: Path, identity: Mapping[str, Any], restart: bool = False) -> Progress:
        """Starts or resumes the work on `out`; `only_one_run` must be held. Raises CheckpointError: the progress
        belongs to another configuration; names the differences."""
        progress = cls(partial_folder(out), dict(identity))
        if restart:
            progress.discard()
        work_folder.check_same(progress.folder, progress.identity, _OTHER)
        return progress

    @property
    def exists(self) -> bool:
        """Whether an earlier run left progress."""
        return work_folder.has_progress(self.folder)

    def begin(self) -> None:
        """Records the identity, which marks the start of progress."""
        work_folder.begin(self.folder, self.identity)

    @property
    def survey(self) -> Progress:
        """Progress of the first pass in the same folder."""
        return replace(self, phase=SURVEY)

    @property
    def pieces(self) -> BlockStore:
        return BlockStore(self.folder / "pieces")

    @property
    def finished(self) -> Path:
        """Folder where the checkpoint is assembled and verified before it is moved to `out`."""
        return self.folder / "finished"

    def num_finished(self, num_blocks: int) -> int:
        """Counts finished blocks, from the first."""
        return next((index for index in range(num_blocks) if not self.pieces.has(self._key(index))), num_blocks)

    def has_begun(self, num_blocks: int) -> bool:
        """Returns whether any block is finished, including those of the first pass."""
        return bool(self.num_finished(num_blocks) or self.survey.num_finished(num_blocks))

    def facts(self, index: int) -> dict[str, Any]:
        """Returns the metadata of a finished block."""
        return self.pieces.read_metadata(self._key(index))

    def piece(self, index: int) -> MappedFile:
        """Returns the tensors of a finished block."""
        return self.pieces.open(self._key(index))

    def ends(self) -> list[str]:
        """Returns existing pieces of the embedding and of both heads."""
        return [key for key in (EMBEDDING, HEAD, MTP) if self.pieces.has(key)]

    def all_facts(self, num_blocks: int) -> list[dict[str, Any]]:
        """Returns the metadata of all blocks, the embedding, the head and the rest, once all are finished; that of the
        rest only if it holds quantized weights."""
        outside = map(self.pieces.read_metadata, [*self.ends(), REST])
        return [self.facts(index) for index in range(num_blocks)] + [facts for facts in outside if facts]

    def save_block(
        self,
        index: int,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        hidden: Tensor | None,
        reference: Tensor | None = None,
        passed_on: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Saves a finished block and the inputs of the next one; `reference` are those of the dense model, `passed_on`
        further inputs of later blocks."""
        if hidden is not None:
            known = {} if reference is None else {_REFERENCE: reference}
            known |= {f"{_PASSED}{name}": tensor for name, tensor in passed_on.items()}
            self._inputs.write(self._hidden_key(index + 1), {_HIDDEN: hidden} | known)
        self.pieces.write(self._key(index), tensors, facts)
        (self._inputs.folder / f"{self._hidden_key(index)}.safetensors").unlink(missing_ok=True)

    def assemble(self, num_blocks: int, config: Mapping[str, Any], source: TensorFiles) -> Path:
        """Assembles the checkpoint from all pieces in the folder `finished`. Raises CheckpointError: the disk is full.
        `source`: model whose tokenizer, templates and other side files are copied."""
        keys = [*map(self._key, range(num_blocks)), *self.ends(), REST]
        shutil.rmtree(self.finished, ignore_errors=True)
        return assemble(self.pieces, keys, self.finished, config=config, source=source)

    def load_hidden(self, index: int) -> Tensor:
        """Loads the hidden states `[N, L, H]` that enter block `index`, stored by `save_block` of the preceding
        block."""
        return self._inputs.open(self._hidden_key(index)).tensor(_HIDDEN).clone()

    def load_passed_on(self, index: int) -> dict[str, Tensor]:
        """Loads the outputs that blocks before `index` pass to it and later ones."""
        file = self._inputs.open(self._hidden_key(index))
        names = (name for name in file.entries if name.startswith(_PASSED))
        return {name.removeprefix(_PASSED): file.tensor(name).clone() for name in names}

    def load_reference(self, index: int) -> Tensor | None:
        """Loads the dense model's hidden states `[N, L, H]` at the same block; None if they were not saved."""
        file = self._inputs.open(self._hidden_key(index))
        return file.tensor(_REFERENCE).clone() if _REFERENCE in file.entries else None

    def drop_damaged(self, calibrated: bool) -> None:
        """Removes damaged pieces, which the next run recreates. `calibrated`: whether blocks depend on the inputs from
        preceding blocks, which no longer exist; then all blocks are removed."""
        shutil.rmtree(self.finished, ignore_errors=True)
        stores = self.pieces.folder, self._inputs.folder
        damaged = [path for folder in stores for path in folder.glob("*.safetensors") if not _is_intact(path)]
        if damaged and calibrated:
            self.discard()
        for path in damaged:
            path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes everything except the lock."""
        work_folder.discard(self.folder)

    def _key(self, index: int) -> str:
        return f"{self.phase}-{index:05d}"

    def _hidden_key(self, index: int) -> str:
        return f"{'' if self.phase == BLOCK else f'{self.phase}-'}{_HIDDEN}-{index:05d}"

    @property
    def _inputs(self) -> BlockStore:
        return BlockStore(self.folder / "inputs")


def _is_intact(path: Path) -> bool:
    """Returns whether a piece is readable, its values are finite, and its weights match the recorded digests."""
    try:
        piece = MappedFile.open(path)
        facts = json.loads(piece.metadata["piece"])
        schemes = {name: Scheme.from_dict(fields) for name, fields in facts.get("schemes", {}).items()}
        for name, recorded in facts.get("digests", {}).items():
            stored = StoredTensors(name, piece.tensor)
            if digest(schemes[name].read(stored) if name in schemes else piece.tensor(name)) != recorded:
                return False
        for name in piece.entries:
            check_finite(name, piece.tensor(name))
    except (ToolkitError, ValueError, KeyError, TypeError, RuntimeError):
        return False
    return True


@contextmanager
def only_one_run(out: Path) -> Iterator[None]:
    """Locks the partial folder of `out` for this process, and removes it at the end if it is empty. Raises
    CheckpointError: another process holds it."""
    busy = CheckpointError(f"another process is writing {out}", "Wait for it, or choose another --out")
    with work_folder.held_by_one(partial_folder(out), busy):
        yield


class RunDisplay:
    """Progress display over blocks (or other units) on standard error. `seconds`: least time between the lines of two
    units; the last unit always has one."""

    def __init__(
        self, total: int, done: int = 0, quiet: bool = False, unit: str = "block", seconds: float = 0.0
    ) -> None:
        self._total = total
        self._unit = unit
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._block = done
        self._started = time.monotonic()
        self._seconds = seconds
        self._printed = self._started
        if not quiet and sys.stderr.isatty():
            self._bar = _make_bar()
            self._task = self._bar.add_task("starting", total=total, completed=done)

    def __enter__(self) -> RunDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, what: str, fraction: float = 0.0) -> None:
        """Shows the current stage within the block, and its completed share."""
        if self._bar is not None:
            description = f"{self._unit} {min(self._block + 1, self._total)}/{self._total}: {what}"
            self._bar.update(self._task, description=description, completed=self._block + fraction)

    def finish(self, line: str = "") -> None:
        """Advances by one block, and prints its line, if any and if it is time for one, with its seconds."""
        self._block += 1
        elapsed = time.monotonic() - self._started
        self._started = time.monotonic()
        if line and (self._started >= self._printed + self._seconds or self._block == self._total):
            self._printed = self._started
            number = f"{self._block:>{len(str(self._total))}}"
            self.say(f"{self._unit} {number}/{self._total}  {line}  {elapsed:.1f} s")
        if self._bar is not None:
            self._bar.update(self._task, completed=self._block)

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)


def _make_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)
