"""Weights handed over to humming-kernels, and when the registry takes it. Its kernels need a GPU; its own description
of the tensors that it takes does not."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from compress.checkpoint.weights import Activations, Int
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.packing import unpack_bits
from compress.common.errors import DataError, SchemeError
from runtime.backends.base import Target
from runtime.backends.humming import linear as humming
from runtime.backends.measured import judge, measured_gpu, read_speedups, table_path, to_json
from runtime.backends.registry import choose_linear
from runtime.backends.triton import device
from runtime.backends.triton.device import Gpu, gpu_speedups

CPU, CUDA = Target(torch.device("cpu"), torch.bfloat16), Target(torch.device("cuda"), torch.bfloat16)
SOME_GPU = Gpu("Some GPU", (9, 0), 132)
SCHEMES = (Int(4, 128), Int(3, 64, symmetric=False), Int(8, None), Int(8, 32, symmetric=False), Int(2, 32))


def random_weight(scheme: Int, rows: int = 64, columns: int = 256) -> CodedWeight:
    generator = torch.Generator().manual_seed(0)
    groups = (rows, scheme.num_groups(columns))
    codes = torch.randint(0, scheme.max_code + 1, (rows, columns), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, scheme.max_code + 1, groups, generator=generator, dtype=torch.uint8)
    zeros = torch.full_like(zeros, scheme.zero) if scheme.symmetric else zeros
    return scheme.weight(codes, torch.rand(groups, generator=generator).bfloat16(), zeros)


class Layer(torch.nn.Module):
    """Integer weights as humming's `HummingLayer` computes them, on a CPU."""

    def __init__(self, rows: int, columns: int, config: dict, *, has_bias: bool, torch_dtype: torch.dtype, **pads: int):
        super().__init__()
        self.shape, self.config, self.has_bias, self.dtype, self.pads = (
            (rows, columns),
            config,
            has_bias,
            torch_dtype,
            pads,
        )

    def load_from_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def transform(self) -> None:
        bits, (rows, columns) = self.config["num_bits"], self.shape
        codes = unpack_bits(self.tensors["weight_packed"], bits, columns, 1).double()
        scales = self.tensors["weight_scale"].double()
        zeros = torch.full_like(scales, 1 << (bits - 1))
        if not self.config["symmetric"]:
            zeros = unpack_bits(self.tensors["weight_zero_point"], bits, rows, 0).double()
        each = columns // scales.shape[1]
        weight = (codes - zeros.repeat_interleave(each, 1)) * scales.repeat_interleave(each, 1)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x.double() @ self.weight.T
        return (y + self.tensors["bias"].double() if self.has_bias else y).to(self.dtype)


@pytest.fixture
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("humming.layer")
    module.HummingLayer = Layer
    monkeypatch.setitem(__import__("sys").modules, "humming", ModuleType("humming"))
    monkeypatch.setitem(__import__("sys").modules, "humming.layer", module)


@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_products_are_those_of_the_stored_codes(scheme: Int) -> None:
    weight = random_weight(scheme)
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.arange(weight.shape[0]).bfloat16()
    linear = humming.prepare(weight, bias, CPU)
    expected = x.double() @ weight.dequantize(torch.float64).T + bias.double()
    assert torch.equal(linear(x), expected.bfloat16())
    assert linear.nbytes > 0


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_package_takes_tensors_of_these_shapes(scheme: Int) -> None:
    schema = pytest.importorskip("humming.schema").BaseWeightSchema.from_config(humming.weight_config(scheme))
    weight = random_weight(scheme)
    wanted = schema.get_tensors_attrs(*weight.shape, torch.bfloat16)
    given = {name.removeprefix("."): tensor for name, tensor in weight.tensors(torch.bfloat16).items()}
    assert {name: (tuple(t.shape), t.dtype) for name, t in given.items()} == {
        name: (tuple(attributes["shape"]), attributes["dtype"]) for name, attributes in wanted.items()
    }
    assert schema.to_humming_schema(torch.bfloat16).has_zero_point != scheme.symmetric


def test_scales_that_activations_cannot_hold_are_refused() -> None:
    weight = random_weight(Int(4, 128))
    precise = weight.scheme.weight(weight.qweight, weight.scales.float() * 1.0001, weight.zero_points)
    with pytest.raises(SchemeError):
        humming.prepare(precise, None, CPU)


def test_bytes_are_those_of_the_filled_up_weight() -> None:
    codes, scales, zeros = 128 * 256 // 2, 128 * 8 * 2, 128 * 8 // 2
    assert humming.nbytes(Int(4, 32), 100, 200, CUDA) == codes + scales + humming.LOCK_BYTES
    assert humming.nbytes(Int(4, 32, False), 128, 256, CUDA) == codes + scales + zeros + humming.LOCK_BYTES


@pytest.fixture
def gpu_of_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU of the name "Some GPU" with the package installed, and the folder of its tables."""
    monkeypatch.setattr(humming, "TABLES", tmp_path)
    monkeypatch.setattr(humming, "is_installed", lambda: True)
    monkeypatch.setattr(device, "gpu_of", lambda place: SOME_GPU if place.type == "cuda" else None)
    gpu_speedups.cache_clear()
    yield tmp_path
    gpu_speedups.cache_clear()


def test_it_is_named_where_it_was_measured_faster_and_taken_on_request(gpu_of_tables: Path) -> None:
    speedups = {
        str(Int(4, 128)): {"4096x256": {"1": 1.5, "64": 2.0}, "256x512": {"1": 0.5}},
        str(Int(8, None)): {"64x256": {"1": 1.04}},
    }
    table_path(gpu_of_tables, "Some GPU").write_text(to_json("Some GPU", speedups))
    faster = choose_linear(Int(4, 128), 256, CUDA)
    assert faster.kernel.name == "triton_w4a16"
    assert all(part in faster.shown for part in ("1.73 times", "--linear-backend humming"))
    assert choose_linear(Int(4, 128), 256, CUDA, "humming").kernel.name == "humming"
    for scheme, inputs, figure in (
        (Int(4, 128), 512, "0.50"),
        (Int(8, None), 256, "1.04"),
        (Int(4, 64), 256, "was not"),
    ):
        other = choose_linear(scheme, inputs, CUDA)
        assert other.kernel.name != "humming"
        assert figure in other.reason
    assert "1.14 times" in choose_linear(Int(4, 128), 1024, CUDA).reason  # by all shapes
    assert choose_linear(Int(4, 128), 256, CUDA, of_expert=True).kernel.name == "triton_w4a16"


@pytest.mark.parametrize(("capability", "is_faster"), [((9, 0), True), ((8, 0), False)])
def test_a_table_stands_for_cards_of_its_architecture(
    gpu_of_tables: Path, capability: tuple[int, int], is_faster: bool
) -> None:
    speedups = {str(Int(4, 128)): {"64x256": {"1": 1.5}}}
    table_path(gpu_of_tables, "Another GPU").write_text(to_json("Another GPU", speedups, capability))
    assert ("on Another GPU" in choose_linear(Int(4, 128), 256, CUDA).reason) == is_faster
    table_path(gpu_of_tables, "Some GPU").write_text(to_json("Some GPU", {str(Int(4, 128)): {"64x256": {"1": 0.9}}}))
    gpu_speedups.cache_clear()
    assert "--linear-backend" not in choose_linear(Int(4, 128), 256, CUDA).reason


def test_a_faster_kernel_that_is_not_installed_is_shown(gpu_of_tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humming, "is_installed", lambda: False)
    assert "humming" not in choose_linear(Int(4, 128), 256, CUDA).shown
    table_path(gpu_of_tables, "Some GPU").write_text(to_json("Some GPU", {str(Int(4, 128)): {"64x256": {"1": 1.5}}}))
    gpu_speedups.cache_clear()
    choice = choose_linear(Int(4, 128), 256, CUDA)
    assert choice.kernel.name == "triton_w4a16"
    assert all(part in choice.shown for part in ("humming", "1.50", "compress-runtime[gpu]"))
    assert "humming" not in choose_linear(Int(4, 128), 256, CUDA, "triton_w4a16").shown


@pytest.mark.parametrize("inputs", [4096, 14336, 5120])
def test_the_package_has_a_table_of_the_measured_card(inputs: int) -> None:
    speedups = read_speedups(table_path(humming.TABLES, "NVIDIA H200"), "NVIDIA H200")
    assert judge(speedups, str(Int(4, 128)), inputs).is_faster
    assert measured_gpu(humming.TABLES, "NVIDIA H100 80GB HBM3", (9, 0)) == "NVIDIA H200"
    assert measured_gpu(humming.TABLES, "NVIDIA A100-SXM4-40GB", (8, 0)) == ""


@pytest.mark.usefixtures("gpu_of_tables")
def test_it_can_be_asked_for_and_says_what_it_cannot() -> None:
    assert choose_linear(Int(4, 128), 256, CUDA, "humming").kernel.name == "humming"
    w8a8 = Int(8, None, True, Activations.INT8)
    for scheme, inputs in ((w8a8, 256), (Int(4, 16), 256), (Int(4, 128), 192)):
        assert "humming takes" in choose_linear(scheme, inputs, CUDA, "humming").reason
    assert "humming" not in choose_linear(Int(4, 128), 256, CPU).reason


def test_without_the_package_it_is_not_named_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humming, "is_installed", lambda: False)
    assert "humming" not in choose_linear(Int(4, 128), 256, CUDA).reason
    assert "humming-kernels" in choose_linear(Int(4, 128), 256, CUDA, "humming").reason


@pytest.mark.parametrize("content", ["", "[]", '{"device": "x"}', '{"device": "x", "speedups": 3}'])
def test_a_broken_table_says_how_to_make_one(tmp_path: Path, content: str) -> None:
    table = tmp_path / "table.json"
    table.write_text(content)
    with pytest.raises(DataError):
        read_speedups(table, "x")


def test_a_table_of_another_gpu_says_nothing(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    assert read_speedups(table, "x") == {}
    table.write_text(to_json("x", {"w4a16 g128 sym": {"64x256": {"1": 2.0}}}))
    assert read_speedups(table, "y") == {}
    assert judge(read_speedups(table, "x"), "w4a16 g128 sym", 256).is_faster
