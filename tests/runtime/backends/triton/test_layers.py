"""A decoder served with fused Triton kernels, against the same codes in plain torch: every kind of linear and of pages;
prompts, single tokens and padding in one batch; greedy tokens through the engine."""

from dataclasses import dataclass, replace
from functools import partial
from math import hypot
from types import SimpleNamespace

import pytest
import torch
from decoder_configs import decoder_config
from engines import answer_all
from overlapping_kernels import record_programs
from poisoned_memory import poison, poisoned_allocations
from ragged import rows_of
from rounding import assert_same_bits
from tiny_models import random_weight
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton_steps import use_triton

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.kv_quant import rotate_heads
from compress.checkpoint.weights import Activations, Fp8, Int, Scheme
from compress.models.linear import Linear as LinearSpec
from compress.models.mlp import Mixture
from compress.models.router import Router
from runtime.backends.base import Linear, NormWeights, Target
from runtime.backends.kv_pages import ExactPlaces, TokenPages
from runtime.backends.mlp import DenseMLP, Expert, Experts
from runtime.backends.model import AttentionWeights, Layer
from runtime.backends.torch.attention import PagedAttention, StepKeys
from runtime.backends.torch.linear import DenseLinear
from runtime.backends.torch.ops import TorchOps
from runtime.backends.torch.quantized_linear import ReferenceLinear
from runtime.backends.triton.attention import TritonAttention
from runtime.backends.triton.layers import TritonLayers, TritonOps, layers_unsupported_reason
from runtime.backends.triton.linear import FP8_KERNEL, W4A16_KERNEL, W8A8_KERNEL, W8A16_KERNEL
from runtime.backends.triton.mixture import TritonMixture
from runtime.core.attention_window import AttentionWindow
from runtime.core.batch import AttentionGroup, Batch
from runtime.core.config import RuntimeConfig
from runtime.core.memory_plan import MemoryPlan
from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine
from runtime.model.composed import LowRank, SideBySide
from runtime.model.decoder import Decoder
from runtime.model.embedding import DenseEmbedding
from runtime.model.mixers.attention import AttentionLayer
from runtime.model.rotary import HeadRotation, Rotary
from runtime.runner.runner import build_runner

SIZE, LAYERS, BLOCK, NUM_BLOCKS, VOCABULARY = 128, 2, 4, 12, 64
INT4, INT4_ASYMMETRIC, W8A8, INT8 = Int(4, 32), Int(4, 64, False), Int(8, None, True, Activations.INT8), Int(8, 64)
FP8 = Fp8(Activations.FP8)
KERNELS = {INT4: W4A16_KERNEL, INT4_ASYMMETRIC: W4A16_KERNEL, W8A8: W8A8_KERNEL, INT8: W8A16_KERNEL, FP8: FP8_KERNEL}


@dataclass
class World:
    """A random decoder of 2 layers on one device.

    Attributes:
        kind: a scheme of all linears; `dense`; `mixed`: dense, of low rank, side by side, and int4 in one model; or
            `mixture`: int4 with experts.
    """

    kind: Scheme | str
    device: torch.device
    dtype: torch.dtype = torch.float16
    head_dim: int = 32
    head_norm: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = torch.Generator()
        self.heads, self.kv_heads = SIZE // self.head_dim, SIZE // self.head_dim // 2
        fields = {"hidden_size": SIZE, "intermediate_size": SIZE + 64, "qk_norm": self.head_norm}
        self.config = decoder_config(self.heads, self.kv_heads, self.head_dim, LAYERS, windows=(None, 4), **fields)

    def decoder(self, fused: bool, dtype: torch.dtype | None = None) -> Decoder:
        """With fused kernels, or the same numbers in plain torch."""
        self.random.manual_seed(self.seed)
        self.target = Target(self.device, dtype or self.dtype)
        layers = [self._layer(fused) for _ in range(LAYERS)]
        return Decoder(
            self.config,
            self.target.dtype,
            self.device,
            TritonOps() if fused else TorchOps(),
            layers,
            DenseEmbedding(self.numbers(VOCABULARY, SIZE)),
            NormWeights(self.vector(SIZE), self.config.spec.final_norm.eps),
            DenseLinear(self.numbers(VOCABULARY, SIZE), None),
            (Rotary(self.config.mixer.rope, self.head_dim, self.target.dtype, self.device),),
        )

    def numbers(self, *shape: int) -> Tensor:
        numbers = torch.randn(*shape, generator=self.random).mul_(shape[-1] ** -0.5)
        return numbers.to(self.dtype).to(self.device, self.target.dtype)

    def vector(self, *shape: int) -> Tensor:
        return self.numbers(*shape).mul_(0.2).add_(1)

    def linear(
        self, rows: int, columns: int, fused: bool, kind: Scheme | str | None = None, bias: bool = False
    ) -> Linear:
        kind = kind or self.scheme
        added = self.numbers(rows) if bias else None
        if kind == "dense":
            return DenseLinear(self.numbers(rows, columns), added)
        if kind == "low rank":
            left = self.linear(rows, 32, fused, "dense", bias)
            return LowRank(self.linear(32, columns, fused, INT4), left)
        if kind == "side by side":
            parts = self.linear(rows - 64, columns, fused, INT4), self.linear(64, columns, fused, W8A8)
            return SideBySide(parts)
        seed = int(torch.randint(2**31, (), generator=self.random))
        weight = random_weight((rows, columns), kind, seed, torch.float16)
        weight.scales.mul_(3 * columns**-0.5)
        return (KERNELS[kind].prepare if fused else ReferenceLinear.prepare)(weight, added, self.target)

    def _layer(self, fused: bool) -> Layer:
        inner, width = self.config.intermediate_size, (self.heads + 2 * self.kv_heads) * self.head_dim
        qkv, output, gate_up, down = (
            ("side by side", "low rank", INT4, "dense") if self.kind == "mixed" else (self.scheme,) * 4
        )
        norms = [NormWeights(self.vector(SIZE), self.config.spec.final_norm.eps) for _ in range(2)]
        attention = AttentionWeights(
            self.linear(width, SIZE, fused, qkv, bias=True),
            self.linear(SIZE, SIZE, fused, output),
            self.vector(self.heads + self.kv_heads, self.head_dim) if self.head_norm else None,
        )
        spec, mixer = self.config.spec.blocks[0].mlps[0], AttentionLayer(self.config.mixer, attention, HeadRotation())
        if self.kind == "mixture":
            return Layer(norms[0], mixer, norms[1], self._experts(fused))
        mlp = Expert(self.linear(2 * inner, SIZE, fused, gate_up), self.linear(SIZE, inner, fused, down))
        return Layer(norms[0], mixer, norms[1], DenseMLP(spec, mlp))

    def _experts(self, fused: bool) -> Experts:
        experts = [Expert(self.linear(2 * 64, SIZE, fused), self.linear(SIZE, 64, fused)) for _ in range(4)]
        router = Router(LinearSpec("gate", len(experts), SIZE), 2, scale=2.0)
        described = Mixture(router, self.config.spec.blocks[0].mlps * len(experts))
        mixture = Experts(described, self.numbers(len(experts), SIZE), tuple(experts))
        return replace(mixture, kernel=TritonMixture(mixture)) if fused else mixture

    @property
    def scheme(self) -> Scheme | str:
        return INT4 if self.kind == "mixture" else self.kind

    def cache(self, format: str, dtype: torch.dtype) -> SimpleNamespace:
        """Pages with nothing in them, as `KVCache` has them."""
        scheme, sizes = KVCacheScheme.named(format), (NUM_BLOCKS, BLOCK, dtype, self.device)
        pages = TokenPages(self.config, scheme, *sizes)
        poison(pages.memory)
        pages.memory.clear(range(NUM_BLOCKS))
        rotate = rotate_heads if scheme.rotate else (lambda heads: heads)
        own = {"sources": tuple(range(LAYERS)), "sinks": None, "residual_window": None}
        return SimpleNamespace(pages=pages, scheme=scheme, rotate=rotate, **own)


def make_batch(spans: list[tuple[int, int]], device: torch.device, padding: int = 0) -> Batch:
    """Tokens of this step and number of keys after it, for each sequence. Rows of padding are in the group of the last
    one, as sequences with as many tokens."""
    groups, positions, slots, block, row = [], [], [], 0, 0
    for tokens, keys in spans:
        table = torch.arange(block, block + -(-keys // BLOCK))
        places = torch.arange(keys - tokens, keys)
        groups.append((slice(row, row + tokens), table, places, 1, keys, tokens > 1))
        positions.append(places)
        slots.append(places + block * BLOCK)
        block, row = block + len(table), row + tokens
    if padding:
        nowhere = torch.full((padding,), -1)
        positions.append(nowhere)
        slots.append(nowhere)
        rows, table, places, _, keys, _ = groups[-1]
        places = torch.cat((places, nowhere))
        count = len(places) // (rows.stop - rows.start)
        groups[-1] = slice(rows.start, rows.stop + padding), table.repeat(count), places, count, keys, True
    there = [AttentionGroup(r, t.to(device), p.to(device), *rest) for r, t, p, *rest in groups]
    ids = torch.arange(row + padding) * 7 % VOCABULARY
    nothing = torch.empty(0, dtype=torch.int64)
    placed = [t.to(device) for t in (ids, torch.cat(positions), torch.cat(slots))]
    return Batch((), *placed, tuple(there), (), nothing, (), (), ragged=rows_of(there))


STEPS = [[(6, 6)], [(1, 7), (2, 3)]]


def logits_of(decoder: Decoder, cache: SimpleNamespace, batch: Batch, *, fused: bool) -> Tensor:
    keys = StepKeys(cache, batch, ExactPlaces(None, None))
    windows = decoder.config.windows
    if not fused:
        hidden = decoder.forward(batch.token_ids, batch.positions, PagedAttention(keys, windows))
        return decoder.logits(hidden).double()
    run = partial(TritonLayers(decoder, cache), attention=TritonAttention(keys, windows))
    with poisoned_allocations():
        hidden = decoder.forward(batch.token_ids, batch.positions, TritonAttention(keys, windows), run)
    return decoder.logits(hidden).double()


def error_of(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


def run_steps(world: World, format: str, fused: bool, dtype: torch.dtype) -> Tensor:
    decoder, cache = world.decoder(fused, dtype), world.cache(format, dtype)
    return torch.cat([logits_of(decoder, cache, make_batch(step, world.device), fused=fused) for step in STEPS])


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "format", "dtype", "head_dim"),
    [
        (INT4, "16bit", torch.float16, 32),
        (INT4_ASYMMETRIC, "int4", torch.float16, 64),
        (W8A8, "fp8", torch.bfloat16, 32),
        (INT8, "k8v4", torch.float16, 32),
        (FP8, "16bit", torch.bfloat16, 32),
        ("dense", "int8", torch.bfloat16, 64),
        ("mixed", "16bit", torch.bfloat16, 32),
        ("mixture", "16bit", torch.float16, 32),
    ],
    ids=str,
)
def test_as_exact_as_plain_torch(gpu, kind, format: str, dtype: torch.dtype, head_dim: int) -> None:
    """Both are compared with float64, which rounds only what the formats say, over the weights of four models: one code
    of a page that either of them rounds to the other side outweighs all else in one model."""
    plain, found = [], []
    for seed in range(4):
        world = World(kind, gpu, dtype, head_dim, head_norm=head_dim == 32, seed=seed)
        exact = run_steps(world, format, False, torch.float64)
        for fused, errors in ((False, plain), (True, found)):
            errors.append(error_of(run_steps(world, format, fused, dtype), exact))
    assert hypot(*found) < 1.3 * hypot(*plain)
    assert max(found) < 0.1


@pytest.mark.full
def test_greedy_tokens_through_the_engine(gpu) -> None:
    """Prompts in chunks, several requests, Hadamard-rotated keys: the tokens of plain torch. (Keys of 4 bits move the
    logits of this model more than its best tokens are apart.)"""
    world = World(INT4, gpu)
    config = RuntimeConfig(kv_cache="int8", kv_rotate=True, block_size=4, num_blocks=20, prefill_chunk=4)
    answers = []
    for fused in (False, True):
        runner = build_runner(world.decoder(fused), config)
        if fused:
            use_triton(runner)
        poison(runner.pages.memory)
        greedy = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        requests = [("a", [5, 9, 40, 3, 17], greedy), ("b", [11, 2], greedy)]
        answers.append(answer_all(Engine(runner, None, config), requests))
    assert answers[1] == answers[0]
    assert [len(answer) for answer in answers[1].values()] == [3, 3]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "format"), [(INT4, "int4"), (W8A8, "16bit")], ids=str)
def test_padding_changes_nothing(gpu, kind, format: str) -> None:
    world = World(kind, gpu)
    decoder = world.decoder(fused=True)
    alone, padded = world.cache(format, world.dtype), world.cache(format, world.dtype)
    expected = logits_of(decoder, alone, make_batch(STEPS[1], gpu), fused=True)
    found = logits_of(decoder, padded, make_batch(STEPS[1], gpu, padding=2), fused=True)
    if gpu.type == "cuda":  # cuBLAS, which computes the logits, chooses its kernel by the number of rows
        torch.testing.assert_close(found[: len(expected)], expected, rtol=0, atol=2e-3 * expected.abs().max().item())
    else:
        assert torch.equal(found[: len(expected)], expected)
    for name, tensor in alone.pages.memory.tensors.items():
        assert_same_bits(padded.pages.memory.tensors[name], tensor, name)


class Launches(TorchDispatchMode):
    """Counts launches on a GPU: Triton's kernels, and operations of torch except those that only reserve or view
    memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import GridExecutor

        super().__init__()
        self.names: list[str] = []
        self._launching = False
        launch = GridExecutor.__call__

        def counted(kernel: GridExecutor, *arguments: object, **options: object) -> None:
            self.names.append(kernel.fn.__name__)
            self._launching = True  # the interpreter computes with torch, too
            launch(kernel, *arguments, **options)
            self._launching = False

        monkeypatch.setattr(GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not (self._launching or function.is_view or "empty" in function.name()):
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "launches"), [(INT4, 10), (W8A8, 10), (INT8, 10), ("dense", 9)], ids=str)
def test_launches_of_a_layer(gpu, monkeypatch, kind, launches: int) -> None:
    if gpu.type == "cuda":
        pytest.skip("launches are counted in the interpreter")
    world = World(kind, gpu)
    decoder, cache, batch = world.decoder(fused=True), world.cache("int4", world.dtype), make_batch([(1, 20)], gpu)
    run = TritonLayers(decoder, cache)
    attention = TritonAttention(StepKeys(cache, batch, ExactPlaces(None, None)), decoder.config.windows)
    hidden, angles = decoder.embedding(batch.token_ids), decoder.rotary.at(batch.positions)
    with Launches(monkeypatch) as counted:
        run(hidden, *angles, attention)
    last = ["aten::add_.Tensor"] if kind == "dense" else ["split_k_reduce_kernel", "aten::add_.Tensor"]
    assert counted.names[-len(last) :] == last
    lists = len(set(decoder.config.windows))
    assert counted.names.count("list_tiles") == lists
    assert len(counted.names) == LAYERS * launches + lists + len(last), counted.names


def test_attention_takes_one_launch_whatever_the_step_holds(gpu, monkeypatch) -> None:
    if gpu.type == "cuda":
        pytest.skip("launches are counted in the interpreter")
    world, counts = World("dense", gpu), []
    decoder = world.decoder(fused=True)
    for spans in ([(1, 8)], [(1, 8), (2, 3), (4, 4)]):
        cache, batch = world.cache("int4", world.dtype), make_batch(spans, gpu)
        attention = TritonAttention(StepKeys(cache, batch, ExactPlaces(None, None)), decoder.config.windows)
        hidden, angles = decoder.embedding(batch.token_ids), decoder.rotary.at(batch.positions)
        run = TritonLayers(decoder, cache)
        with monkeypatch.context() as patched, Launches(patched) as counted:
            run(hidden, *angles, attention)
        counts.append(counted.names)
    assert counts[1].count("paged_attention") == LAYERS
    assert counts[1] == counts[0]


@pytest.mark.parametrize(("kind", "format"), [(INT4, "int4"), (W8A8, "16bit")], ids=str)
def test_every_kernel_of_overlapping_layers_waits_before_it_reads(gpu, monkeypatch, kind, format: str) -> None:
    if gpu.type == "cuda":
        pytest.skip("programs are watched in the interpreter")
    world = World(kind, gpu)
    decoder, batch, hidden = world.decoder(fused=True), make_batch([(1, 20), (1, 9)], gpu), []
    for overlaps in (False, True):
        cache = world.cache(format, world.dtype)
        attention = TritonAttention(StepKeys(cache, batch, ExactPlaces(None, None)), decoder.config.windows)
        angles, programs = decoder.rotary.at(batch.positions), record_programs(monkeypatch)
        run = TritonLayers(decoder, cache, overlaps)
        hidden.append(run(decoder.embedding(batch.token_ids), *angles, attention))
        assert (programs.waited > 0) == overlaps
        assert (programs.early > 0) == (not overlaps)
    assert torch.equal(*hidden)


def test_what_is_not_in_triton_refuses(gpu) -> None:
    decoder = World("dense", gpu).decoder(fused=True)
    memory = MemoryPlan(0, 64, 16, 4, 64, "")
    streams = replace(memory, attention_window=AttentionWindow(64, 4))
    assert layers_unsupported_reason(decoder, memory) == ""
    assert layers_unsupported_reason(decoder, replace(memory, attention_window=AttentionWindow(64))) == ""
    assert "ops between linears" in layers_unsupported_reason(replace(decoder, ops=TorchOps()), memory)
    assert "sinks" in layers_unsupported_reason(decoder, streams)
