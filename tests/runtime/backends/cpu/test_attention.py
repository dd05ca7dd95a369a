"""The compiled attention over its own pages, against float64 on the numbers that the pages hold."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from covering import covering
from decoder_configs import decoder_config, with_heads
from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.kv_quant import dequantize_heads, quantize_heads, read_back, rotate_heads
from compress.cpu.binding import best_instruction_set, library, set_threads
from runtime.backends.cpu.kv_pages import CpuPages, pages_unsupported_reason
from runtime.backends.cpu.layers import CpuAttention
from runtime.backends.kv_pages import ExactPlaces, TokenPages
from runtime.backends.scores import PLAIN_LAYER, LayerScores, Scores
from runtime.backends.torch.attention import PagedAttention, StepKeys
from runtime.core.batch import AttentionGroup, Batch
from runtime.core.draft_tree import ancestor_bits, paths
from runtime.core.model_config import DecoderConfig

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
SETS = range(best_instruction_set() + 1)
FORMATS = ("16bit", "int8", "k8v4", "int4")
CPU = torch.device("cpu")
LAYER, LAYERS = 1, 2

Shape = tuple[int, int, int, int]
SHAPES: tuple[Shape, ...] = (
    (8, 2, 64, 16),
    (3, 3, 32, 32),
    (14, 2, 96, 16),
    (16, 1, 128, 64),
    (5, 1, 256, 16),
    (2, 1, 512, 16),
)
"""Heads, key-value heads, head_dim, block size."""
SPANS = ((1, 1), (1, 5), (1, 16), (1, 257), (1, 600), (3, 40), (20, 20), (17, 290), (40, 513))
"""Tokens of a step and keys of a sequence."""


def config_of(shape: Shape) -> DecoderConfig:
    return decoder_config(*shape[:3], LAYERS)


class World:
    """Sequences in pages that held garbage before, one group each, and what float64 makes of the same numbers."""

    def __init__(
        self,
        shape: Shape,
        format: str,
        spans: tuple[tuple[int, int], ...],
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.random, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.shape, self.scheme = shape, KVCacheScheme(format)
        self.heads, self.kv_heads, self.dim, self.block_size = shape
        counts = [-(-keys // self.block_size) for _, keys in spans]
        total = sum(counts) + 2
        self.pages = CpuPages(config_of(shape), self.scheme, total, self.block_size, dtype, CPU)
        for tensor in self.pages.memory.tensors.values():
            tensor.view(torch.uint8).fill_(255)  # NaN wherever it is read as numbers
        self.tables = torch.randperm(total, generator=self.random)[: sum(counts)].split(counts)
        self.spans = spans
        self.keys = [self._written(table, keys) for table, (_, keys) in zip(self.tables, spans, strict=True)]
        self.query = self.normal(sum(tokens for tokens, _ in spans), self.heads)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, self.dim, generator=self.random).to(self.dtype)

    def _written(self, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Writes a sequence; returns keys and values as they stand in the pages, `[L, kv_heads, D]`."""
        key, value = self.normal(length, self.kv_heads), self.normal(length, self.kv_heads) + 0.5
        self.pages.memory.clear([int(table[-1])])
        places = torch.arange(length)
        slots = table[places // self.block_size] * self.block_size + places % self.block_size
        # In two parts, as a prompt and the tokens after it; keys and values are views of one tensor.
        beside = torch.cat((key, value), 1)
        for start, stop in pairwise((0, length // 2, length)):
            part = beside[start:stop]
            self.pages.write(LAYER, slots[start:stop], part[:, : self.kv_heads], part[:, self.kv_heads :])
        self.written = key, value
        return self.stored(key, self.scheme.key_format), self.stored(value, self.scheme.value_format)

    @staticmethod
    def stored(heads: Tensor, format: str) -> Tensor:
        return heads if format == "16bit" else dequantize_heads(quantize_heads(heads, format), torch.float32)

    def batch(self, chosen: list[int] | None = None) -> Batch:
        """A step of some of the sequences."""
        groups, row = [], 0
        for index in range(len(self.spans)) if chosen is None else chosen:
            tokens, keys = self.spans[index]
            positions = torch.arange(keys - tokens, keys)
            groups.append(AttentionGroup(slice(row, row + tokens), self.tables[index], positions, 1, keys, True))
            row += tokens
        nothing = torch.empty(0, dtype=torch.int64)
        return Batch((), nothing, nothing, nothing, tuple(groups), (), nothing, (), ())

    def attend(
        self,
        window: int | None,
        instruction_set: int,
        chosen: list[int] | None = None,
        changed: LayerScores = PLAIN_LAYER,
    ) -> Tensor:
        rows, windows = self.rows(chosen), (window,) * LAYERS
        options = {"instruction_set": instruction_set, "scores": all_layers(changed)}
        attention = CpuAttention(self.pages, self.batch(chosen), windows, **options)
        empty = self.query.new_empty(0, self.kv_heads, self.dim)
        return attention(LAYER, self.query[rows], empty, empty)

    def rows(self, chosen: list[int] | None) -> Tensor:
        """Rows of the query that belong to some of the sequences."""
        all_rows = torch.arange(len(self.query)).split([tokens for tokens, _ in self.spans])
        return torch.cat([all_rows[index] for index in (range(len(self.spans)) if chosen is None else chosen)])

    def expected(self, window: int | None, changed: LayerScores = PLAIN_LAYER) -> Tensor:
        parts = self.query.split([tokens for tokens, _ in self.spans])
        return torch.cat([exact(query, *keys, window, changed) for query, keys in zip(parts, self.keys, strict=True)])


def all_layers(changed: LayerScores) -> Scores:
    sinks = () if changed.sink_logits is None else (changed.sink_logits,) * LAYERS
    return Scores(changed.softcap, (changed.chunk,) * LAYERS, sinks)


def exact(query: Tensor, key: Tensor, value: Tensor, window: int | None, changed: LayerScores = PLAIN_LAYER) -> Tensor:
    """Attention of the last tokens of a sequence in float64: `[n, heads, D]`."""
    shared = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(shared, 1) for x in (key, value))
    scores = torch.einsum("nhd,lhd->hnl", query.double(), key) * query.shape[-1] ** -0.5
    last = torch.arange(len(key) - len(query), len(key)).unsqueeze(-1)
    keys = torch.arange(len(key))
    hidden = (keys > last) | (keys <= last - (window or len(key) + 1))
    if changed.softcap is not None:
        scores = torch.tanh(scores / changed.softcap) * changed.softcap
    if changed.chunk is not None:
        hidden |= keys < last // changed.chunk * changed.chunk
    scores = scores.masked_fill(hidden, -torch.inf)
    if changed.sink_logits is None:
        return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), value)
    column = changed.sink_logits.double().view(-1, 1, 1).expand(-1, len(query), 1)
    return torch.einsum("hnl,lhd->nhd", torch.cat((scores, column), -1).softmax(-1)[..., :-1], value)


VIEWS = [*((shape, None) for shape in SHAPES), (SHAPES[0], 100), (SHAPES[2], 16)]


@pytest.mark.parametrize(("view", "format", "instruction_set"), covering(VIEWS, FORMATS, SETS), ids=str)
def test_as_exact_as_its_output(view: tuple[Shape, int | None], format: str, instruction_set: int) -> None:
    shape, window = view
    world = World(shape, format, SPANS)
    expected = world.expected(window)
    error = (world.attend(window, instruction_set).double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 0.01
    assert error.mean() < 0.003


@pytest.mark.parametrize(("view", "format", "instruction_set"), covering(VIEWS, FORMATS, SETS), ids=str)
def test_float32_is_as_exact(view: tuple[Shape, int | None], format: str, instruction_set: int) -> None:
    shape, window = view
    world = World(shape, format, SPANS, dtype=torch.float32)
    expected, found = world.expected(window), world.attend(window, instruction_set)
    assert found.dtype == torch.float32
    assert ((found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-5
    alone = [world.attend(window, instruction_set, [index]) for index in range(len(SPANS))]
    assert torch.equal(torch.cat(alone), found)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("instruction_set", SETS)
def test_sink_logits_take_part_in_the_softmax(format: str, instruction_set: int) -> None:
    """Some far below all scores, some far above."""
    world = World(SHAPES[0], format, SPANS)
    sinks = LayerScores(sink_logits=torch.linspace(-60, 3, world.heads))
    expected = world.expected(100, sinks)
    error = (world.attend(100, instruction_set, changed=sinks).double() - expected).norm(dim=-1)
    assert (error / expected.norm(dim=-1)).max() < 0.01
    assert (expected - world.expected(100)).norm() > 0.1 * expected.norm()
    flood = LayerScores(sink_logits=torch.full((world.heads,), 1e4))
    drowned = world.attend(100, instruction_set, changed=flood)
    assert torch.equal(drowned, torch.zeros_like(drowned))


CHANGED = (LayerScores(softcap=1.5), LayerScores(chunk=16), LayerScores(chunk=100), LayerScores(softcap=1.5, chunk=300))


@pytest.mark.parametrize(("changed", "format", "instruction_set"), covering(CHANGED, FORMATS, SETS), ids=str)
def test_capped_scores_and_chunks_of_tokens(changed: LayerScores, format: str, instruction_set: int) -> None:
    for shape, window in ((SHAPES[0], None), (SHAPES[2], 60)):
        world = World(shape, format, SPANS)
        expected = world.expected(window, changed)
        error = (world.attend(window, instruction_set, changed=changed).double() - expected).norm(dim=-1)
        assert (error / expected.norm(dim=-1)).max() < 0.01
        assert (expected - world.expected(window)).norm() > 0.05 * expected.norm()


@pytest.mark.parametrize("instruction_set", SETS)
def test_caps_far_away_and_far_below_the_scores(instruction_set: int) -> None:
    world = World(SHAPES[0], "16bit", SPANS)
    plain, like_plain = world.attend(None, instruction_set), world.attend(None, instruction_set, None, LayerScores(1e4))
    assert (plain - like_plain).double().norm() < 0.005 * plain.double().norm()
    flat = LayerScores(softcap=1e-3)
    expected = world.expected(None, flat)
    assert (world.attend(None, instruction_set, None, flat).double() - expected).norm() < 0.005 * expected.norm()


@pytest.mark.parametrize("format", FORMATS)
def test_layers_with_other_heads_and_keys_of_earlier_layers(format: str) -> None:
    """Against plain torch over its own pages; tokens move between slots on the way."""
    layers = (6, 2, 32, None), (4, 1, 64, None), (6, 2, 32, 0), (8, 1, 64, 1)
    config, scheme = with_heads(decoder_config(6, 2, 32, len(layers)), layers), KVCacheScheme(format)
    windows, scores = (9, None, 5, None), Scores(2.0, (None, 8, None, None))
    random, spans = torch.Generator().manual_seed(0), ((0, 37), (37, 41))
    heads = [
        [torch.randn(41, n, dim, generator=random).bfloat16() for n in (heads, kv_heads, kv_heads)]
        for heads, kv_heads, dim, _ in layers
    ]
    found: dict[type, list[Tensor]] = {}
    for kind in (TokenPages, CpuPages):
        pages = kind(config, scheme, 6, 16, torch.bfloat16, CPU)
        pages.memory.clear(range(6))
        cache = SimpleNamespace(pages=pages, scheme=scheme, sources=config.kv_sources, sinks=None, residual_window=None)
        cache.rotate = rotate_heads if scheme.rotate else lambda heads: heads
        for begin, end in spans:
            rows = torch.arange(begin, end)
            group = AttentionGroup(slice(0, end - begin), torch.tensor([4, 0, 2]), rows, 1, end, True)
            slots = group.blocks[rows // 16] * 16 + rows % 16
            batch = SimpleNamespace(groups=(group,), slots=slots, positions=rows)
            step = (
                CpuAttention(pages, batch, windows, scheme.rotate, scores=scores)
                if kind is CpuPages
                else PagedAttention(StepKeys(cache, batch, ExactPlaces(None, None)), windows, scores)
            )
            for layer, source in enumerate(config.kv_sources):
                query, key, value = heads[layer][0], *heads[source][1:]
                out = step(layer, *(part[begin:end].clone() for part in (query, key, value)))
                found.setdefault(kind, []).append(out.double().flatten())
            pages.move([4 * 16 + 3], [4 * 16 + 2])
    plain, compiled = (torch.cat(found[kind]) for kind in (TokenPages, CpuPages))
    assert (plain - compiled).norm() < 0.01 * plain.norm()


PARENTS = (-1, 0, 1, 0, 3, -1, 5)
"""A draft tree: two branches of three tokens with a common prefix, and one of two."""


@pytest.mark.parametrize(
    ("span", "format", "instruction_set"),
    covering(
        [(9, None, None), (40, None, None), (260, None, None), (300, 20, None), (260, None, 254), (300, 20, 98)],
        FORMATS,
        SETS,
    ),
    ids=str,
)
def test_tokens_of_a_tree_see_their_branch_as_if_it_were_alone(
    span: tuple[int, int | None, int | None], format: str, instruction_set: int
) -> None:
    """Another sequence of the batch has no tree. The draft tokens may begin in one part of the keys, or in one chunk of
    tokens, and end in the next."""
    keys, window, chunk = span
    changed = LayerScores(chunk=chunk)
    world = World(SHAPES[0], format, ((1 + len(PARENTS), keys), (2, 30)))
    plain = world.batch()
    first, second = plain.groups
    root = keys - 1 - len(PARENTS)
    positions = root + torch.tensor([0, *map(len, paths(PARENTS))])
    tree = replace(first, positions=positions, ancestors=torch.tensor(ancestor_bits(PARENTS)))
    windows = (window,) * LAYERS
    attention = CpuAttention(
        world.pages,
        replace(plain, groups=(tree, second)),
        windows,
        instruction_set=instruction_set,
        scores=all_layers(changed),
    )
    empty = world.query.new_empty(0, world.kv_heads, world.dim)
    found = attention(LAYER, world.query, empty, empty).double()
    key, value = world.keys[0]
    for row, path in enumerate([[], *paths(PARENTS)]):
        seen = [*range(root + 1), *(root + 1 + number for number in path)]
        expected = exact(world.query[row : row + 1], key[seen], value[seen], window, changed)
        assert (found[row] - expected[0]).norm() < 0.01 * expected.norm()
    assert torch.equal(found[tree.rows.stop :], world.attend(window, instruction_set, [1], changed).double())


@pytest.mark.parametrize(
    ("shape", "format", "dtype"), covering(SHAPES[:3], FORMATS, (torch.bfloat16, torch.float32)), ids=str
)
def test_tokens_move_between_slots(shape: Shape, format: str, dtype: torch.dtype) -> None:
    """Into other words and within one, into other blocks; nothing else changes."""
    world = World(shape, format, ((1, 3 * shape[3]),), dtype=dtype)
    size, table = shape[3], world.tables[0].tolist()
    places = [(6, 5), (7, 6), (12, 7), (size, size - 2), (size + 1, size - 1), (2 * size + 9, size)]
    before = world.pages.gather(LAYER, world.tables[0])
    slots = [[table[place // size] * size + place % size for place in side] for side in zip(*places, strict=True)]
    world.pages.move(*slots)
    for old, new in zip(before, world.pages.gather(LAYER, world.tables[0]), strict=True):
        for source, target in places:
            old[target] = old[source]
        assert torch.equal(old, new)


@pytest.mark.parametrize(
    ("shape", "format", "dtype"), covering(SHAPES, FORMATS, (torch.bfloat16, torch.float32)), ids=str
)
def test_pages_hold_what_the_scheme_says(shape: Shape, format: str, dtype: torch.dtype) -> None:
    world = World(shape, format, ((1, 100),), dtype=dtype)
    key, value = world.pages.gather(LAYER, world.tables[0])
    assert torch.equal(key[:100], read_back(world.written[0], world.scheme.key_format))
    assert torch.equal(value[:100], read_back(world.written[1], world.scheme.value_format))
    assert bool((key[100:] == 0).all())
    assert bool((value[100:] == 0).all())


@pytest.mark.parametrize("special", [0.0, 1e-30, 3e-7, 65000.0, 3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_numbers_at_the_edges_are_stored_like_others_store_them(format: str, special: float) -> None:
    world = World((2, 1, 32, 16), format, ((1, 16),))
    head = world.normal(1, 1)
    heads = torch.cat((torch.full_like(head, special), head * special, head.index_fill(-1, torch.tensor([3]), special)))
    world.pages.write(LAYER, world.tables[0][0] * 16 + torch.arange(3), heads, -heads)
    key, value = world.pages.gather(LAYER, world.tables[0])
    torch.testing.assert_close(key[:3], read_back(heads, format), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(value[:3], read_back(-heads, format), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", ["16bit", "int4"])
def test_neighbours_threads_and_spans_change_no_bit(format: str) -> None:
    world = World(SHAPES[0], format, SPANS)
    together = world.attend(None, -1)
    for index in range(len(SPANS)):
        assert torch.equal(world.attend(None, -1, [index]), together[world.rows([index])])
    backwards = list(reversed(range(len(SPANS))))
    assert torch.equal(world.attend(None, -1, backwards), together[world.rows(backwards)])
    try:
        for threads in (1, 2, 5):
            set_threads(threads)
            assert torch.equal(world.attend(None, -1), together)
            assert torch.equal(world.attend(None, -1, [4]), together[world.rows([4])])
    finally:
        set_threads(0)


@pytest.mark.parametrize(("format", "instruction_set"), covering(["16bit", "int4"], SETS), ids=str)
def test_keys_beyond_a_segment(format: str, instruction_set: int) -> None:
    """Parts are joined in segments, which several threads may share: in the same order by however many."""
    world = World((4, 1, 32, 16), format, ((1, 4200), (70, 2080), (1, 2048)))
    together, expected = world.attend(None, instruction_set), world.expected(None)
    error = (together.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.mean() < 0.003
    try:
        for threads in (1, 2, 5):
            set_threads(threads)
            for chosen in ([0], [1], [2], [2, 0, 1]):
                assert torch.equal(world.attend(None, instruction_set, chosen), together[world.rows(chosen)])
    finally:
        set_threads(0)


@pytest.mark.parametrize(
    ("shape", "instruction_set", "dtype"), covering(SHAPES, SETS, (torch.bfloat16, torch.float32)), ids=str
)
def test_keys_and_queries_are_turned_as_the_scheme_turns_them(
    shape: Shape, instruction_set: int, dtype: torch.dtype
) -> None:
    world = World(shape, "16bit", ((1, 1),), dtype=dtype)
    query, key = world.normal(1, world.heads), world.normal(1, world.kv_heads)
    batch = replace(world.batch(), slots=world.tables[0][:1] * world.block_size)
    expected = rotate_heads(query), rotate_heads(key)
    attention = CpuAttention(world.pages, batch, (None,) * LAYERS, hadamard=True, instruction_set=instruction_set)
    value = world.normal(1, world.kv_heads)
    out = attention(LAYER, query, key, value)
    assert torch.equal(query, expected[0])
    assert torch.equal(world.pages.gather(LAYER, world.tables[0])[0][:1], expected[1])
    assert torch.equal(out, value.repeat_interleave(world.heads // world.kv_heads, 1))


def test_a_token_gets_the_same_alone_as_in_a_span() -> None:
    world = World(SHAPES[0], "int8", ((40, 513),))
    together = world.attend(None, -1)
    for token in (0, 7, 39):
        alone = replace_span(world, token)
        assert torch.equal(alone, together[token : token + 1])


def replace_span(world: World, token: int) -> Tensor:
    """One token of the world's only span by itself."""
    (tokens, keys) = world.spans[0]
    position = keys - tokens + token
    batch = world.batch()
    group = replace(batch.groups[0], rows=slice(0, 1), positions=torch.tensor([position]), num_keys=position + 1)
    attention = CpuAttention(world.pages, replace(batch, groups=(group,)), (None,) * LAYERS)
    empty = world.query.new_empty(0, world.kv_heads, world.dim)
    return attention(LAYER, world.query[token : token + 1], empty, empty)


@pytest.mark.parametrize("format", ["16bit", "int4"])
@pytest.mark.parametrize("instruction_set", SETS)
def test_what_is_not_finite_fails_its_sequence_alone(format: str, instruction_set: int) -> None:
    world = World(SHAPES[0], format, ((1, 30), (1, 30)))
    broken = world.normal(1, world.kv_heads)
    broken[0, 0, 5] = torch.nan
    world.pages.write(LAYER, world.tables[0][:1] * world.block_size + 3, broken, broken)
    out = world.attend(None, instruction_set)
    assert not bool(out[0].isfinite().all())
    assert bool(out[1].isfinite().all())


def refusals() -> Iterator[tuple[dict, str]]:
    yield {}, ""
    yield {"block_size": 8}, "blocks"
    yield {"dtype": torch.float64}, "not float64"
    yield {"scheme": KVCacheScheme("fp8")}, "fp8"
    yield {"scheme": KVCacheScheme("int8", sinks=4)}, "sinks"
    yield {"config": config_of((2, 2, 48, 16))}, "48"
    yield {"device": torch.device("cuda")}, "cuda"


@pytest.mark.parametrize(("changed", "said"), tuple(refusals()), ids=str)
def test_what_it_cannot_hold_it_refuses_with_a_reason(changed: dict, said: str) -> None:
    usual = {"config": config_of(SHAPES[0]), "scheme": KVCacheScheme(), "block_size": 16}
    reason = pages_unsupported_reason(**{**usual, "dtype": torch.bfloat16, "device": CPU, **changed})
    assert said in reason
    assert bool(reason) == bool(said)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="set 99"):
        World(SHAPES[0], "16bit", ((1, 3),)).attend(None, 99)
