"""Runs Triton kernels at tiny shapes, for compute-sanitizer: linears, attention over pages, norms and gates.

compute-sanitizer --tool memcheck python scripts/sanitize_kernels.py
"""

from __future__ import annotations

import torch
from benchmarking.cpu_kernels import Case
from benchmarking.gpu_kernels import FORMS, KERNELS, linears, paged_calls, require_gpu
from benchmarking.machine import leave_with
from torch import Tensor

from compress.common.errors import ToolkitError

ROWS, COLUMNS = 128, 256
TOKENS = (1, 20, 70)
"""Tokens for each kind of tile: skinny with one block of tokens, with two, and a whole GEMM."""
CASE = Case(2, 64, heads=4, kv_heads=2, head_dim=32)


def linear_outputs(device: torch.device) -> dict[str, Tensor]:
    found = {}
    for name in KERNELS:
        linear = linears(name, ROWS, COLUMNS, device)[0]
        for tokens in TOKENS:
            x = torch.randn(tokens, COLUMNS, device=device, dtype=torch.bfloat16)
            found[f"{name}, {tokens} tokens"] = linear(x)
    return found


def attention_outputs(device: torch.device) -> dict[str, Tensor]:
    return {f"attention over {form} pages": paged_calls(CASE, form, 1, device).calls[0]() for form in FORMS}


def op_outputs(device: torch.device) -> dict[str, Tensor]:
    from runtime.backends.triton.layers import TritonOps

    ops = TritonOps()
    hidden, update = (torch.randn(3, COLUMNS, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.ones(COLUMNS, device=device, dtype=torch.bfloat16)
    return {
        "norm of a sum": ops.add_rms_norm(hidden, update, weight, 1e-5),
        "gate": ops.silu_and_mul(torch.cat([hidden, update], 1)),
    }


def run(device: torch.device) -> dict[str, Tensor]:
    """Outputs by name.

    Raises:
        ToolkitError: an output is not finite.
    """
    found = linear_outputs(device) | attention_outputs(device) | op_outputs(device)
    if broken := [name for name, output in found.items() if not bool(torch.isfinite(output).all())]:
        raise ToolkitError(
            f"outputs are not finite: {', '.join(broken)}", "Run the tests of tests/runtime/backends/triton"
        )
    return found


def main() -> int:
    print(f"{len(run(require_gpu()))} outputs are finite")
    return 0


if __name__ == "__main__":
    leave_with(main)
