"""Sizes of tiles and grids. Triton's own functions of these names cost the host two microseconds a call."""


def cdiv(number: int, divisor: int) -> int:
    """`number / divisor`, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`, which is positive."""
    return 1 << (number - 1).bit_length()
