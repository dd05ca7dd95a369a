"""Attention over pages in Triton against plain torch in float64 over the same codes: every form, grouped heads,
windows, ragged lengths, drafts, chunks, empty splits; unwritten memory is poisoned."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from covering import covering
from decoder_configs import decoder_config, with_heads
from poisoned_memory import poison, poisoned_allocations
from ragged import ragged_rows, rows_of
from torch import Tensor

from compress.checkpoint.kv_cache import CODE_BITS, KVCacheScheme
from compress.checkpoint.kv_quant import QuantizedHeads, dequantize_heads, quantize_heads, rotate_heads
from compress.models.rope import Rope
from runtime.backends.kv_pages import ExactPlaces, TokenPages, pack_halves
from runtime.backends.scores import PLAIN_LAYER, LayerScores, Scores
from runtime.backends.torch.attention import PagedAttention, StepKeys, StreamingAttention
from runtime.backends.triton.attention import (
    NO_SINK_TOKENS,
    HeadPages,
    SinkTokens,
    TritonAttention,
    attention_unsupported_reason,
)
from runtime.backends.triton.prefill import span_unsupported_reason
from runtime.backends.triton.tiling import Tiling
from runtime.core.batch import AttentionGroup, RaggedRows
from runtime.core.draft_tree import ancestor_bits, paths
from runtime.model.rotary import Rotary

BLOCK_SIZE, NUM_BLOCKS, HEAD_DIM = 16, 24, 32


class Pages:
    """Random keys and values in two forms: as a kernel reads them, and as exact numbers
    `[blocks, block_size, heads, D]`."""

    def __init__(self, forms: tuple[str, str], kv_heads: int, device: torch.device, head_dim: int = HEAD_DIM) -> None:
        shape = NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim
        stored = [self._stored(normal(*shape, seed=seed), form) for seed, form in enumerate(forms, 1)]
        codes, scales, self.exact = zip(*stored, strict=True)
        pages = (tuple(t.to(device) for t in tensors) for tensors in (codes, scales))
        self.read, self.device = HeadPages(*pages, forms, False), device

    @staticmethod
    def _stored(heads: Tensor, form: str) -> tuple[Tensor, Tensor, Tensor]:
        if form == "16bit":
            return heads.half(), heads.half(), heads.half().double()
        found: QuantizedHeads = quantize_heads(heads, form)
        metadata = [found.scale] if found.offset is None else [found.scale, found.offset]
        codes = pack_halves(found.codes) if CODE_BITS[form] == 4 else found.codes
        return codes, torch.stack(metadata, -1), dequantize_heads(found, torch.float64)

    def attend(
        self, query: Tensor, blocks: Tensor, positions: Tensor, window: int | None = None, rows: int = 16,
        splits: int = 1, front: SinkTokens = NO_SINK_TOKENS, ancestors: Tensor | None = None,
        scores: LayerScores = PLAIN_LAYER,
    ) -> Tensor:  # fmt: skip
        """Equal numbers of tokens of sequences; the longest is split into about `splits`."""
        each = positions.view(len(blocks), -1).to(self.device).unbind()
        return self.attend_rows(
            query, ragged_rows(blocks.unbind(), each, ancestors), window, rows, splits, front, scores
        )

    def attend_rows(
        self, query: Tensor, ragged: RaggedRows, window: int | None = None, rows: int = 16, splits: int = 1,
        front: SinkTokens = NO_SINK_TOKENS, scores: LayerScores = PLAIN_LAYER, captured: bool = False,
    ) -> Tensor:  # fmt: skip
        """On the device of the pages, over memory that is poisoned before it is written; as in a captured step, whose
        lengths are not known."""
        from runtime.backends.triton.kernels.paged_attention import attend

        query, kv_heads = query.to(self.device), self.read.pages[0].shape[2]
        least = -(-ragged.num_keys // splits) if splits > 1 else 10**6
        tiling = Tiling(rows, query.shape[1] // kv_heads, kv_heads, 1, window or scores.chunk or 0, least)
        work = sum(tiling.tiles(tokens) * keys for tokens, keys in ragged.lengths)
        tiling = tiling._replace(programs=-(-work * kv_heads // least))
        ragged = replace(ragged, lengths=()) if captured else ragged
        with poisoned_allocations():
            found = attend(query, self.read, ragged, tiling, window, front, on(scores, query))
        return found.view(query.shape)


def on(scores: LayerScores, like: Tensor) -> LayerScores:
    sinks = scores.sink_logits
    return scores if sinks is None else replace(scores, sink_logits=sinks.to(like))


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(query, keys, values, blocks, positions, window, scores=PLAIN_LAYER):
    """The slow way, one row after the other."""
    tokens, heads, head_dim = query.shape
    each, shared = tokens // len(blocks), heads // keys.shape[2]
    out = torch.empty(tokens, heads, head_dim, dtype=torch.float64)
    for token in range(tokens):
        context = [keys[blocks[token // each]].flatten(0, 1), values[blocks[token // each]].flatten(0, 1)]
        last = int(positions[token])
        first = 0 if window is None else max(0, last - window + 1)
        first = first if scores.chunk is None else max(first, last // scores.chunk * scores.chunk)
        for head in range(heads):
            key, value = (part[first : last + 1, head // shared] for part in context)
            logits = key @ query[token, head] * head_dim**-0.5
            if scores.softcap is not None:
                logits = torch.tanh(logits / scores.softcap) * scores.softcap
            sinks = () if scores.sink_logits is None else (scores.sink_logits.double()[head : head + 1],)
            out[token, head] = torch.softmax(torch.cat((logits, *sinks)), 0)[: len(key)] @ value
    return out


CASES = [
    # lengths of the sequences, tokens of each, heads, kv heads, window, splits
    ((50, 7), 1, 4, 2, None, 1),
    ((90, 3), 1, 8, 2, None, 4),
    ((70,), 1, 2, 2, 20, 2),
    ((33, 90), 5, 6, 2, None, 3),
    ((80,), 37, 4, 1, 24, 1),
]


FORMS = [("16bit",) * 2, ("fp8",) * 2, ("int8",) * 2, ("int8", "int4"), ("int4",) * 2]


@pytest.mark.parametrize(("case", "forms"), covering(CASES, FORMS), ids=str)
def test_against_float64(gpu, case, forms) -> None:
    lengths, each, heads, kv_heads, window, splits = case
    pages, query = Pages(forms, kv_heads, gpu), normal(len(lengths) * each, heads, HEAD_DIM).half()
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4))[: 6 * len(lengths)].view(-1, 6)
    positions = torch.cat([torch.arange(length - each, length) for length in lengths])
    found = pages.attend(query, blocks, positions, window, 16 if each < 10 else 64, splits)
    assert found.dtype == torch.float16
    assert_close(found, reference(query.double(), *pages.exact, blocks, positions, window))


def mixed_step(trees: bool) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Decodes of short and long sequences, a draft, a chunk after cached keys, a prompt, and padding: what each token
    sees, by sequence; with trees also their parents."""
    spans = [(6, 7), (89, 90), (29, 34), (41, 78), (0, 23), (-1, 0)]
    parents = [()] * len(spans) + [(-1, 0, 0, -1)] * trees
    return [list(range(*span)) for span in spans] + [[61, 62, 63, 63, 62]] * trees, parents


@pytest.mark.parametrize(
    ("forms", "window", "scores", "trees", "rows", "captured"),
    [
        (FORMS[0], None, PLAIN_LAYER, True, 16, False),
        (FORMS[1], 20, LayerScores(softcap=1.5), False, 64, False),
        (FORMS[2], None, LayerScores(chunk=24), True, 64, True),
        (FORMS[3], None, LayerScores(sink_logits=torch.linspace(-30, 4, 6).half()), False, 32, True),
        (FORMS[4], 20, LayerScores(softcap=1.5, sink_logits=torch.linspace(-30, 4, 6).half()), True, 64, False),
    ],
    ids=str,
)
def test_all_sequences_of_a_step_in_one_launch(gpu, forms, window, scores, trees: bool, rows, captured) -> None:
    """The longest sequence is split, others store their result themselves; tables have several lengths."""
    positions, parents = mixed_step(trees)
    pages, order = Pages(forms, 2, gpu), torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4))
    tables = list(order.split([1, 6, 3, 5, 2, 1, 6]))[: len(positions)]
    query = normal(sum(map(len, positions)), 6, HEAD_DIM).half()
    bits = [ancestor_bits(p) if p else [0] * len(each) for each, p in zip(positions, parents, strict=True)]
    ancestors = torch.tensor([bit for each in bits for bit in each]) if trees else None
    places = [torch.tensor(each, device=gpu) for each in positions]
    expected, row = [], 0
    for each, table, guesses in zip(positions, tables, parents, strict=True):
        branches = [[], *paths(guesses)] if guesses else [None] * len(each)
        for last, branch in zip(each, branches, strict=True):
            seen = list(range(last + 1) if branch is None else range(each[0] + 1))
            seen += [each[0] + 1 + number for number in branch or ()]
            context = [exact[table].flatten(0, 1)[seen].unsqueeze(1) for exact in pages.exact]
            at, blocks = torch.tensor([len(seen) - 1]), [torch.arange(len(seen))]
            one = query[row : row + 1].double()
            expected.append(reference(one, *context, blocks, at, window, scores) if seen else torch.zeros_like(one))
            row += 1
    ragged = ragged_rows(tables, places, ancestors)
    found = pages.attend_rows(query, ragged, window, rows, 3, scores=scores, captured=captured)
    assert_close(found, torch.cat(expected))


CHANGED_CASES = [
    ((50, 7), 1, 4, 2, None, 2),
    ((33, 31), 3, 4, 2, 20, 2),
    ((60,), 11, 4, 1, None, 1),
]
CHANGED = {
    "capped": LayerScores(softcap=1.5),
    "chunks": LayerScores(chunk=24),
    "capped in chunks": LayerScores(chunk=9, softcap=1.5),
    "sink logits": LayerScores(sink_logits=torch.linspace(-30, 4, 8).half()),
}


@pytest.mark.parametrize(("case", "forms", "change"), covering(CHANGED_CASES, FORMS[::2], list(CHANGED)), ids=str)
def test_changed_scores_against_float64(gpu, case, forms, change) -> None:
    """Soft caps, chunks of tokens, sink logits far below and far above the scores."""
    lengths, each, heads, kv_heads, window, splits = case
    scores = CHANGED[change]
    scores = scores if scores.sink_logits is None else replace(scores, sink_logits=scores.sink_logits[-heads:])
    pages, query = Pages(forms, kv_heads, gpu), normal(len(lengths) * each, heads, HEAD_DIM).half()
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4))[: 6 * len(lengths)].view(-1, 6)
    positions = torch.cat([torch.arange(length - each, length) for length in lengths])
    found = pages.attend(query, blocks, positions, window, 16 if each < 10 else 64, splits, scores=scores)
    expected, plain = (
        reference(query.double(), *pages.exact, blocks, positions, window, each) for each in (scores, PLAIN_LAYER)
    )
    assert_close(found, expected)
    assert (expected - plain).norm() > 0.03 * plain.norm()


@pytest.mark.parametrize("forms", [("16bit",) * 2, ("fp8",) * 2, ("int8", "int4"), ("int4",) * 2], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_every_size_of_heads(gpu, head_dim: int, forms: tuple[str, str]) -> None:
    pages, query = Pages(forms, 2, gpu, head_dim), normal(6, 8, head_dim).half()
    blocks, positions = torch.arange(12).view(2, 6), torch.tensor([70, 71, 72, 3, 4, 5])
    found = pages.attend(query, blocks, positions, rows=32, splits=2)
    assert_close(found, reference(query.double(), *pages.exact, blocks, positions, None))


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_sequence_does_not_see_its_neighbours(gpu, part: int) -> None:
    """Keys, or values, that are not finite make the rows that see them fail, and no others."""
    pages, query = Pages(("int4",) * 2, 2, gpu), normal(2, 4, HEAD_DIM).half()
    blocks, positions = torch.arange(12).view(2, 6), torch.tensor([80, 40])
    together = pages.attend(query, blocks, positions, splits=2)
    pages.read.scales[part][6:] = float("nan")
    alone = pages.attend(query, blocks, positions, splits=2)
    assert torch.equal(alone[0], together[0])
    assert alone[1].isnan().all()


ONE_LAYER = ((6, 2, HEAD_DIM, None),)


def take_steps(
    make, device, format="16bit", spans=((0, 37), (37, 41), (41, 42)), exact_sinks=0, hidden=(), layers=ONE_LAYER
):
    """Outputs of an attention for one sequence in several steps over poisoned pages, in float64.

    Args:
        make: from the step's keys to the attention.
        hidden: blocks of the sequence that no span sees: they are left out of the table.
        layers: heads of each, see `with_heads`.
    """
    scheme = KVCacheScheme.named(format, sinks=exact_sinks)
    config = with_heads(decoder_config(6, 2, HEAD_DIM, num_layers=len(layers)), layers)
    sizes = (NUM_BLOCKS, BLOCK_SIZE, torch.float16, device)
    random = torch.Generator().manual_seed(5)
    stop = spans[-1][1]
    parts = [
        [torch.randn(stop, n, dim, generator=random).to(device, torch.float16) for n in (heads, kv_heads, kv_heads)]
        for heads, kv_heads, dim, _ in layers
    ]
    queries, keys, values = zip(*parts, strict=True)
    keys, values = ([part[source] for source in config.kv_sources] for part in (keys, values))
    pages = TokenPages(config, scheme, *sizes)
    poison(pages.memory)
    pages.memory.clear(range(NUM_BLOCKS))
    rotate = rotate_heads if scheme.rotate else (lambda heads: heads)
    sinks, places = None, ExactPlaces(None, None)
    if exact_sinks:
        stored = (
            [part[:exact_sinks].expand(3, -1, -1, -1).contiguous() for part in each]
            for each in (map(rotate, keys), values)
        )
        sinks = SimpleNamespace(count=exact_sinks, **dict(zip(("keys", "values"), stored, strict=True)))
        places = ExactPlaces(torch.tensor([1], device=device), None)
    cache = SimpleNamespace(pages=pages, scheme=scheme, rotate=rotate, sinks=sinks, residual_window=None)
    cache.sources = config.kv_sources
    table = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(6))[: -(-stop // BLOCK_SIZE)]
    slots = (table[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten().to(device)
    seen = torch.tensor([block for index, block in enumerate(table.tolist()) if index not in hidden], device=device)
    out = []
    for begin, end in spans:
        positions = torch.arange(begin, end, device=device)
        blocks, among = (table.to(device), positions)
        if begin:
            blocks, among = seen, positions - len(hidden) * BLOCK_SIZE
        ragged = 0 < begin < end - 1
        group = AttentionGroup(slice(0, end - begin), blocks, among, 1, int(among[-1]) + 1, ragged)
        batch = SimpleNamespace(groups=(group,), slots=slots[begin:end], positions=positions, ragged=rows_of([group]))
        step = make(StepKeys(cache, batch, places))
        for layer, heads in enumerate(zip(queries, keys, values, strict=True)):
            out.append(step(layer, *(part[begin:end] for part in heads)).flatten())
    return torch.cat(out).double()


def assert_close(found, wanted) -> None:
    """On a GPU shares of values are rounded to 16 bits for their product."""
    bound = 4e-3 if found.is_cuda else 2e-3
    found = found.double().to(wanted.device)
    assert (found - wanted).norm() / wanted.norm() < bound


@pytest.mark.parametrize("format", ["16bit", "k8v4", "int4"])
def test_a_step_agrees_with_plain_torch(gpu, format: str) -> None:
    """Prompt, draft and single tokens of several sequences, written and read through the pages that torch uses."""
    plain, triton = (
        take_steps(lambda keys, of=of: of(keys, (None,)), gpu, format) for of in (PagedAttention, TritonAttention)
    )
    assert_close(triton, plain)


@pytest.mark.full
@pytest.mark.parametrize(("format", "exact_sinks"), [("16bit", 0), ("int4", 0), ("fp8", 3)])
def test_layers_with_other_heads_and_keys_of_earlier_layers(gpu, format: str, exact_sinks: int) -> None:
    """A window and chunks in some of them, sink logits in all."""
    layers, windows = ((6, 2, 32, None), (4, 1, 64, None), (6, 2, 32, 0), (8, 1, 64, 1)), (4, None, 3, None)
    logits = tuple(torch.linspace(-4, 2, heads).half().to(gpu) for heads, *_ in layers)
    scores = Scores(None, (None, 4, None, None), logits)
    options = {"format": format, "exact_sinks": exact_sinks, "layers": layers, "spans": ((0, 5), (5, 6))}
    plain, triton = (
        take_steps(lambda keys, of=of: of(keys, windows, scores), gpu, **options)
        for of in (PagedAttention, TritonAttention)
    )
    assert_close(triton, plain)


@pytest.mark.parametrize(
    ("format", "window"),
    [
        *(("fp8", None), ("k8v4", None), ("int4", 9)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("int8", 9), ("int4", None))),
    ],
)
def test_exact_sinks_beside_quantized_pages(gpu, format: str, window: int | None) -> None:
    """With a window they are seen as long as it reaches them."""
    options = {"format": format, "spans": ((0, 3), (3, 10), (10, 11), (11, 15))}
    plain = take_steps(lambda keys: PagedAttention(keys, (window,)), gpu, exact_sinks=5, **options)
    assert_close(take_steps(lambda keys: TritonAttention(keys, (window,)), gpu, exact_sinks=5, **options), plain)
    assert (take_steps(lambda keys: PagedAttention(keys, (window,)), gpu, **options) - plain).norm() > 0.01


@pytest.mark.parametrize(
    ("format", "exact_sinks"),
    [
        *(("16bit", 0), ("fp8", 6), ("int4", 3)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("int8", 3), ("k8v4", 0), ("k8v4", 3), ("int4", 0))),
    ],
)
def test_streams_look_at_their_sinks_with_a_second_query(gpu, format: str, exact_sinks: int) -> None:
    """Past the window, with blocks between sinks and window given back."""
    rotary = Rotary(Rope("default", 10000.0, {}), HEAD_DIM, torch.float16, gpu).exact()
    options = {"format": format, "spans": ((0, 8), (69, 70), (70, 74)), "exact_sinks": exact_sinks, "hidden": (1, 2)}
    plain = take_steps(lambda keys: StreamingAttention(keys, 6, 20, rotary), gpu, **options)
    assert_close(take_steps(lambda keys: TritonAttention(keys, (20,), sinks=6, rotary=rotary), gpu, **options), plain)
    assert (take_steps(lambda keys: PagedAttention(keys, (20,)), gpu, **options) - plain).norm() > 0.01


@pytest.mark.parametrize(("form", "splits", "window"), [("16bit", 1, None), ("16bit", 3, 8), ("int4", 3, None)])
def test_padding_reads_nothing_and_gives_zeros(gpu, form: str, splits: int, window: int | None) -> None:
    """Rows of padding have position -1: alone in a program, or with rows that attend to keys."""
    pages, query = Pages((form,) * 2, 2, gpu), normal(3, 4, HEAD_DIM).half()
    blocks, positions = torch.tensor([[3, 4, 5], [6, 7, 8], [9, 9, 9]]), torch.tensor([40, 7, -1])
    for poisoned in pages.read.scales if form == "int4" else pages.read.pages:
        poisoned[9] = float("nan")
    found = pages.attend(query, blocks, positions, window, splits=splits)
    at_once = ragged_rows(blocks[:1].unbind(), [torch.tensor([6, 7, -1], device=gpu)])
    together = pages.attend_rows(query, at_once, window, splits=splits)
    alone = pages.attend(query[:1], blocks[:1], positions[:1], window, splits=splits)
    assert torch.equal(found[0], alone[0])
    assert torch.isfinite(found[1]).all()
    assert (found[2] == 0).all()
    assert (together[2] == 0).all()


@pytest.mark.parametrize(
    ("form", "window", "splits", "scores"),
    [
        ("16bit", None, 1, PLAIN_LAYER),
        ("fp8", 30, 3, PLAIN_LAYER),
        ("int4", None, 2, PLAIN_LAYER),
        pytest.param("int4", None, 2, LayerScores(softcap=1.5, chunk=21), marks=pytest.mark.full),
        pytest.param("16bit", 30, 1, LayerScores(chunk=3), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_tokens_of_a_tree_see_their_branch_only(gpu, form, window, splits, scores) -> None:
    """Two sequences of a known token and seven draft tokens: each row is what it would be at the end of its branch.
    Chunks of 21 and of 3 tokens end after the known token and after draft tokens."""
    parents, roots = (-1, 0, 1, 0, 3, -1, 5), (61, 20)
    ends = [(root, path) for root in roots for path in ([], *paths(parents))]
    pages, query = Pages((form,) * 2, 2, gpu), normal(16, 6, HEAD_DIM).half()
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4))[:12].view(2, 6)
    positions = torch.tensor([root + len(path) for root, path in ends])
    bits = torch.tensor(ancestor_bits(parents)).repeat(2)
    found = pages.attend(query, blocks, positions, window, 64, splits, ancestors=bits, scores=scores)
    expected = []
    for row, (root, path) in enumerate(ends):
        seen = [*range(root + 1), *(root + 1 + number for number in path)]
        context = [exact[blocks[row // 8]].flatten(0, 1)[seen].unsqueeze(1) for exact in pages.exact]
        at = torch.tensor([len(seen) - 1])
        expected.append(
            reference(query[row : row + 1].double(), *context, [torch.arange(len(seen))], at, window, scores)
        )
    assert_close(found, torch.cat(expected))


@pytest.mark.parametrize("form", ["16bit", "int4"])
def test_a_tree_among_the_sinks_of_a_stream(gpu, form: str) -> None:
    """Guesses in so short a text that they stand among the sinks: with one query for both, sinks change nothing."""
    parents, root = (-1, -1, 0), 5
    pages, query = Pages((form,) * 2, 2, gpu), normal(4, 6, HEAD_DIM).half().to(gpu)
    positions = torch.tensor([root, *(root + len(path) for path in paths(parents))])
    options = {"window": 20, "ancestors": torch.tensor(ancestor_bits(parents))}
    fronts = SinkTokens(), SinkTokens(sinks=7, moved=query), SinkTokens(sinks=12, moved=query)
    plain, *found = (pages.attend(query, torch.tensor([[3, 4]]), positions, front=front, **options) for front in fronts)
    for each in found:
        assert_close(each, plain.double())


def torch_spans(keys: StepKeys, windows: tuple[int | None, ...] = (None,)) -> TritonAttention:
    """Long spans over copies, as on a GPU."""
    attention = TritonAttention(keys, windows)
    attention.takes_spans = True
    return attention


@pytest.mark.parametrize("format", ["int4", "int8", "fp8", "k8v4"])
def test_torch_computes_long_spans_of_prompts(gpu, monkeypatch, format: str) -> None:
    """From the beginning, after other keys, and inside a window that is longer."""
    options = {"spans": ((0, 130), (130, 262)), "format": format}
    plain = take_steps(lambda keys: PagedAttention(keys, (None,)), gpu, **options)
    monkeypatch.setattr("runtime.backends.triton.prefill.MIN_SPAN_TOKENS", 128)
    monkeypatch.setattr("runtime.backends.triton.kernels.paged_attention.prepare", None)
    for window in (None, 262):
        assert_close(take_steps(lambda keys, window=window: torch_spans(keys, (window,)), gpu, **options), plain)


@pytest.mark.full
def test_long_spans_by_torch_are_those_over_pages(gpu, monkeypatch) -> None:
    monkeypatch.setattr("runtime.backends.triton.prefill.MIN_SPAN_TOKENS", 128)
    options = {"spans": ((0, 40), (40, 170)), "format": "int8"}
    over_pages = take_steps(lambda keys: TritonAttention(keys, (None,)), gpu, **options)
    assert_close(take_steps(torch_spans, gpu, **options), over_pages)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({}, ""),
        ({"group": {"num_sequences": 2}}, "one span"),
        ({"group": {"positions": torch.arange(100)}}, "512 tokens"),
        ({"group": {"num_keys": 40000}}, "32768 keys"),
        ({"group": {"ancestors": torch.arange(200)}}, "trees"),
        ({"formats": ("16bit", "16bit")}, "16-bit"),
        ({"formats": ("16bit", "int8")}, ""),
        ({"head_dim": 512}, "256 dimensions"),
        ({"window": 699}, "every key"),
        ({"scores": LayerScores(chunk=256)}, "every key"),
        ({"window": 700, "scores": LayerScores(chunk=700)}, ""),
        ({"scores": LayerScores(softcap=30.0)}, "no scores"),
        ({"scores": LayerScores(sink_logits=torch.zeros(8))}, "no scores"),
    ],
    ids=str,
)
def test_which_spans_are_left_to_torch(change: dict, fact: str) -> None:
    group = AttentionGroup(slice(0, 600), torch.arange(44), torch.arange(100, 700), 1, 700, True)
    options = {"window": None, "scores": PLAIN_LAYER, "formats": ("int4", "int4"), "head_dim": 128}
    reason = span_unsupported_reason(replace(group, **change.pop("group", {})), **options | change)
    assert fact in reason
    assert bool(reason) == bool(fact)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dims", "recent", "fact"),
    [
        ("cuda", torch.bfloat16, (128,), 0, ""),
        ("cuda", torch.bfloat16, (256, 512), 0, ""),
        ("cpu", torch.bfloat16, (128,), 0, "NVIDIA"),
        ("cuda", torch.float32, (128,), 0, "16 bits"),
        ("cuda", torch.bfloat16, (16,), 0, "32, 64, 128, 256, 512"),
        ("cuda", torch.bfloat16, (64, 96), 0, "not 96"),
        ("cuda", torch.bfloat16, (128,), 64, "recent"),
    ],
)
def test_refusals_say_why(device: str, dtype: torch.dtype, head_dims: tuple[int, ...], recent: int, fact: str) -> None:
    config = SimpleNamespace(head_dims=head_dims, spec=SimpleNamespace(attentions=()))
    model = SimpleNamespace(device=torch.device(device), dtype=dtype, config=config)
    reason = attention_unsupported_reason(model, SimpleNamespace(kv_cache=SimpleNamespace(residual_length=recent)))
    assert fact in reason
    assert bool(reason) == bool(fact)
