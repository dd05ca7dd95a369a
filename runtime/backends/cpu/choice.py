"""Which product serves a weight on a CPU: as measured on processors like this one, or else as stated here. No torch.

Forms of weights have the names of `scripts/bench_kernels.py cpu`, such as `w4a16`, `w8a8` and `bf16`. A table has a
speed-up for each question and form: `w4a16 by tiles`, over vectors alone; `w4a16 few rows by vectors`, over tiles;
`bf16 by compiled code`, over oneDNN. `scripts/bench_kernels.py cpu --write-tables` writes it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from compress.cpu.binding import INSTRUCTION_SETS, best_instruction_set, tiles_refusal
from runtime.backends.measured import Speedups, Verdict, judge, read_speedups, table_path

TABLES = Path(__file__).parent / "tables"
"""Measured speed-ups, one file per processor, named after it and its instruction set."""
CPUINFO = Path("/proc/cpuinfo")
DENSE_FORM = "bf16"
MOST_ROWS_BY_VECTORS = 3
"""Rows that vectors can multiply with the bits of matrix tiles."""
BY_TILES, BY_VECTORS, BY_COMPILED_CODE = "by tiles", "few rows by vectors", "by compiled code"


@cache
def processor() -> str:
    """Model of the processor, as Linux names it, and the instruction set of compiled products."""
    fields = re.findall(r"^(vendor_id|cpu family|model|model name)\s*: (.+)$", _cpuinfo(), re.MULTILINE)
    facts = dict(reversed(fields))
    model = (
        f"{facts.get('model name', 'unknown')} family {facts.get('cpu family', '-')} model {facts.get('model', '-')}"
    )
    return f"{model} {INSTRUCTION_SETS[best_instruction_set()]}"


def _cpuinfo() -> str:
    try:
        return CPUINFO.read_text()
    except OSError:
        return ""


@cache
def _speedups() -> Speedups:
    return read_speedups(table_path(TABLES, processor()), processor())


def fewest_tile_rows(form: str) -> int:
    """Rows from which matrix tiles multiply a form of weights; 0 for none.

    Not measured, tiles multiply all rows of 16-bit activations, which vectors would add up in their order by twice the
    instructions, and 4 rows of 8-bit activations or more."""
    if not _judge(form, BY_TILES, True).is_faster:
        return 0
    return MOST_ROWS_BY_VECTORS + 1 if _judge(form, BY_VECTORS, form.endswith("a8")).is_faster else 1


def dense_refusal() -> str:
    """Why oneDNN multiplies bfloat16 numbers rather than compiled code; "" where it does not. Not measured, oneDNN does
    where there are matrix tiles."""
    verdict = _judge(DENSE_FORM, BY_COMPILED_CODE, bool(tiles_refusal()))
    return "" if verdict.is_faster else f"leaves it to oneDNN: {verdict.reason}"


def describe(form: str) -> str:
    """The instructions that multiply a form of weights, and why; for people."""
    if refusal := tiles_refusal():
        return f"by {INSTRUCTION_SETS[best_instruction_set()]}; {refusal}"
    fewest, reason = fewest_tile_rows(form), _judge(form, BY_TILES, True).reason
    return f"by matrix tiles from {fewest} rows on ({reason})" if fewest else f"by avx512_bf16: matrix tiles {reason}"


def _judge(form: str, question: str, default: bool) -> Verdict:
    return judge(_speedups(), f"{form} {question}", None, default)
