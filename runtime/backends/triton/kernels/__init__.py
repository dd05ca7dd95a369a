"""Triton kernels for NVIDIA GPUs. Importing a module here imports Triton: `runtime.backends.triton_*` do it late."""
