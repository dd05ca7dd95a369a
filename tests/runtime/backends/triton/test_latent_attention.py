"""Latent attention over pages in Triton against float64 over the same codes and against plain torch: every form of
pages, windows, ragged lengths, drafts and trees of them, splits, long spans; unwritten memory is poisoned."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from covering import covering
from engines import answer_all, small_engine
from poisoned_memory import poison, poisoned_allocations
from ragged import ragged_rows, rows_of
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model
from torch import Tensor
from triton_steps import use_triton

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.kv_quant import dequantize_heads, quantize_heads, rotate_heads
from runtime.backends.kv_pages import ExactPlaces, TokenPages
from runtime.backends.latent import LatentHeads
from runtime.backends.scores import Scores
from runtime.backends.torch.attention import PagedAttention, StepKeys
from runtime.backends.triton.attention import HeadPages, attention_unsupported_reason
from runtime.backends.triton.latent import TritonLatentAttention
from runtime.backends.triton.tiling import Tiling
from runtime.core.batch import AttentionGroup, RaggedRows
from runtime.core.draft_tree import ancestor_bits, paths
from runtime.core.model_config import parse_config
from runtime.core.request import SamplingParams
from runtime.model.loader import load_model

BLOCK_SIZE, NUM_BLOCKS, RANK, ROTATED, OWN, VALUE = 16, 12, 64, 16, 24, 40
SCALE = (OWN + ROTATED) ** -0.5


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_pages(form: str, device: torch.device) -> tuple[HeadPages, tuple[Tensor, Tensor]]:
    """Rotated keys and latents as a kernel reads them, and as exact numbers `[blocks, block_size, *]`."""
    codes, scales, exact = [], [], []
    for seed, width in enumerate((ROTATED, RANK)):
        heads = normal(NUM_BLOCKS, BLOCK_SIZE, 1, width, seed=seed).half()
        if form == "16bit":
            stored, metadata, known = heads, heads, heads.double()
        else:
            found = quantize_heads(heads, form)
            metadata = torch.stack([found.scale] if found.offset is None else [found.scale, found.offset], -1)
            stored, known = found.codes, dequantize_heads(found, torch.float64)
        codes.append(stored.to(device))
        scales.append(metadata.to(device))
        exact.append(known.squeeze(2))
    return HeadPages(tuple(codes), tuple(scales), (form, form), False), tuple(exact)


def attend(
    absorbed: Tensor, rotated: Tensor, read: HeadPages, ragged: RaggedRows, window=None, rows=16, splits=1
) -> Tensor:
    """Sums of latents `[heads, T, rank]`, computed on the device of the pages over memory that is poisoned before it is
    written; the longest sequence is split into about `splits`."""
    from runtime.backends.triton.kernels.latent_attention import attend_latents
    from runtime.backends.triton.kernels.tile_list import tile_list

    absorbed, rotated = (each.to(read.pages[0].device) for each in (absorbed, rotated))
    least = -(-ragged.num_keys // splits) if splits > 1 else 10**6
    tiling = Tiling(rows, len(absorbed), 1, 64, window or 0, least)
    with poisoned_allocations():
        tiles = tile_list(ragged, absorbed.shape[1], tiling)
        return attend_latents(absorbed, rotated, read, ragged, tiles, rows, SCALE, window).transpose(0, 1)


def spread(blocks: Tensor, positions: Tensor, device: torch.device, ancestors: Tensor | None = None) -> RaggedRows:
    """Equal numbers of tokens of sequences."""
    return ragged_rows(blocks.unbind(), positions.view(len(blocks), -1).to(device).unbind(), ancestors)


def reference(absorbed: Tensor, rotated: Tensor, keys: Tensor, latents: Tensor, seen: list[list[int]]) -> Tensor:
    """Sums of latents for tokens that see these of `keys [tokens, L, R]` and `latents [tokens, L, rank]`."""
    out = torch.empty(absorbed.shape, dtype=torch.float64)
    for token, visible in enumerate(seen):
        scores = absorbed[:, token].double() @ latents[token, visible].T
        scores += rotated[token].double() @ keys[token, visible].T
        out[:, token] = (scores * SCALE).softmax(-1) @ latents[token, visible]
    return out


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """On a GPU shares of latents are rounded to 16 bits for their product."""
    bound = 4e-3 if found.is_cuda else 2e-3
    found = found.double().to(wanted.device)
    assert (found - wanted).norm() / wanted.norm() < bound


CASES = [
    # lengths of the sequences, tokens of each, heads, window, rows of a program, splits
    ((50, 7), 1, 4, None, 16, 2),
    ((90,), 3, 4, 20, 16, 1),
    ((70,), 5, 7, None, 32, 1),
]


@pytest.mark.parametrize(("case", "form"), covering(CASES, ["16bit", "fp8", "int8"]), ids=str)
def test_against_float64(gpu, case, form: str) -> None:
    lengths, each, heads, window, rows, splits = case
    read, exact = random_pages(form, gpu)
    tokens = len(lengths) * each
    absorbed, query = normal(heads, tokens, RANK).half(), normal(tokens, heads, OWN + ROTATED).half()
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4))[: 6 * len(lengths)]
    blocks = blocks.view(len(lengths), 6)
    positions = torch.cat([torch.arange(length - each, length) for length in lengths])
    found = attend(absorbed, query[..., OWN:], read, spread(blocks, positions, gpu), window, rows, splits)
    assert found.dtype == torch.float16
    contexts = (part[blocks].flatten(1, 2).repeat_interleave(each, 0) for part in exact)
    seen = [list(range(max(0, 0 if window is None else last - window + 1), last + 1)) for last in positions.tolist()]
    assert_close(found, reference(absorbed, query[..., OWN:], *contexts, seen))


@pytest.mark.full
def test_tokens_of_a_tree_see_their_branch_and_padding_nothing(gpu) -> None:
    parents, root = (-1, 0, 1, 0, 3, -1, 5), 61
    ends = [[], *paths(parents)]
    (read, exact), heads = random_pages("16bit", gpu), 4
    absorbed, query = normal(heads, 16, RANK).half(), normal(16, heads, ROTATED).half()
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4)).view(2, 6)
    positions = torch.tensor([*(root + len(path) for path in ends), *(-1,) * 8])
    bits = torch.tensor([*ancestor_bits(parents), *(0,) * 8])
    found = attend(absorbed, query, read, spread(blocks, positions, gpu, bits), None, 32, 2)
    contexts = (part[blocks[0]].flatten(0, 1).expand(8, -1, -1) for part in exact)
    seen = [[*range(root + 1), *(root + 1 + number for number in path)] for path in ends]
    assert_close(found[:, :8], reference(absorbed[:, :8], query[:8], *contexts, seen))
    assert (found[:, 8:] == 0).all()


@pytest.mark.full
def test_a_sequence_does_not_see_its_neighbours(gpu) -> None:
    read, _ = random_pages("int8", gpu)
    absorbed, query = normal(4, 2, RANK).half(), normal(2, 4, ROTATED).half()
    blocks, positions = torch.arange(12).view(2, 6), torch.tensor([80, 40])
    together = attend(absorbed, query, read, spread(blocks, positions, gpu), None, 16, 2)
    read.scales[1][6:] = float("nan")
    alone = attend(absorbed, query, read, spread(blocks, positions, gpu), None, 16, 2)
    assert torch.equal(alone[:, 0], together[:, 0])
    assert alone[:, 1].isnan().all()


@pytest.mark.parametrize("form", ["16bit", "fp8", "int8"])
def test_all_sequences_of_a_step_in_one_launch(gpu, form: str) -> None:
    """A decode whose keys are split, a draft, a chunk after cached keys, a prompt, padding, and a tree."""
    parents, heads = (-1, 0, -1), 3
    spans = [(60, 61), (7, 10), (3, 12), (0, 6), (-1, 0)]
    positions = [*(torch.arange(*span) for span in spans), torch.tensor([20, 21, 22, 21])]
    bits = torch.tensor([0] * sum(map(len, positions[:-1])) + ancestor_bits(parents))
    read, exact = random_pages(form, gpu)
    tables = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4)).split([4, 1, 2, 1, 1, 3])
    tokens = sum(map(len, positions))
    absorbed, query = normal(heads, tokens, RANK).half(), normal(tokens, heads, ROTATED).half()
    seen = [list(range(last + 1)) for each in positions[:-1] for last in each.tolist()]
    seen += [[*range(21), *(21 + number for number in path)] for path in ([], *paths(parents))]
    ragged = ragged_rows(tables, [each.to(gpu) for each in positions], bits)
    found, row = attend(absorbed, query, read, ragged, None, 32, 3), 0
    for each, table in zip(positions, tables, strict=True):
        rows = slice(row, row + len(each))
        contexts = (part[table].flatten(0, 1).expand(len(each), -1, -1) for part in exact)
        if seen[row]:
            assert_close(found[:, rows], reference(absorbed[:, rows], query[rows], *contexts, seen[rows]))
        else:
            assert (found[:, rows] == 0).all()
        row = rows.stop


LATENT_MODEL = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 6),
    **{"model_type": "deepseek_v3", "num_hidden_layers": 1, "first_k_dense_replace": 1, "v_head_dim": VALUE},
    **{"kv_lora_rank": RANK, "qk_rope_head_dim": ROTATED, "qk_nope_head_dim": OWN},
}


def take_steps(make, device: torch.device, scheme: KVCacheScheme, bounds: tuple[int, ...]) -> Tensor:
    """Outputs of an attention for one sequence in several steps over poisoned pages, in float64."""
    config = parse_config(LATENT_MODEL)
    stop = bounds[-1]
    inputs = [(6, OWN + ROTATED), (1, ROTATED), (1, RANK)]
    query, key, latent = (normal(stop, *shape, seed=i).to(device, torch.float16) for i, shape in enumerate(inputs, 5))
    weights = (0.2 * normal(6, size, RANK, seed=size).to(device, torch.float16) for size in (OWN, VALUE))
    pages = TokenPages(config, scheme, NUM_BLOCKS, BLOCK_SIZE, torch.float16, device)
    poison(pages.memory)
    pages.memory.clear(range(NUM_BLOCKS))
    rotate = rotate_heads if scheme.rotate else (lambda heads: heads)
    cache = SimpleNamespace(
        pages=pages, scheme=scheme, rotate=rotate, sinks=None, residual_window=None, sources=config.kv_sources
    )
    table = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(6))[: -(-stop // BLOCK_SIZE)]
    slots = (table[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten().to(device)
    scores, out = Scores(latents=(LatentHeads(*weights, SCALE),)), []
    for begin, end in pairwise(bounds):
        positions = torch.arange(begin, end, device=device)
        group = AttentionGroup(slice(0, end - begin), table.to(device), positions, 1, end, 0 < begin < end - 1)
        batch = SimpleNamespace(groups=(group,), slots=slots[begin:end], positions=positions, ragged=rows_of([group]))
        step = make(StepKeys(cache, batch, ExactPlaces(None, None)), (None,), scores)
        out.append(step(0, *(part[begin:end] for part in (query, key, latent))).flatten())
    return torch.cat(out).double()


@pytest.mark.parametrize(
    "scheme",
    [
        KVCacheScheme("int8", rotate=True),
        pytest.param(KVCacheScheme("16bit"), marks=pytest.mark.full),
        pytest.param(KVCacheScheme("fp8"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_step_agrees_with_plain_torch(gpu, monkeypatch, scheme: KVCacheScheme) -> None:
    """A prompt whose keys are expanded, its next part, a draft and a single token, through the same pages."""
    monkeypatch.setattr("runtime.backends.triton.latent.MIN_SPAN_PRODUCTS", 30 * 70)
    bounds = 0, 40, 70, 72, 73
    plain, found = (take_steps(make, gpu, scheme, bounds) for make in (PagedAttention, TritonLatentAttention))
    assert_close(found, plain)


@pytest.mark.full
@pytest.mark.parametrize(("family", "products"), [("deepseek_v3", 2**20), ("deepseek_v3", 200), ("youtu", 200)])
def test_greedy_tokens_through_the_engine(gpu, tmp_path, monkeypatch, family: str, products: int) -> None:
    """All spans in one launch, or those of 16 tokens, after others in the batch, with expanded keys."""
    monkeypatch.setattr("runtime.backends.triton.latent.MIN_SPAN_PRODUCTS", products)
    folder = save_tiny_model(
        tmp_path / "model", family, **VARIANTS[family] | {"kv_lora_rank": RANK, "qk_rope_head_dim": ROTATED}
    )
    answers, greedy = [], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for fused in (False, True):
        engine = small_engine(load_model(folder, dtype="float32"), prefill_chunk=16, kv_cache="int8")
        if fused:
            use_triton(engine.runner)
            engine.runner.kernels = replace(engine.runner.kernels, layers=None, records=False)
        poison(engine.runner.pages.memory)
        answers.append(answer_all(engine, [(str(n), list(range(11, 11 + n)), greedy) for n in (40, 2, 5)]))
    assert answers[1] == answers[0]


@pytest.mark.parametrize(
    ("sizes", "cache", "fact"),
    [
        ({}, KVCacheScheme(), ""),
        ({}, KVCacheScheme("fp8", rotate=True), ""),
        ({"kv_lora_rank": 384}, KVCacheScheme(), "128, 256, 512"),
        ({"qk_rope_head_dim": 48}, KVCacheScheme(), "32, 64"),
        ({}, KVCacheScheme.named("k8v4"), "16bit, fp8, int8"),
        ({}, KVCacheScheme("int8", sinks=2), "exact"),
        ({}, KVCacheScheme("int8", residual_length=16), "exact"),
    ],
    ids=str,
)
def test_refusals_say_why(sizes: dict[str, int], cache: KVCacheScheme, fact: str) -> None:
    config = parse_config({**LATENT_MODEL, "kv_lora_rank": 512, "qk_rope_head_dim": 64, **sizes})
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, config=config)
    reason = attention_unsupported_reason(model, SimpleNamespace(kv_cache=cache))
    assert fact in reason
    assert bool(reason) == bool(fact)
