"""Checkpoint format shared by compression and runtime: weight forms, bit packing, containers, reader, writer,
verification.

Descriptions of weight forms (`scheme`, `weights`) import torch only when a tensor is accessed, which keeps command
lines fast.
"""
