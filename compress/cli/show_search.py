"""Searches as tables."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from compress.cli.show import describe_run, gigabytes, megabytes, wide_console
from compress.targets import without_indices

if TYPE_CHECKING:
    from compress.search.survey import Survey


def print_survey(survey: Survey) -> None:
    """What would be measured, and what that takes."""
    table = Table(title=f"Search on {survey.prepared.request.model}", title_justify="left")
    table.add_column("decided together", overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("may become (MB each)", overflow="fold")
    kinds: dict[tuple[str, ...], list] = {}
    for unit in survey.menus:
        kinds.setdefault(tuple(map(without_indices, unit.modules)), []).append(unit)
    for modules, units in kinds.items():
        sizes = [f"{form} {megabytes(survey.cost(units[0], form))}" for form in survey.menus[units[0]]]
        table.add_row("\n".join(modules), str(len(units)), ", ".join(sizes))
    console = wide_console()
    console.print(table)
    for line in describe_survey(survey):
        console.print(line, highlight=False, markup=False)


def describe_survey(survey: Survey) -> list[str]:
    """Target, range, cost and needs, one line each."""
    low, high = survey.smallest, survey.largest
    return [
        f"target: {survey.request.goal}; the menu reaches {survey.bits_per_weight(low):.3f} to "
        f"{survey.bits_per_weight(high):.3f} bits per weight, {megabytes(low + survey.fixed_bytes)} to "
        f"{megabytes(high + survey.fixed_bytes)} MB",
        f"{survey.measurements} measurements over {survey.measured.numel():,} tokens, "
        f"{survey.operations / 1e12:,.1f} TFLOP: about {survey.seconds():,.0f} s at the speed of this device, and "
        "what rounding takes",
        f"peak memory: about {gigabytes(survey.peak_memory)} GB with the whole model in it",
        describe_run(survey.prepared),
    ]


def print_choice(survey: Survey, search: dict[str, Any], recipe: Path) -> None:
    """What was found: which forms, how often, by kind."""
    words = list(map(str, survey.request.menu))
    table = Table(title=f"Found for {search['target']}", title_justify="left")
    table.add_column("decided together", overflow="fold")
    for each in words:
        table.add_column(each, justify="right")
    kinds: dict[str, Counter[str]] = {}
    for unit in search["units"]:
        kinds.setdefault("\n".join(map(without_indices, unit["modules"])), Counter())[unit["chosen"]] += 1
    for modules, counts in kinds.items():
        table.add_row(modules, *(str(counts[each] or "") for each in words))
    console = wide_console()
    console.print(table)
    lines = [f"sensitivities add up to KL {search['predicted']:.4f}"]
    lines += [
        f"try {number}: predicted {each['predicted']:.4f}, measured {each['measured']:.4f}, "
        f"{megabytes(each['bytes'])} MB"
        for number, each in enumerate(search["tries"], 1)
    ]
    for line in [*lines, f"recipe: {recipe}"]:
        console.print(line, highlight=False, markup=False)
