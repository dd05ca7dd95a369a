"""Loads a checkpoint as vLLM does on a machine without a GPU, and stores its parameters: `vllm_loading.py MODEL OUT`.

The wheel of vLLM for GPUs finds no device here; only that is replaced, by vLLM's own description of CPUs. Its attention
does not run without compiled kernels, so parameters are compared instead of logits.
"""

import sys
import tempfile

import torch
import vllm.platforms
from safetensors.torch import save_file
from vllm.platforms.cpu import CpuPlatform


def load(path: str, out: str) -> None:
    torch.accelerator.empty_cache = lambda: None  # which refuses where there is no accelerator
    vllm.platforms._current_platform = CpuPlatform()  # before vLLM's other modules ask for it
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    model_config = ModelConfig(model=path, max_model_len=64, enforce_eager=True)
    config = VllmConfig(model_config=model_config, device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
        initialize_model_parallel(1, 1)
        parameters = dict(get_model(vllm_config=config).named_parameters())
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items() if parameter.numel()}
    save_file(kept, out, {"quantization": str(model_config.quantization)})


if __name__ == "__main__":
    load(*sys.argv[1:])
