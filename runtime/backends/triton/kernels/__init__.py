"""Triton kernels for NVIDIA GPUs. Importing a module here imports Triton: the modules above do it late."""
