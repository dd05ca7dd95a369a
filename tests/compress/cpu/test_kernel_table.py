"""The table of compiled kernels of linears in docs/architecture.md is that of the C sources."""

import re
from pathlib import Path

from compress.cpu.build import SOURCES

DOCUMENT = Path(__file__).parents[3] / "docs" / "architecture.md"
COLUMNS = ("float32", "bfloat16", "8 bits", "bfloat16, few rows", "8 bits, few rows")


def kernel_table() -> str:
    """Markdown, a line for every instruction set: "-" where the kernel of float32, or that of many rows, serves."""
    source = (SOURCES / "linear" / "linear.c").read_text()
    content = source.partition("kernel_sets[NUM_INSTRUCTION_SETS] = {")[2].partition("\n};")[0]
    found = re.findall(r"\[(\w+)\] = \{(.*?)\}", content)
    rows = {name: kernels.replace("&", "").split(", ") for name, kernels in reversed(found)}  # the first of a name
    order = list(dict.fromkeys(name for name, _ in found))
    lines = [["set", *COLUMNS], ["---"] * 6]
    lines += [[name.lower(), *rows[name], *["-"] * (len(COLUMNS) - len(rows[name]))] for name in order]
    return "\n".join("| " + " | ".join(cell.replace("NULL", "-") for cell in line) + " |" for line in lines)


def test_the_document_has_the_table_of_the_sources() -> None:
    assert kernel_table() in DOCUMENT.read_text(), f"write this into {DOCUMENT.name}:\n{kernel_table()}"


def test_every_kernel_is_in_the_table() -> None:
    defined = {
        name
        for file in SOURCES.glob("linear/*.c")
        for name in re.findall(r"^const KernelKind (\w+)", file.read_text(), re.MULTILINE)
    }
    assert defined == set(re.findall(r"\b[a-z]\w*_(?:float32|bfloat16|q8|tile_order)\b", kernel_table()))
