"""Sources of kernels hold nothing that the oldest Triton which is supported cannot read."""

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[4]


def kernels() -> Iterator[ast.FunctionDef]:
    """Yields every function of the project that Triton compiles."""
    for folder in ("runtime", "compress"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if "triton.jit" in text else ():
                if isinstance(node, ast.FunctionDef) and any(
                    "jit" in ast.unparse(each) for each in node.decorator_list
                ):
                    yield node


def test_no_tuple_is_unpacked_inside_of_a_tuple() -> None:
    """Triton 3.6 raises a TypeError at the first launch of such a kernel."""
    found, nested = list(kernels()), []
    for kernel in found:
        for node in ast.walk(kernel):
            targets = node.targets if isinstance(node, ast.Assign) else []
            tuples = [each for each in targets if isinstance(each, ast.Tuple)]
            nested += [f"{kernel.name}: {ast.unparse(node)}" for each in tuples if any(map(is_tuple, each.elts))]
    assert len(found) > 40
    assert not nested


def is_tuple(node: ast.expr) -> bool:
    return isinstance(node, ast.Tuple | ast.List)
