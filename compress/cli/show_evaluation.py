"""Evaluations as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from compress.evaluate.session import EvaluationReport


def print_evaluation(report: EvaluationReport) -> None:
    """The figures, the protocol and the text they come from, and what was compared with."""
    result = report.result
    table = Table(title=f"Evaluation of {report.request.model}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("perplexity", f"{result.perplexity:.4f}")
    if result.baseline_perplexity is not None and result.top1_agreement is not None:
        change = 100 * (result.perplexity / result.baseline_perplexity - 1)
        table.add_row("baseline perplexity", f"{result.baseline_perplexity:.4f}")
        table.add_row("change", f"{change:+.2f} %")
        table.add_row("KL mean (nats)", f"{result.kl_mean:.5f}")
        table.add_row("KL 99.9 % (nats)", f"{result.kl_p999:.4f}")
        table.add_row("same first token", f"{100 * result.top1_agreement:.2f} %")
    if not report.request.kv_cache.is_exact:
        table.add_row("KV cache", str(report.request.kv_cache))
    table.add_row("predicted tokens", f"{result.tokens:,}")
    console = Console()
    console.print(table)
    console.print(f"Protocol: {report.windows.protocol}; text sha256 {report.windows.sha256[:12]}", highlight=False)
    if report.baseline is not None:
        console.print(f"Baseline: {report.baseline}", highlight=False)
