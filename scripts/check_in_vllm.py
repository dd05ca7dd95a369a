"""Loads checkpoints as vLLM does and names every parameter that no stored tensor fills, on a machine without a GPU.

    python scripts/check_in_vllm.py FOLDER [FOLDER ...]

vLLM's own model classes, quantization configs and weight loaders run as on a card of compute capability 9.0, but on the
CPU and without a kernel. What PyTorch leaves uninitialized is marked (NaN, or the largest integer); a parameter that
still has the mark afterwards would be random in vLLM, which says nothing of it. Exits with status 1 when a checkpoint
is refused or leaves a parameter unfilled, with status 2 without vLLM.

vLLM wants versions of its own of torch and transformers, so give it an environment of its own:

    python -m venv /tmp/vllm
    /tmp/vllm/bin/pip install vllm==0.33.0
    PYTHONPATH=. /tmp/vllm/bin/python scripts/check_in_vllm.py FOLDER

`PYTHONPATH` gives vLLM our plugin for the format compress-runtime. A CPU build of torch does: install vLLM with
`--no-deps`, then what its imports ask for.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

CAPABILITY = 9, 0
"""Compute capability of the card that vLLM sees: that of an H100."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Outcome of loading a checkpoint in vLLM.

    Attributes:
        refusal: the error by which it refuses it; empty if it loads.
        unfilled: names of parameters without a stored tensor.
        methods: ways in which its linear layers are computed.
    """

    folder: str
    refusal: str = ""
    unfilled: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.refusal:
            return f"{self.folder}: refused: {self.refusal}"
        if self.unfilled:
            return f"{self.folder}: {len(self.unfilled)} parameters are not filled: {', '.join(self.unfilled)}"
        return f"{self.folder}: every parameter is filled ({', '.join(self.methods)})"


def stub_torchvision() -> None:
    """Puts an empty package where torchvision is missing: vLLM imports it for images only."""
    if find_spec("torchvision") is not None:
        return
    import transformers.utils.import_utils as available

    available.is_torchvision_available()  # asks for it while it is still missing
    parts = ("", ".io", ".ops", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")
    for part in parts:
        module = _Anything(f"torchvision{part}")
        module.__dict__.update(
            __path__=[], __version__="0", __spec__=importlib.machinery.ModuleSpec(module.__name__, None)
        )
        sys.modules[module.__name__] = module


class _Anything(ModuleType):
    """A module that has a class of every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def pretend_card() -> None:
    """Makes vLLM choose methods and kernels as on a card, before its other modules ask for the platform."""
    import torch
    import vllm.model_executor.models.registry as registry
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability, PlatformEnum
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    class Host(CpuPlatform):
        """The CPU, on which tensors are, with the capability of a card."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*CAPABILITY)

        @classmethod
        def has_device_capability(cls, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
            wanted = capability if isinstance(capability, int) else 10 * capability[0] + capability[1]
            return wanted <= 10 * CAPABILITY[0] + CAPABILITY[1]

        @classmethod
        def get_attn_backend_cls(
            cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
        ) -> str:
            if attn_selector_config.use_sparse:
                return AttentionBackendEnum.FLASHMLA_SPARSE.get_path()
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    class Card(Host):
        """The platform of modules that choose kernels."""

        _enum = PlatformEnum.CUDA

        def is_cuda(self) -> bool:
            return True

        def is_cuda_alike(self) -> bool:
            return True

        def is_cpu(self) -> bool:
            return False

    torch.use_deterministic_algorithms(True, warn_only=True)  # marks what torch.empty gives
    torch.accelerator.empty_cache = lambda: None  # which refuses where there is no accelerator
    registry._run_in_subprocess = lambda inspect: inspect()  # a process of its own would not have these changes
    vllm.platforms._current_platform = Host()
    _show_card_to_kernels(Card(), PlatformEnum.CUDA)


def _show_card_to_kernels(card: Any, kind: Any) -> None:
    import vllm._custom_ops as operations
    import vllm.model_executor.kernels.linear as kernels
    import vllm.model_executor.layers.fused_moe.modular_kernel as experts
    import vllm.model_executor.layers.fused_moe.oracle as oracle
    import vllm.model_executor.layers.quantization as quantization

    for package in (quantization, oracle):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with _unavailable_skipped():
                importlib.import_module(module.name)
    packages = (kernels.__name__, quantization.__name__, oracle.__name__.rpartition(".")[0])
    for name, module in list(sys.modules.items()):
        if name.startswith(packages) and hasattr(module, "current_platform"):
            module.current_platform = card
    for choice in [value for value in vars(kernels).values() if isinstance(value, dict) and kind in value]:
        for kernel in choice[kind]:
            kernel.is_supported = classmethod(lambda cls, *args, **options: (True, None))
            module = sys.modules[kernel.__module__]
            if hasattr(module, "current_platform"):
                module.current_platform = card
    for each in _subclasses(experts.FusedMoEExperts):
        if "_supports_current_device" in vars(each):
            each._supports_current_device = staticmethod(lambda *args: True)
    for name in vars(operations).copy():
        if name.startswith("cutlass_") and name.endswith(("_supported", "_fp4", "_fp8")) and "support" in name:
            setattr(operations, name, lambda *args, **options: True)


@contextmanager
def _unavailable_skipped() -> Iterator[None]:
    """Skips a module that needs a package for GPUs; a checkpoint that needs the module is refused by its name."""
    try:
        yield
    except (ImportError, AttributeError, RuntimeError, OSError):
        return


def _subclasses(parent: type) -> Iterator[type]:
    for child in parent.__subclasses__():
        yield child
        yield from _subclasses(child)


@contextmanager
def one_process() -> Iterator[None]:
    """Starts vLLM's groups of processes with this one alone."""
    import torch
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.workspace import init_workspace_manager

    with tempfile.TemporaryDirectory() as folder:
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
            init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
            initialize_model_parallel(1, 1)
        init_workspace_manager(torch.device("cpu"))
        yield


def load(folder: str) -> Loaded:
    """Loads a checkpoint and finds the parameters that it does not fill."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    model_config = ModelConfig(model=folder, max_model_len=64, enforce_eager=True, skip_tokenizer_init=True)
    cache, device = CacheConfig(enable_prefix_caching=False), DeviceConfig(device="cpu")
    config = VllmConfig(model_config=model_config, cache_config=cache, device_config=device)
    with set_current_vllm_config(config), set_default_torch_dtype(model_config.dtype):
        loader = get_model_loader(LoadConfig(use_tqdm_on_load=False))
        model = loader.create_model(vllm_config=config, model_config=model_config)
        model.load_weights(loader.get_all_weights(model_config, model))
        methods = {name: each.quant_method for name, each in model.named_modules() if hasattr(each, "quant_method")}
        for name, method in methods.items():
            if not type(method).__module__.startswith("vllm."):  # a plugin's, which fills parameters at the end
                method.process_weights_after_loading(model.get_submodule(name))
    unused = {
        f"{name}.{parameter}"
        for name, method in methods.items()
        if getattr(
            method, "use_a16", False
        )  # inputs are not rounded, so the scales that it makes for them mean nothing
        for parameter in ("w13_input_global_scale", "w2_input_global_scale")
    }
    found = {name for name, each in model.named_parameters() if is_random(each.data)}
    unfilled = sorted(found - unused)
    return Loaded(
        folder,
        unfilled=tuple(unfilled),
        methods=tuple(sorted({_method(model.get_submodule(name)) for name in methods})),
    )


def _method(layer: Any) -> str:
    scheme = getattr(layer, "scheme", None)
    return type(layer.quant_method if scheme is None else scheme).__name__


def is_random(values: Any) -> bool:
    """Whether a part of a parameter was made without values and not filled: a number, or a row of bytes."""
    import torch

    if not values.numel():
        return False
    if values.is_floating_point():
        return bool(values.float().isnan().any())
    rows = values.reshape(-1, values.shape[-1] if values.dim() else 1)
    unfilled = rows == torch.iinfo(values.dtype).max
    return bool(unfilled.all(-1).any() if values.element_size() == 1 else unfilled.any())


def check(folder: str) -> Loaded:
    """Loads a checkpoint; vLLM refuses one by errors of any class, an import of a package for GPUs among them."""
    try:
        return load(folder)
    except Exception as error:
        return Loaded(folder, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks each folder, prints what vLLM does with it, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="- reads folders from standard input, one a line")
    parser.add_argument("--json", action="store_true", help="one line of JSON per folder")
    options = parser.parse_args(arguments)
    if find_spec("vllm") is None:
        print(f"vLLM is not installed.\n\n{__doc__}", file=sys.stderr)
        return 2
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    stub_torchvision()
    pretend_card()
    from compress.vllm_plugin import register

    register()
    found = []
    with one_process():
        folders = map(str.strip, iter(sys.stdin.readline, "")) if options.folders == ["-"] else options.folders
        for folder in folders:
            found.append(check(folder))
            print(json.dumps(asdict(found[-1])) if options.json else found[-1], flush=True)
    return int(any(each.refusal or each.unfilled for each in found))


if __name__ == "__main__":
    sys.exit(main())
