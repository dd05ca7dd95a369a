"""Layers with a state give the same outputs wherever a text is cut, whatever the other sequences, in any slots."""

from pathlib import Path
from random import Random

import pytest
import torch
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model
from torch import Tensor

from runtime.backends.state_memory import StateMemory, StepStates
from runtime.backends.torch.ops import TorchOps
from runtime.core.request import Sequence
from runtime.core.state_rows import build_state_rows
from runtime.core.step import NO_STATE, ScheduledSequence
from runtime.model.loader import load_model
from runtime.model.mixers.gated_delta_net import DeltaNet
from runtime.model.mixers.kimi_delta import KimiDeltaLayer
from runtime.model.mixers.lightning import LightningLayer
from runtime.model.mixers.mamba1 import Mamba1Layer
from runtime.model.mixers.mamba2 import Mamba2Layer
from runtime.model.mixers.registry import ParallelMixers

StateLayer = DeltaNet | KimiDeltaLayer | LightningLayer | Mamba1Layer | Mamba2Layer
CPU = torch.device("cpu")


FAMILIES = ("qwen3_5_text", "qwen3_next", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "minimax")


@pytest.fixture(scope="module", params=FAMILIES)
def layer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StateLayer:
    family: str = request.param
    folder: Path = tmp_path_factory.mktemp(family) / "model"
    decoder = load_model(save_tiny_model(folder, family, **VARIANTS[family]), dtype="float64")
    layer = decoder.layers[0].mixer
    layer = layer.second if isinstance(layer, ParallelMixers) else layer
    assert isinstance(layer, StateLayer)
    return layer


NUM_SLOTS = 64


def new_memory(layer: StateLayer) -> StateMemory:
    """Memory for one layer that holds NaN, as memory that no step has written may."""
    memory = StateMemory({0: layer.spec.state_fields}, NUM_SLOTS, torch.float64, CPU)
    for tensor in memory.tensors[0].values():
        tensor[:NUM_SLOTS] = torch.nan
    return memory


def compute(
    layer: StateLayer, memory: StateMemory, spans: list[tuple[Tensor, int, tuple[tuple[int, int], ...]]]
) -> list:
    """One step over the rows of some sequences, with the slot that each reads and the slots that it writes."""
    unread: Sequence = None  # type: ignore[assignment]
    entries = [ScheduledSequence(unread, 0, len(rows), read, writes) for rows, read, writes in spans]
    states = StepStates(build_state_rows(entries, NUM_SLOTS, CPU), memory.tensors)
    out = layer.compute(torch.cat([rows for rows, _, _ in spans]), 0, states, TorchOps())
    return list(out.split([len(rows) for rows, _, _ in spans]))


def random_texts(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 64, generator=generator, dtype=torch.float64) for size in (131, 90, 17, 1)[:count]]


def cut(random: Random, length: int) -> tuple[int, ...]:
    """Ascending offsets after which a state is kept, the last token's among them."""
    return (*sorted(random.sample(range(length - 1), min(length - 1, random.choice([0, 0, 1, 4])))), length - 1)


@pytest.mark.parametrize("seed", range(3))
def test_outputs_do_not_depend_on_cuts_neighbours_or_slots(layer: StateLayer, seed: int) -> None:
    """Every text goes through steps of random lengths together with others; kept states are begun with again."""
    random, texts = Random(seed), random_texts(4)
    expected = [compute(layer, new_memory(layer), [(text, NO_STATE, ((len(text) - 1, 0),))])[0] for text in texts]
    memory, free = new_memory(layer), list(range(NUM_SLOTS))
    done, kept = [0] * len(texts), [{0: NO_STATE} for _ in texts]
    while any(place < len(text) for place, text in zip(done, texts, strict=True)):
        active = [i for i, text in enumerate(texts) if done[i] < len(text)]
        spans, starts = [], []
        for index in random.sample(active, random.randint(1, len(active))):
            # Some go back to a state that was kept, as after drafts that were not accepted.
            start = done[index] if random.random() < 0.8 else random.choice(list(kept[index]))
            count = min(random.choice([1, 1, 5, 40, 100]), len(texts[index]) - start)
            read = kept[index][start]
            free += [slot for place, slot in kept[index].items() if 0 < place < start and slot != read]
            kept[index] = {place: slot for place, slot in kept[index].items() if place == start or place == 0}
            writes = tuple((offset, free.pop(0)) for offset in cut(random, count))
            kept[index] |= {start + offset + 1: slot for offset, slot in writes}
            spans.append((texts[index][start : start + count], read, writes))
            starts.append((index, start, count))
        for found, (index, start, count) in zip(compute(layer, memory, spans), starts, strict=True):
            torch.testing.assert_close(found, expected[index][start : start + count], rtol=0, atol=1e-9)
            done[index] = start + count
        assert len(free) == len(set(free))


def test_a_slot_may_be_read_and_written_by_its_owner(layer: StateLayer) -> None:
    text, memory = random_texts(1)[0][:20], new_memory(layer)
    (expected,) = compute(layer, new_memory(layer), [(text, NO_STATE, ((19, 5),))])
    parts, read = [], NO_STATE
    for row in text.split(1):
        parts += compute(layer, memory, [(row, read, ((0, 7),))])
        read = 7
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-9)
