"""Kernels that a launcher finds, against those that Triton itself finds, over fake compiled kernels: a key that tells
too little would launch machine code for other arguments."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton import knobs
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, create_function_from_signature

from runtime.backends.triton.launcher import Launcher, direct_launch, launch_key
from runtime.backends.triton.sizes import cdiv, next_power_of_2

INTEGERS = (0, 1, -1, 2, 15, 16, -16, 17, 4096, 2**31 - 1, 2**31 - 16, 2**31, -(2**31), -(2**31) - 1, -(2**31) - 16)
INTEGERS += (2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 16)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
NAMES = ("x_ptr", "table_ptr", "sink_ptr", "M", "N", "jump", "place", "eps")
MEMORY = torch.empty(256, dtype=torch.uint8)


def example(x_ptr, table_ptr, sink_ptr, M, N, jump, place, eps, SIZE: tl.constexpr, CAP: tl.constexpr):
    """Never run."""


@dataclass(eq=False)
class FakeKernel:
    """A compiled kernel that keeps its launches."""

    options: str
    function: int = 7
    packed_metadata: tuple[int, ...] = (1, 2)
    launches: list[tuple[Any, ...]] = field(default_factory=list)

    def launch_metadata(self, grid: tuple[int, ...], stream: int, *arguments: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, launch_metadata: Any, *rest: Any):
        assert (function, metadata, launch_metadata) == (self.function, self.packed_metadata, None)
        _, _, *arguments = rest
        self.launches.append((x, y, z, stream, *map(address, arguments)))


class FakeDevice:
    """A GPU whose number and stream can be chosen."""

    device, stream = 0, 11

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def address(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


@pytest.fixture
def device(monkeypatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(driver, "_active", fake)
    return fake


class FakeFunction(JITFunction):
    """Compiles nothing, and counts the launches that it binds."""

    takes_launches, bound = True, 0

    def run(self, *args: Any, **options: Any) -> Any:
        self.bound += 1
        return super().run(*args, **options)

    def _do_compile(self, key: str, signature: Any, device: int, *unused: Any) -> FakeKernel | None:
        if self.takes_launches:
            return self.device_caches[device][0].setdefault(key, FakeKernel(f"device {device}, {key}"))
        return None


def make_function() -> FakeFunction:
    return FakeFunction(example, do_not_specialize=["M"], do_not_specialize_on_alignment=["table_ptr", "place"])


def launch(kernel: Launcher, *arguments: Any, **named: Any) -> None:
    kernel[2,](*arguments, **named, SIZE=16, CAP=0.0)


def kernels_of(function: JITFunction) -> list[FakeKernel]:
    return [kernel for caches in function.device_caches.values() for kernel in caches[0].values()]


def taken(function: JITFunction) -> list[tuple[tuple[str, ...], tuple[Any, ...]]]:
    """Launches since the last call: what each kernel was compiled for, and what it was given."""
    found = [(kernel.options, launch) for kernel in kernels_of(function) for launch in kernel.launches]
    for kernel in kernels_of(function):
        kernel.launches.clear()
    return found


def random_pointer(chance: random.Random) -> Tensor:
    dtype = chance.choice(DTYPES)
    offset = chance.randrange(0, 64, dtype.itemsize)
    return MEMORY[offset : offset + 8].view(dtype)


def random_arguments(chance: random.Random) -> list[Any]:
    sink = chance.choice([None, random_pointer(chance)])
    odd = chance.choice([True, False, 1.0, 0.0, None, random_pointer(chance)])
    numbers = [chance.choice(INTEGERS) for _ in range(4)]
    return [random_pointer(chance), random_pointer(chance), sink, *numbers, chance.choice([1e-5, 1.0, 2, odd])]


def neighbours(chance: random.Random, count: int) -> list[list[Any]]:
    """Arguments of launches of which many differ in one argument only."""
    found = [random_arguments(chance)]
    for _ in range(count):
        arguments, place = list(chance.choice(found)), chance.randrange(len(NAMES))
        arguments[place] = random_arguments(chance)[place]
        found.append(arguments)
    return found


CONSTANTS = (
    {"SIZE": 16, "CAP": ("lop3", "and")},
    {"SIZE": 16, "CAP": ("lop3",)},
    {"SIZE": 32, "CAP": tl.float16, "num_warps": 8},
    {"SIZE": 32, "CAP": tl.float16, "num_warps": 8, "num_stages": 2, "launch_pdl": True},
)


def test_equal_keys_mean_equal_specializations():
    """Changes every argument alone: a key is a row of keys of single arguments."""
    function, target = make_function(), make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(function.signature, function.params, target)
    places = [(param.num, not param.do_not_specialize) for param in function.params[: len(NAMES)]]
    pointers = [MEMORY[start : start + 8].view(t) for t in DTYPES for start in range(0, 64, t.itemsize)]
    for index in range(len(NAMES)):
        specialization_of: dict[Any, Any] = {}
        for value in (*pointers, *INTEGERS, None, True, False, 1.0, 0.0, 16.0):
            arguments = [MEMORY, MEMORY, None, 2, 2, 2, 2, 1.0]
            arguments[index] = value
            key = tuple(launch_key(places, arguments, [None] * len(function.params)))
            chosen = bind(*arguments, SIZE=16, CAP=0.0)[1]
            assert specialization_of.setdefault(key, chosen) == chosen
        assert len(specialization_of) < 60 + len(pointers)


@pytest.mark.parametrize(("count", "launches"), [(30, 300), pytest.param(300, 6000, marks=pytest.mark.full)])
def test_kernels_are_those_that_triton_chooses(device, count, launches):
    ours, theirs, chance = make_function(), make_function(), random.Random(0)
    kernel, pool = Launcher(ours), neighbours(chance, count)
    for _ in range(launches):
        arguments, constants = chance.choice(pool), chance.choice(CONSTANTS)
        grid = tuple(chance.randrange(1, 9) for _ in range(chance.randrange(1, 4)))
        device.device = chance.randrange(2)
        kernel[grid](*arguments, **constants)
        theirs[grid](*arguments, **constants)
        assert taken(ours) == taken(theirs)
    assert {each.options for each in kernels_of(ours)} == {each.options for each in kernels_of(theirs)}


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.full)])
def test_given_arguments_may_be_any(device, count):
    ours, theirs, chance = make_function(), make_function(), random.Random(1)
    for _ in range(count):
        pool, constants = neighbours(chance, 10), chance.choice(CONSTANTS)
        given = {name: value for name, value in zip(NAMES, pool[0], strict=True) if chance.random() < 0.5}
        bound = Launcher(ours).bind(**given, **constants)
        for arguments in pool * 2:
            others = {name: value for name, value in zip(NAMES, arguments, strict=True) if name not in given}
            bound((3, 2), *others.values())
            theirs[3, 2](**given, **others, **constants)
            assert taken(ours) == taken(theirs)


def test_launches_of_one_kind_are_bound_by_triton_once(device):
    function = make_function()
    kernel = Launcher(function)
    for tokens in (1, 5, 16, 4096):
        pointer = torch.empty(16)
        launch(kernel, pointer, pointer, None, tokens, 4096, 32, 4, 1e-5 * tokens)
    assert (function.bound, len(taken(function))) == (1, 4)


def test_a_hook_that_takes_launches_gets_all_of_them(device):
    function = make_function()
    function.takes_launches = False
    kernel = Launcher(function)
    for _ in range(3):
        launch(kernel, MEMORY, MEMORY, None, 1, 1, 1, 1, 1.0)
    assert function.bound == 3


class WholeLauncher:
    """Triton's launcher of a compiled kernel, of which `launch` has all launches."""

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self.launch = lambda *given: launches.append(given)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        metadata, launch_metadata, enter, leave, *arguments = rest
        self.launch(x, y, z, stream, function, False, metadata, launch_metadata, enter, leave, None, tuple(arguments))


class FlatLauncher(WholeLauncher):
    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, False, None, *rest)


class MakingRoom(WholeLauncher):
    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, [0] * (x * y * z), *rest)


class AddingArguments(WholeLauncher):
    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, *rest, "state")


@dataclass
class LaunchedKernel:
    run: WholeLauncher
    function: int = 7
    packed_metadata: tuple[int, ...] = (1, 2)


LAUNCHERS = {WholeLauncher: True, FlatLauncher: True, MakingRoom: False, AddingArguments: False}


@pytest.mark.parametrize(("of", "is_passed_by"), LAUNCHERS.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_the_driver_gets_what_triton_s_launcher_gives_it(of: type[WholeLauncher], is_passed_by: bool) -> None:
    launches: list[tuple[Any, ...]] = []
    kernel, arguments = LaunchedKernel(of(launches)), (4096, 5, None)
    found = direct_launch(kernel, len(arguments))
    assert not launches
    assert (found.call is kernel.run) != is_passed_by
    found.call(2, 3, 1, 11, *found.constants, *(arguments if found.is_flat else (arguments,)))
    kernel.run(2, 3, 1, 11, kernel.function, kernel.packed_metadata, None, None, None, *arguments)
    assert launches[0] == launches[1]


def test_watched_launches_are_made_by_triton(device, monkeypatch):
    function = make_function()
    monkeypatch.setattr(knobs.runtime.launch_exit_hook, "calls", [print])
    kernel = Launcher(function)
    for _ in range(3):
        launch(kernel, MEMORY, MEMORY, None, 1, 1, 1, 1, 1.0)
    assert function.bound == 3


def test_misuse_is_refused(device):
    kernel = Launcher(make_function())
    with pytest.raises(TypeError):
        launch(kernel, MEMORY, MEMORY, None, 1, 1, 1, 1, eps=1.0)
    with pytest.raises(ValueError, match="argument"):
        launch(kernel, MEMORY, MEMORY, None, 1, 1, 1, 1)
    with pytest.raises(TypeError):
        launch(kernel, MEMORY, MEMORY, None, 1, 1, 1, (1, 2), 1.0)


def test_sizes_are_those_of_triton():
    for number in range(1, 300):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        assert [cdiv(number, divisor) for divisor in range(1, 40)] == [
            triton.cdiv(number, divisor) for divisor in range(1, 40)
        ]
