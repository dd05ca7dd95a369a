"""Kernels in plain C for CPUs, compiled into one shared library and called through ctypes. Optional everywhere."""
