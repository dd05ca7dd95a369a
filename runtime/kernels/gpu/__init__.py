"""Triton kernels for NVIDIA GPUs. Importing a module here imports Triton: `runtime.kernels.triton_*` do it late."""
