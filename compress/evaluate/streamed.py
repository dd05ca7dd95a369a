"""Logits of models larger than memory: every window passes through one layer after the other, of which one is loaded.

Hidden states wait on disk between two layers, in one piece for each forward pass, which says how many layers it has
seen. A pass that is interrupted continues with the pieces that have seen fewest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme
from compress.checkpoint.state_dtype import STATE_FLOAT32
from compress.checkpoint.writer import BlockStore
from compress.common.cli import tool_version
from compress.common.errors import CheckpointError, NumericsError
from compress.common.work_folder import begin, check_same, differences, discard, has_progress, held_by_one
from compress.evaluate.scorers import Scorer

if TYPE_CHECKING:
    from runtime.model.decoder import Decoder
    from runtime.model.streamed import PartialPass, StreamedModel

Report = Callable[[str, int, int], None]
"""Is told what is done, how many steps of it are, and how many there are."""


@dataclass(frozen=True)
class StreamedScorer(Scorer):
    """A scorer that knows the hidden states of some texts, once `compute` ran over all layers.

    Attributes:
        parts: int64 `[B, T]` each, the windows of one forward pass.
        places: parts of each batch of windows that is asked for, by its digest.
        kv_cache, state_dtype: see `RuntimeScorer`.
    """

    model: StreamedModel
    store: BlockStore
    parts: tuple[Tensor, ...]
    places: dict[bytes, range]
    kv_cache: KVCacheScheme = UNCOMPRESSED
    state_dtype: str = STATE_FLOAT32

    @classmethod
    def of(
        cls,
        model: StreamedModel,
        folder: Path,
        batches: Iterable[Tensor],
        kv_cache: KVCacheScheme = UNCOMPRESSED,
        state_dtype: str = STATE_FLOAT32,
    ) -> StreamedScorer:
        """Prepares the pass over batches `[B, T]` of windows, those of the resident evaluation: products of another
        number of rows may round differently."""
        from runtime.model.scoring import split_rows

        parts: list[Tensor] = []
        places: dict[bytes, range] = {}
        for batch in batches:
            rows = split_rows(batch)
            places[_digest(batch)] = range(len(parts), len(parts) + len(rows))
            parts += rows
        return cls(model, BlockStore(folder), tuple(parts), places, kv_cache, state_dtype)

    @property
    def num_steps(self) -> int:
        """Forward passes through one layer, of all windows through all layers."""
        return self.model.num_layers * len(self.parts)

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that the hidden states depend on."""
        reader = self.model.loader.reader
        files = [file.path for file in reader.checkpoint.files.files]
        return {
            "path": str(reader.checkpoint.path.resolve()),
            "files": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
            "target": [reader.target.device.type, str(reader.target.dtype)],
            "kernels": [reader.kernels, *sorted(reader.excluded)],
            "texts": sha256(b"".join(self.places)).hexdigest()[:16],
            "kv_cache": str(self.kv_cache),
            "state_dtype": self.state_dtype,
        }

    @property
    def name(self) -> str:
        return self.store.folder.name

    def compute(self, report: Report) -> None:
        """Passes all windows through all layers that they have not seen. `report`: is called after each part with
        (`name` and the layer, steps done, `num_steps`)."""
        from runtime.model.streamed import advance

        seen = self._begin()
        for index in range(min(seen), self.model.num_layers):
            decoder = self.model.with_layer(index)
            self.model.release()
            for part in [part for part, count in enumerate(seen) if count == index]:
                partial = self._load(part)
                advance(decoder, self.parts[part].to(decoder.device), partial, self.kv_cache, self.state_dtype)
                self._save(part, partial)
                seen[part] += 1
                report(f"{self.name}, layer {index + 1} of {self.model.num_layers}", sum(seen), self.num_steps)
            del decoder

    def _begin(self) -> list[int]:
        """Embeds parts that are not on disk; returns how many layers each has seen."""
        from runtime.model.streamed import begin as embed

        seen = [self._num_seen(part) for part in range(len(self.parts))]
        if None in seen:
            decoder = self.model.with_embedding()
            for part, tokens in enumerate(self.parts):
                if seen[part] is None:
                    self._save(part, embed(decoder, tokens))
            del decoder
            self.model.release()
        return [count or 0 for count in seen]

    def _num_seen(self, part: int) -> int | None:
        """Returns the layers that a part has seen; None for one that is absent or damaged."""
        try:
            return int(self.store.read_metadata(_key(part))["layers"])
        except CheckpointError:
            return None

    def _load(self, part: int) -> PartialPass:
        from runtime.model.streamed import PartialPass

        piece, device = self.store.open(_key(part)), self.model.frame.device
        tensors = {name: piece.tensor(name).to(device, copy=True) for name in piece.entries}
        return PartialPass.of(tensors, self.store.read_metadata(_key(part)))

    def _save(self, part: int, partial: PartialPass) -> None:
        tensors = {name: tensor.cpu() for name, tensor in partial.tensors().items()}
        self.store.write(_key(part), tensors, partial.numbers())

    @cached_property
    def _decoder(self) -> Decoder:
        decoder = self.model.with_head()
        self.model.release()
        return decoder

    @property
    def vocab_size(self) -> int:  # type: ignore[override]  # a fact of the model, not set
        return self.model.config.spec.vocab_size

    @torch.inference_mode()
    def states(self, tokens: Tensor) -> Tensor:
        """See `Scorer`. Raises KeyError for windows that were not computed, or not in this batch."""
        return torch.cat(list(self._hidden(tokens))).view(*tokens.shape, -1)

    @torch.inference_mode()
    def head(self, states: Tensor) -> Tensor:
        return self._decoder.logits(states.flatten(0, 1)).view(*states.shape[:2], -1)

    def _hidden(self, tokens: Tensor) -> Iterator[Tensor]:
        for part in self.places[_digest(tokens)]:
            yield self._load(part).passing.finish()


@dataclass(frozen=True, slots=True)
class Streaming:
    """Evaluation with one layer of one model in memory at a time.

    Attributes:
        folder: for hidden states, gone at the end; what an interrupted evaluation leaves there is continued.
        restart: whether that is thrown away instead.
        weights: what the values of the weights of the model depend on, where size and time of its files do not say; ""
            for one whose files do.
        is_private: whether progress of something else in the folder is thrown away, not refused.
    """

    folder: Path
    restart: bool = False
    weights: str = ""
    is_private: bool = False

    @contextmanager
    def scorers(
        self, scorers: Sequence[StreamedScorer], reference: StreamedScorer | None, report: Report
    ) -> Iterator[tuple[Sequence[StreamedScorer], StreamedScorer | None]]:
        """Streams texts through a model in one or several forms and its baseline, one after the other; see `open`.
        Raises CheckpointError: another process uses the folder, it holds progress of something else, or the disk is
        full."""
        busy = CheckpointError(f"another process is evaluating in {self.folder}", "Wait for it, or name another folder")
        with held_by_one(self.folder, busy):
            self._continue(self._identity(scorers, reference))
            with _cleared(self.folder):
                for scorer in scorers if reference is None else (reference, *scorers):
                    scorer.compute(report)
                yield scorers, reference

    def _continue(self, identity: dict[str, Any]) -> None:
        if self.restart or (self.is_private and differences(self.folder, identity)):
            discard(self.folder)
        check_same(self.folder, identity, _OTHER)
        if not has_progress(self.folder):
            discard(self.folder)
            begin(self.folder, identity)

    def _identity(self, scorers: Sequence[StreamedScorer], reference: StreamedScorer | None) -> dict[str, Any]:
        """Returns what hidden states depend on."""
        files = {"files": self.weights} if self.weights else {}
        return {
            **{scorer.name: scorer.identity | files for scorer in scorers},
            "baseline": None if reference is None else reference.identity,
            "tool": tool_version(),
        }


_OTHER = "Run that evaluation to finish it, or add --restart to throw its progress away"


@contextmanager
def _cleared(folder: Path) -> Iterator[None]:
    """Empties a folder at the end, and where running again cannot help."""
    try:
        yield
    except NumericsError:
        discard(folder)
        raise
    discard(folder)


def _key(part: int) -> str:
    return f"part-{part:05d}"


def _digest(tokens: Tensor) -> bytes:
    return sha256(tokens.contiguous().numpy().tobytes()).digest()
