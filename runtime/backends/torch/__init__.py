"""Plain PyTorch kernels: the reference for every other backend."""
