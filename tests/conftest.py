"""Triton kernels run on a GPU where there is one, and else in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once, when it is imported


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """Where Triton kernels run."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
