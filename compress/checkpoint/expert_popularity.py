"""Tokens that calibration sent to each expert, as recorded in the report next to the weights."""

from __future__ import annotations

from pathlib import Path

from compress.common.files import REPORT_FILE, read_json


def calibration_tokens(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the tokens of each expert by the name of the block with the mixture; empty without a calibration.

    Raises:
        CheckpointError: the report is not valid JSON.
    """
    if not (folder / REPORT_FILE).is_file():
        return {}
    report = read_json(folder / REPORT_FILE, f"Remove it, or write it again with `compress quantize`: {REPORT_FILE}")
    blocks = report.get("blocks", []) if isinstance(report, dict) else []
    return {block["block"]: tuple(mixture["tokens"]) for block in blocks for mixture in block.get("experts", ())}


def popularity(tokens: tuple[int, ...], num_experts: int) -> list[float]:
    """Returns the share of tokens of each expert; zeros where tokens are not known."""
    if len(tokens) != num_experts or not sum(tokens):
        return [0.0] * num_experts
    return [count / sum(tokens) for count in tokens]
