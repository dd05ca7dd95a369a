"""Benchmarks of kernels and models on CPUs."""
