"""Products of the package humming-kernels (extra `gpu`), which compiles CUDA code when a weight is first used."""

from runtime.backends.base import Backend, register
from runtime.backends.humming.linear import KERNEL

register(Backend("humming", "cuda", linears=(KERNEL,)))
