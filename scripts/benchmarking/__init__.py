"""Helpers of the benchmark scripts and of `compile_kernels.py`, one noun each."""
