"""Compiled latent attention over pages of every form against float64 on the numbers that the pages hold."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from covering import covering
from engines import answer_all, small_engine
from poisoned_memory import poison
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model
from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.cpu.binding import best_instruction_set, library, set_threads
from runtime.backends.cpu.latent import CpuLatentAttention, latents_unsupported_reason
from runtime.backends.kv_pages import ExactPlaces, KVCache, TokenPages
from runtime.backends.latent import LatentHeads
from runtime.backends.scores import Scores
from runtime.backends.torch.attention import PagedAttention, StepKeys
from runtime.core.batch import AttentionGroup, Batch
from runtime.core.draft_tree import ancestor_bits, paths
from runtime.core.memory_plan import KVCacheChoice, MemoryPlan
from runtime.core.model_config import DecoderConfig, parse_config
from runtime.core.request import SamplingParams
from runtime.model.loader import load_model

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
SETS = range(best_instruction_set() + 1)
CPU = torch.device("cpu")
BLOCK_SIZE, ROTATED, OWN, VALUE = 16, 8, 24, 40
SCALE = (OWN + ROTATED) ** -0.5

Case = tuple[int, int, int | None, tuple[tuple[int, int, int], ...]]
CASES: tuple[Case, ...] = (
    (4, 64, None, ((2, 1, 700), (1, 3, 90), (1, 1, 1))),
    (40, 96, None, ((1, 5, 513), (3, 1, 33))),
    (3, 512, 50, ((1, 2, 300), (1, 1, 520))),
    (4, 64, None, ((1, 60, 60), (2, 1, 40))),
    (128, 32, None, ((1, 2, 70),)),
)
"""Heads, rank, window, and groups: sequences, tokens of each in the step, tokens of the longest; others are shorter."""


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def config_of(heads: int, rank: int) -> DecoderConfig:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    names = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), heads)
    latent = {"kv_lora_rank": rank, "qk_rope_head_dim": ROTATED, "qk_nope_head_dim": OWN, "v_head_dim": VALUE}
    layers = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "first_k_dense_replace": 1}
    return parse_config({**sizes, **names, **latent, **layers})


class World:
    """Sequences in pages that held NaN before, and an attention of their last tokens."""

    def __init__(self, case: Case, scheme: KVCacheScheme) -> None:
        self.heads, self.rank, self.window, groups = case
        weights = (0.2 * normal(self.heads, size, self.rank, seed=size) for size in (OWN, VALUE))
        self.latent_heads = LatentHeads(*weights, SCALE)
        num_blocks = sum(count * -(-keys // BLOCK_SIZE) for count, _, keys in groups) + 3
        pages = TokenPages(config_of(self.heads, self.rank), scheme, num_blocks, BLOCK_SIZE, torch.bfloat16, CPU)
        poison(pages.memory)
        memory = SimpleNamespace(
            kv_cache=scheme, exact=SimpleNamespace(num_sequences=0), attention_window=SimpleNamespace(window=None)
        )
        self.cache = KVCache(config_of(self.heads, self.rank), memory, pages, (None,))
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(4))
        self.groups, row, block = [], 0, 0
        for count, tokens, keys in groups:
            per = -(-keys // BLOCK_SIZE)
            lengths = [max(tokens, keys - 7 * index) for index in range(count)]
            blocks = order[block : block + count * per]
            positions = torch.cat([torch.arange(length - tokens, length) for length in lengths])
            rows = slice(row, row + count * tokens)
            self.groups.append(AttentionGroup(rows, blocks, positions, count, keys, tokens > 1 or count > 1))
            for table, length in zip(blocks.view(count, per), lengths, strict=True):
                pages.memory.clear(table[(length - 1) // BLOCK_SIZE :].tolist())
                places = torch.arange(length - tokens)
                slots = table[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
                pages.write(0, slots, *(normal(len(slots), 1, size, seed=size) for size in (ROTATED, self.rank)))
            row, block = rows.stop, block + count * per
        sizes = (self.heads, OWN + ROTATED), (1, ROTATED), (1, self.rank)
        self.inputs = [normal(row, *size, seed=9 + index) for index, size in enumerate(sizes)]

    def batch(self) -> Batch:
        slots = []
        for group in self.groups:
            tables = group.blocks.view(group.num_sequences, -1)
            for table, positions in zip(tables, group.positions.view(group.num_sequences, -1), strict=True):
                slots.append(table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
        nothing = torch.empty(0, dtype=torch.int64)
        return Batch((), nothing, nothing, torch.cat(slots), tuple(self.groups), (), nothing, (), ())

    def keys(self) -> StepKeys:
        return StepKeys(self.cache, self.batch(), ExactPlaces(None, None))

    def attend(self, instruction_set: int = -1) -> Tensor:
        scores = Scores(latents=(self.latent_heads,))
        return CpuLatentAttention(self.keys(), (self.window,), scores, instruction_set)(0, *self.inputs)

    def expected(self) -> Tensor:
        """Plain torch in float64, absorbed or expanded, after the step is written."""
        heads = LatentHeads(self.latent_heads.key.double(), self.latent_heads.value.double(), SCALE)
        plain = PagedAttention(self.keys(), (self.window,), Scores(latents=(heads,)))
        plain.masks = {
            seen: [None if mask is None else mask.double() for mask in masks] for seen, masks in plain.masks.items()
        }
        parts = [self._exact(plain, index, group) for index, group in enumerate(self.groups)]
        return torch.cat(parts)

    def _exact(self, plain: PagedAttention, index: int, group: AttentionGroup) -> Tensor:
        heads, mask = plain.scores.latent(0), plain.masks[self.window, None][index]
        query = self.inputs[0][group.rows].double()
        query = heads.rotated(query, self.cache.rotate)
        key, latent = (part.double() for part in plain.keys.read(0, index))
        return heads.attend_tokens(query, key, latent, self._mask(group) if mask is None else mask)

    def _mask(self, group: AttentionGroup) -> Tensor:
        hidden = torch.arange(group.num_keys) > group.positions.unsqueeze(-1)
        return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill_(hidden, float("-inf"))


FORMS = [KVCacheScheme(name) for name in ("16bit", "int8", "fp8", "k8v4", "int4")] + [
    KVCacheScheme("int4", rotate=True)
]


@pytest.mark.parametrize(("case", "scheme", "instruction_set"), covering(CASES, FORMS, SETS), ids=str)
def test_against_float64(case: Case, scheme: KVCacheScheme, instruction_set: int) -> None:
    world = World(case, scheme)
    found = world.attend(instruction_set)
    expected = world.expected()
    assert found.dtype is torch.bfloat16
    assert (found.double() - expected).norm() < 0.01 * expected.norm()


def test_neighbours_and_threads_change_no_bit() -> None:
    world = World(CASES[1], KVCacheScheme("int8"))
    together = world.attend()
    try:
        for threads in (1, 3):
            set_threads(threads)
            assert torch.equal(world.attend(), together)
    finally:
        set_threads(0)
    _, second = world.groups
    world.groups = [replace(second, rows=slice(0, 3))]
    world.inputs = [part[second.rows] for part in world.inputs]
    assert torch.equal(world.attend(), together[second.rows])


def test_tokens_of_a_tree_see_their_branch() -> None:
    parents = (-1, 0, 1, 0, 3, -1, 5)
    world = World((4, 64, None, ((1, 8, 70),)), KVCacheScheme())
    ends = [[], *paths(parents)]
    positions = torch.tensor([62 + len(path) for path in ends])
    plain = world.attend()
    world.groups = [replace(world.groups[0], ancestors=torch.tensor(ancestor_bits(parents)))]
    tree = world.attend()
    assert not torch.equal(plain, tree)
    heads, (key, latent) = world.latent_heads, (part[0].double() for part in world.keys().read(0, 0))
    double = LatentHeads(heads.key.double(), heads.value.double(), SCALE)
    for token, path in enumerate(ends):
        seen = [*range(63), *(63 + number for number in path)]
        expected = double.attend_tokens(
            world.inputs[0][token : token + 1].double(), key[None, seen], latent[None, seen], None
        )
        assert len(seen) == positions[token] + 1
        assert (tree[token].double() - expected[0]).norm() < 0.01 * expected.norm()


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="set 99"):
        World(CASES[0], KVCacheScheme()).attend(99)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ""),
        ({"dtype": torch.float32}, "float32"),
        ({"scheme": KVCacheScheme("int8", sinks=4)}, "exact tokens"),
        ({"rank": 640}, "640"),
    ],
    ids=str,
)
def test_what_it_cannot_read_it_refuses(options: dict, said: str) -> None:
    model = SimpleNamespace(
        config=config_of(4, options.get("rank", 64)), dtype=options.get("dtype", torch.bfloat16), device=CPU
    )
    plan = MemoryPlan(0, 0, 16, 1, 1, "", kv_choice=KVCacheChoice(options.get("scheme", KVCacheScheme())))
    reason = latents_unsupported_reason(model, plan)
    assert said in reason
    assert bool(reason) == bool(said)


@pytest.mark.full
@pytest.mark.parametrize("format", ["16bit", "int8"])
def test_a_model_is_served_with_it(tmp_path: Path, format: str) -> None:
    """Its tokens are those of plain torch as often as those of another order of sums may be."""
    decoder = load_model(save_tiny_model(tmp_path / "model", "minicpm3", torch.bfloat16, **VARIANTS["minicpm3"]))
    engine = small_engine(decoder, block_size=16, kv_cache=format)
    assert isinstance(engine.runner.kernels.attention(World(CASES[0], KVCacheScheme()).batch()), CpuLatentAttention)
    prompts = [list(range(10, 10 + length)) for length in (5, 50, 90)]
    requests = [
        (str(i), prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    found = answer_all(engine, requests)
    again = answer_all(small_engine(decoder, block_size=32, kv_cache=format, prefill_chunk=16), requests)
    alike = sum(a == b for key in found for a, b in zip(found[key], again[key], strict=True))
    assert alike > 0.5 * 60
