"""Serving: throughput, latency, starts, speculative decoding, verification of drafts, and the cost of a scheduler step.

python scripts/bench_serve.py throughput                       # the demo model, 256 requests, also by transformers
python scripts/bench_serve.py throughput --shape 1.1b --requests 24 --rounds 1
python scripts/bench_serve.py latency --prefix 1024 --long 1536
python scripts/bench_serve.py neighbours --seconds 20
python scripts/bench_serve.py separation --rates 1 2 4
python scripts/bench_serve.py start --shape 1.1b
python scripts/bench_serve.py streaming --clients 64
python scripts/bench_serve.py speculation --dtype float32 --batch 1 --drafters demo ngram
python scripts/bench_serve.py scheduler --sequences 256 --host-blocks 1000
python scripts/bench_serve.py verification --context 512 4096 --drafted 0 1 3
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarking.commands import run_command
from benchmarking.machine import leave_with

COMMANDS = {
    "throughput": ("throughput", "requests of mixed lengths, compared with three ways of using transformers"),
    "latency": ("latency", "first token with and without prefix cache, next token while long prompts arrive"),
    "neighbours": ("neighbours", "waits between tokens of one client while another sends long prompts"),
    "separation": ("separation", "goodput with prefill and decode in separate engines, in one, and in two engines"),
    "streaming": ("streaming", "tokens through HTTP from a runner that answers at once"),
    "start": ("start", "first token from the start of a process, with and without prepared weights"),
    "speculation": ("speculation", "acceptance and tokens per second of every drafter"),
    "verification": ("verification", "processor time of a step that verifies drafted tokens, on the CPU"),
    "scheduler": ("step_cost", "processor time of a step without the model"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(__doc__, COMMANDS, arguments)


if __name__ == "__main__":
    leave_with(main)
