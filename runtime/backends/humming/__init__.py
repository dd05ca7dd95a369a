"""Products of the package humming-kernels (extra `gpu`), which compiles CUDA code when a weight is first used."""

from runtime.backends.backend import BACKENDS, Backend
from runtime.backends.humming.linear import KERNEL

BACKENDS.register(order=10)(Backend("humming", "cuda", linears=(KERNEL,)))
