"""Mixtures in one compiled call: the bits of the C linears expert by expert; rows depend on themselves alone."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.checkpoint.scale_search import FP8
from compress.checkpoint.weights import BlockFp8, Int
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.errors import ToolkitError
from compress.cpu.binding import EMULATED, INSTRUCTION_SETS, best_instruction_set, library, set_threads
from compress.models.clamped_gate import ClampedGate
from compress.models.linear import Linear
from compress.models.mlp import MLP, Mixture
from compress.models.router import Router
from runtime.backends.base import Target
from runtime.backends.cpu.huge_pages import HUGE_PAGE, empty_words
from runtime.backends.cpu.layers import CpuOps
from runtime.backends.cpu.linear import Activations, CpuLinear
from runtime.backends.cpu.mixture import CpuMixture
from runtime.backends.mlp import Expert, Experts, route
from runtime.backends.registry import choose_mixture

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
SETS = [*range(best_instruction_set() + 1), EMULATED]
SCALAR = INSTRUCTION_SETS.index("scalar")
ROUNDING = 2**-6
"""Relative difference of rows that were rounded to bfloat16 a few times."""
every_set = pytest.mark.parametrize("instruction_set", SETS, ids=lambda index: INSTRUCTION_SETS[index])
EXPERTS, SIZE, INNER, SHARED = 10, 96, 160, 64
GATE = Linear("gate", EXPERTS, SIZE)
ROUTERS = {
    "softmax": Router(GATE, 3),
    "softmax, not normalized": Router(GATE, 4, normalizes=False, scale=2.5, in_float32=True),
    "sigmoid in groups": Router(GATE, 3, "sigmoid", bias="bias", num_groups=5, num_chosen_groups=2, in_float32=True),
    "all": Router(GATE, EXPERTS, "sigmoid"),
    "least sum": Router(GATE, 2, "sigmoid", in_float32=True, least_sum=1.9),
    "sparse mixer": Router(GATE, 3, "sparsemixer", in_float32=True, margin=0.4),
    "weighted inputs": Router(GATE, 2, "sigmoid", normalizes=False, weighs_inputs=True),
    "scaled scores and experts": Router(GATE, 3, in_float32=True, score_scale=0.3, expert_scales="scales"),
    "biased scores": Router(replace(GATE, bias=True), 3, in_float32=True),
}
FORMS = ("w4a16", "w4a16 asymmetric", "w8a16", "w4a8", "fp8", "bfloat16")
CLAMPED = ClampedGate(1.702, 1.3)
TARGET = Target(torch.device("cpu"), torch.bfloat16)


@pytest.fixture(autouse=True)
def two_threads():
    set_threads(2)
    yield
    set_threads(0)


def described(router: Router, activation: str | ClampedGate) -> Mixture:
    kind = {"clamped": activation} if isinstance(activation, ClampedGate) else {"activation": activation}
    inputs = Linear("gate", INNER, SIZE), Linear("up", INNER, SIZE)
    return Mixture(router, (MLP(inputs, Linear("down", SIZE, INNER), **kind),) * EXPERTS)


class World:
    """Random experts of any form."""

    def __init__(self, form: str = "w4a16", instruction_set: int = -1) -> None:
        self.random, self.form, self.instruction_set = torch.Generator().manual_seed(0), form, instruction_set

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def linear(self, rows: int, columns: int) -> CpuLinear:
        bias = self.numbers(rows) * 0.1
        if self.form == "bfloat16":
            return CpuLinear(self.numbers(rows, columns) * 0.1, bias, instruction_set=self.instruction_set)
        if self.form == "fp8":
            codes = (self.numbers(rows, columns) * 40).to(FP8)
            scales = (torch.rand(rows, columns // 32, generator=self.random) + 0.5) / 400
            weight = CodedWeight(codes, scales, BlockFp8((1, 32)))
            return CpuLinear(weight, bias, instruction_set=self.instruction_set)
        scheme = Int(8 if self.form == "w8a16" else 4, 32, symmetric="asymmetric" not in self.form)
        codes = torch.randint(0, 1 << scheme.bits, (rows, columns), generator=self.random, dtype=torch.uint8)
        scale = torch.rand(rows, columns // 32, generator=self.random).mul_(0.5 / (1 << scheme.bits)).half()
        zero = torch.randint(0, 16, scale.shape, generator=self.random, dtype=torch.uint8)
        if scheme.symmetric:
            zero.fill_(scheme.zero)
        rounded = Activations.INT8_GROUP if self.form == "w4a8" else Activations.FLOAT
        weight = scheme.weight(codes, scale, zero)
        return CpuLinear(weight, bias, activations=rounded, instruction_set=self.instruction_set)

    def expert(self, inner: int) -> Expert:
        return Expert(self.linear(2 * inner, SIZE), self.linear(SIZE, inner))

    def experts(
        self, router: Router, shared: bool = False, gate: bool = False, activation: str | ClampedGate = "silu"
    ) -> Experts:
        dtype = torch.float32 if router.in_float32 else torch.bfloat16
        return Experts(
            described(router, activation),
            (self.numbers(EXPERTS, SIZE) * 0.3).to(dtype),
            tuple(self.expert(INNER) for _ in range(EXPERTS)),
            self.numbers(EXPERTS) * 0.2 if router.bias else None,
            self.expert(SHARED) if shared else None,
            self.numbers(1, SIZE).bfloat16() if gate else None,
            self.numbers(EXPERTS).bfloat16() if router.expert_scales else None,
            scores_bias=self.numbers(EXPERTS) if router.scores.bias else None,
        )

    def rows(self, count: int) -> Tensor:
        return self.numbers(count, SIZE).bfloat16()


def one_by_one(experts: Experts, mixture: CpuMixture, x: Tensor, instruction_set: int = -1) -> Tensor:
    """Each expert's linears by themselves, for the experts that compiled code chose."""
    return experts.weighted(x, *mixture.route(x), CpuOps(instruction_set))


@every_set
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shared", [False, True])
def test_same_bits_as_expert_by_expert(form: str, instruction_set: int, shared: bool) -> None:
    world = World(form, instruction_set)
    experts = world.experts(ROUTERS["softmax"], shared)
    before = experts.experts[3].down(x := world.numbers(4, INNER).bfloat16())
    mixture = CpuMixture(experts, instruction_set)
    assert torch.equal(experts.experts[3].down(x), before)
    for count in (1, 2, 61):
        x = world.rows(count)
        found = mixture(x)
        assert torch.equal(found, one_by_one(experts, mixture, x, instruction_set))
        assert found.isfinite().all()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_matrix_tiles_compute_what_plain_code_does(form: str, shared: bool) -> None:
    """Their sums have another order; the router is the same code."""
    found = {}
    for instruction_set in (EMULATED, SCALAR):
        world = World(form, instruction_set)
        mixture = CpuMixture(world.experts(ROUTERS["scaled scores and experts"], shared, shared), instruction_set)
        found[instruction_set] = mixture(world.rows(61)).double()
    difference = (found[EMULATED] - found[SCALAR]).norm(dim=1) / found[SCALAR].norm(dim=1)
    assert difference.max() < ROUNDING


@every_set
@pytest.mark.parametrize(
    ("activation", "router"),
    [("gelu_pytorch_tanh", "scaled scores and experts"), (CLAMPED, "biased scores"), ("silu", "weighted inputs")],
    ids=["gelu", "clamped", "silu"],
)
def test_every_activation_has_the_bits_of_ops(activation: str | ClampedGate, router: str, instruction_set: int) -> None:
    world = World("w4a16", instruction_set)
    experts, x = world.experts(ROUTERS[router], shared=True, activation=activation), world.rows(7)
    mixture = CpuMixture(experts, instruction_set)
    assert torch.equal(mixture(x), one_by_one(experts, mixture, x, instruction_set))
    routed = world.rows(7)
    weighted = mixture(x, routed)
    assert torch.equal(weighted[:0], mixture(x[:0], routed[:0]))
    assert torch.equal(mixture(routed, x)[:2], mixture(routed[:2], x[:2]))
    assert not torch.equal(weighted, mixture(x))


@every_set
@pytest.mark.parametrize("name", ROUTERS)
def test_the_router_chooses_and_weighs_as_the_reference(name: str, instruction_set: int) -> None:
    world, router = World(), ROUTERS[name]
    experts, x = world.experts(router), world.rows(50)
    weights, chosen = CpuMixture(experts, instruction_set).route(x)
    scores = x.double() @ experts.scores.double().T
    if not router.in_float32:
        scores = scores.bfloat16().double()
    exact = scores if experts.scores_bias is None else scores + experts.scores_bias
    expected, places = route(exact * router.score_scale, router, experts.bias)
    expected = expected if experts.expert_scales is None else expected * experts.expert_scales[places]
    places, order = places.sort(-1)
    close = (expected.gather(-1, order) - weights).abs() < 1e-5
    assert ((chosen == places) & close).all(-1).float().mean() > 0.9  # equal scores in 16 bits
    if router.in_float32:
        assert torch.equal(chosen, places)
        assert close.all()


def test_of_equal_scores_the_first_is_chosen() -> None:
    experts = replace(World().experts(ROUTERS["softmax"]), scores=torch.zeros(EXPERTS, SIZE, dtype=torch.bfloat16))
    weights, chosen = CpuMixture(experts).route(World().rows(2))
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_depends_on_itself_alone(form: str) -> None:
    world = World(form)
    mixture, x = CpuMixture(world.experts(ROUTERS["sigmoid in groups"], True, True)), world.rows(70)
    together, order = mixture(x), torch.randperm(70, generator=world.random)
    assert torch.equal(mixture(x[order]), together[order])
    assert torch.equal(torch.cat([mixture(x[:1]), mixture(x[1:33]), mixture(x[33:])]), together)
    set_threads(1)
    assert torch.equal(mixture(x), together)
    x[5] = float("nan")
    spoiled = mixture(x)
    assert spoiled[5].isnan().all()
    rest = torch.arange(70) != 5
    assert torch.equal(spoiled[rest], together[rest])


def test_all_rows_may_choose_one_expert() -> None:
    world = World()
    experts = replace(
        world.experts(Router(GATE, 1, "sigmoid", normalizes=False, bias="bias")), bias=torch.eye(10)[7] * 9
    )
    mixture, x = CpuMixture(experts), world.rows(200)
    assert set(mixture.route(x)[1].flatten().tolist()) == {7}
    assert torch.equal(mixture(x), one_by_one(experts, mixture, x))
    assert mixture(x[:0]).shape == (0, SIZE)


def test_a_gate_weighs_the_shared_expert() -> None:
    world = World()
    experts = world.experts(ROUTERS["softmax"], True, True)
    mixture, x = CpuMixture(experts), world.rows(20)
    assert experts.shared_gate is not None
    exact = x.double() @ experts.shared_gate.double().T
    torch.testing.assert_close(mixture(x), one_by_one(experts, mixture, x), rtol=0.02, atol=0.05)
    closed = replace(experts, shared_gate=experts.shared_gate * 0 - x[0] * 9)
    without = replace(experts, shared=None, shared_gate=None)
    assert exact.std() > 1
    assert torch.equal(CpuMixture(closed)(x[:1]), CpuMixture(without)(x[:1]))


def test_what_is_not_compiled_goes_from_expert_to_expert() -> None:
    experts = World().experts(ROUTERS["softmax"])
    assert isinstance(choose_mixture(experts, TARGET).kernel, CpuMixture)
    other = replace(experts, experts=(replace(experts.experts[0], down=CpuOps()), *experts.experts[1:]))
    for refused in (
        choose_mixture(experts, TARGET, "reference"),
        choose_mixture(experts, replace(TARGET, dtype=torch.float32)),
        choose_mixture(World().experts(ROUTERS["softmax"], activation="relu"), TARGET),
        choose_mixture(other, TARGET),
    ):
        assert refused.kernel is None
        assert refused.reason


def test_memory_in_huge_pages_lives_as_long_as_its_parts() -> None:
    count = HUGE_PAGE // 4 + 5
    part = empty_words(count).fill_(7)[-10:]
    gc.collect()
    assert part.tolist() == [7] * 10
    assert empty_words(count).shape == (count,)
    assert empty_words(3).shape == (3,)


def test_a_missing_instruction_set_is_an_error() -> None:
    mixture = CpuMixture(World().experts(ROUTERS["softmax"]), len(INSTRUCTION_SETS))
    with pytest.raises(ToolkitError, match="instruction set"):
        mixture(World().rows(1))
