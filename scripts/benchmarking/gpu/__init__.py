"""Benchmarks of kernels and models on GPUs, and of their machine code without one."""
