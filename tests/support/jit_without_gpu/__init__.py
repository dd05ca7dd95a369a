"""Triton's real path of a launch, without a GPU: arguments are bound, kernels compiled by `ptxas` and launched onto a
driver that runs nothing."""
