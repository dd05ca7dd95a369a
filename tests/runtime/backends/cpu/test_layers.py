"""All layers in one compiled call give the bits of the same functions called one by one, whatever stands in a step."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from decoder_configs import decoder_config
from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.weights import Int
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.errors import ToolkitError
from compress.cpu.binding import EMULATED, INSTRUCTION_SETS, best_instruction_set, library
from compress.models.linear import Linear
from compress.models.mlp import Mixture
from compress.models.router import Router
from runtime.backends.base import NormWeights
from runtime.backends.cpu.kv_pages import CpuPages
from runtime.backends.cpu.layers import CpuAttention, CpuLayers, CpuOps, layers_unsupported_reason
from runtime.backends.cpu.linear import Activations, CpuLinear
from runtime.backends.cpu.mixture import CpuMixture
from runtime.backends.mlp import DenseMLP, Expert, Experts
from runtime.backends.model import AttentionWeights, Layer
from runtime.backends.torch.ops import TorchOps
from runtime.core.batch import AttentionGroup, Batch
from runtime.core.memory_plan import MemoryPlan
from runtime.model.decoder import Decoder
from runtime.model.embedding import DenseEmbedding
from runtime.model.mixers.attention import AttentionLayer
from runtime.model.rotary import HeadRotation, Rotary

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, SIZE, INNER, LAYERS, BLOCK = 6, 2, 32, 96, 160, 3, 16
WINDOWS = (None, 8, None)
SCALAR = INSTRUCTION_SETS.index("scalar")
ROUNDING = 2**-5
"""Relative difference of rows that were rounded to bfloat16 many times."""


class World:
    def __init__(self, *, head_norm: bool = True) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.config = decoder_config(
            HEADS,
            KV_HEADS,
            DIM,
            LAYERS,
            hidden_size=SIZE,
            intermediate_size=INNER,
            windows=WINDOWS,
            attention_bias=True,
            qk_norm=True,
        )
        rotary = Rotary(self.config.mixer.rope, DIM, torch.bfloat16, CPU)
        layers = [self._layer(head_norm) for _ in range(LAYERS)]
        self.decoder = Decoder(
            self.config,
            torch.bfloat16,
            CPU,
            CpuOps(),
            layers,
            DenseEmbedding(self.numbers(64, SIZE)),
            NormWeights(self.numbers(SIZE), self.config.spec.final_norm.eps),
            CpuLinear(self.numbers(64, SIZE)),
            (rotary,),
        )

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).mul_(0.2).bfloat16()

    def codes(self, rows: int, columns: int) -> CodedWeight:
        codes = torch.randint(0, 16, (rows, columns), generator=self.random, dtype=torch.uint8)
        scale = torch.rand(rows, columns // 32, generator=self.random).mul_(0.05).half()
        zero = torch.randint(0, 16, scale.shape, generator=self.random, dtype=torch.uint8)
        return Int(4, 32, symmetric=False).weight(codes, scale, zero)

    def _layer(self, head_norm: bool) -> Layer:
        width = (HEADS + 2 * KV_HEADS) * DIM
        norms = [NormWeights(self.numbers(SIZE), self.config.spec.final_norm.eps) for _ in range(2)]
        attention = AttentionWeights(
            CpuLinear(self.codes(width, SIZE), self.numbers(width)),
            CpuLinear(self.numbers(SIZE, HEADS * DIM)),
            self.numbers(HEADS + KV_HEADS, DIM) if head_norm else None,
        )
        mlp = Expert(
            CpuLinear(self.codes(2 * INNER, SIZE), activations=Activations.INT8_GROUP),
            CpuLinear(self.codes(SIZE, INNER)),
        )
        mixer = AttentionLayer(self.config.mixer, attention, HeadRotation())
        return Layer(norms[0], mixer, norms[1], DenseMLP(self.config.spec.blocks[0].mlps[0], mlp))

    def with_mixture(self, instruction_set: int) -> Decoder:
        """The decoder with a mixture in its second layer, of experts that are wider than the MLPs."""
        experts = [
            Expert(CpuLinear(self.codes(4 * INNER, SIZE)), CpuLinear(self.codes(SIZE, 2 * INNER))) for _ in range(4)
        ]
        for expert in experts:
            expert.gate_up._instruction_set = expert.down._instruction_set = instruction_set
        router = Router(Linear("gate", 4, SIZE), 2)
        spec = Mixture(router, (self.config.spec.blocks[0].mlps[0],) * 4)
        weights = Experts(spec, self.numbers(4, SIZE), tuple(experts))
        mixture = replace(weights, kernel=CpuMixture(weights, instruction_set))
        first, second, third = self.decoder.layers
        return replace(
            self.decoder,
            layers=[first, replace(second, mlp=mixture), third],
        )

    def decoder_of(self, instruction_set: int, has_mixture: bool) -> Decoder:
        decoder = self.with_mixture(instruction_set) if has_mixture else self.decoder
        for layer in decoder.layers:
            for linear in layer.linears:
                linear._instruction_set = instruction_set
        return replace(decoder, ops=CpuOps(instruction_set))

    def pages(self, format: str) -> CpuPages:
        pages = CpuPages(self.config, KVCacheScheme(format), 8, BLOCK, torch.bfloat16, CPU)
        pages.memory.clear(range(8))
        return pages

    def batch(self, spans: list[tuple[int, int]]) -> Batch:
        """Tokens of this step and number of keys after it, for each sequence. Earlier keys are zeros."""
        groups, positions, slots, block, row = [], [], [], 0, 0
        for tokens, keys in spans:
            table = torch.arange(block, block + -(-keys // BLOCK))
            places = torch.arange(keys - tokens, keys)
            groups.append(AttentionGroup(slice(row, row + tokens), table, places, 1, keys, tokens > 1))
            positions.append(places)
            slots.append(places + block * BLOCK)
            block, row = block + len(table), row + tokens
        token_ids = torch.randint(0, 64, (row,), generator=self.random)
        nothing = torch.empty(0, dtype=torch.int64)
        return Batch((), token_ids, torch.cat(positions), torch.cat(slots), tuple(groups), (), nothing, (), ())


@pytest.mark.parametrize("instruction_set", [*range(best_instruction_set() + 1), EMULATED])
@pytest.mark.parametrize("format", ["16bit", "int4"])
@pytest.mark.parametrize(("hadamard", "head_norm"), [(False, True), (True, False)])
@pytest.mark.parametrize("has_mixture", [False, True])
def test_same_bits_as_one_call_after_the_other(
    instruction_set: int, format: str, hadamard: bool, head_norm: bool, has_mixture: bool
) -> None:
    world = World(head_norm=head_norm)
    decoder = world.decoder_of(instruction_set, has_mixture)
    one, other = world.pages(format), world.pages(format)
    layers = CpuLayers(decoder, other, WINDOWS, instruction_set)
    for spans in ([(1, 1)], [(1, 20), (1, 3), (5, 30), (33, 33)]):
        batch = world.batch(spans)
        attention = CpuAttention(one, batch, WINDOWS, hadamard, instruction_set)
        expected = decoder.forward(batch.token_ids, batch.positions, attention)
        run = partial(layers, attention=CpuAttention(other, batch, WINDOWS, hadamard, instruction_set))
        found = decoder.forward(batch.token_ids, batch.positions, attention, run)
        assert torch.equal(found, expected)
        assert found.isfinite().all()
        for name, tensor in one.memory.tensors.items():
            assert torch.equal(tensor, other.memory.tensors[name]), name


@pytest.mark.parametrize("has_mixture", [False, True])
def test_layers_by_matrix_tiles_compute_what_plain_code_does(has_mixture: bool) -> None:
    found = {}
    for instruction_set in (EMULATED, SCALAR):
        world = World()
        decoder = world.decoder_of(instruction_set, has_mixture)
        pages, batch = world.pages("16bit"), world.batch([(1, 20), (1, 3), (5, 30), (33, 33)])
        run = partial(
            CpuLayers(decoder, pages, WINDOWS, instruction_set),
            attention=CpuAttention(pages, batch, WINDOWS, instruction_set=instruction_set),
        )
        attention = CpuAttention(pages, batch, WINDOWS, instruction_set=instruction_set)
        found[instruction_set] = decoder.forward(batch.token_ids, batch.positions, attention, run).double()
    difference = (found[EMULATED] - found[SCALAR]).norm(dim=1) / found[SCALAR].norm(dim=1)
    assert difference.max() < ROUNDING


MEMORY = MemoryPlan(0, 64, 16, 4, 64, "")


def test_what_is_not_compiled_refuses() -> None:
    decoder = World().decoder
    assert layers_unsupported_reason(decoder, MEMORY) == ""
    assert layers_unsupported_reason(replace(decoder, ops=TorchOps()), MEMORY) == "ops between linears are not compiled"
    mixture = World().with_mixture(0)
    assert layers_unsupported_reason(mixture, MEMORY) == ""
    mixture.layers[1].mlp = replace(mixture.layers[1].mlp, kernel=None)
    assert "mixtures" in layers_unsupported_reason(mixture, MEMORY)
    mlp = decoder.layers[1].mlp
    decoder.layers[1].mlp = replace(mlp, weights=replace(mlp.weights, down=lambda x: x))
    assert layers_unsupported_reason(decoder, MEMORY) == "takes linears in C only, not function"


def test_a_missing_instruction_set_is_an_error() -> None:
    world = World()
    pages, batch = world.pages("16bit"), world.batch([(1, 1)])
    layers = CpuLayers(world.decoder, pages, WINDOWS, len(INSTRUCTION_SETS))
    run = partial(layers, attention=CpuAttention(pages, batch, WINDOWS))
    with pytest.raises(ToolkitError, match="instruction set"):
        world.decoder.forward(batch.token_ids, batch.positions, CpuAttention(pages, batch, WINDOWS), run)
