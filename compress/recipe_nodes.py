"""YAML nodes turned into values. Every refusal names the file, the line and the key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from compress.checkpoint.errors import DataError, RecipeError, SchemeError
from compress.search.goal import parse_size
from compress.stages.words import nearest

if TYPE_CHECKING:
    import yaml


def kind_of(node: yaml.Node) -> str:
    """`scalar`, `sequence` or `mapping`."""
    return cast("yaml.ScalarNode", node).id  # every kind has it, whatever the type of all says


class NodeReader:
    """Reads nodes of one file and knows the line of everything it refuses.

    Attributes:
        origin: the file name that errors show.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def mapping(self, node: yaml.Node, keys: tuple[str, ...], what: str) -> dict[str, yaml.Node]:
        """Values of a mapping that has only these `keys`, each once."""
        if kind_of(node) != "mapping":
            raise self.refusal(node, f"{what} must be a mapping", f"Keys: {', '.join(keys)}")
        values: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = str(key_node.value)
            if key not in keys:
                raise self.refusal(key_node, f"unknown key {key!r} in {what}", nearest(key, keys, "Keys"))
            if key in values:
                raise self.refusal(key_node, f"key {key!r} stands twice in {what}", "Keep one of them")
            values[key] = value
        return values

    def items(self, node: yaml.Node | None, what: str) -> list[yaml.Node]:
        """Of a list; none of one that is not there."""
        if node is None:
            return []
        if kind_of(node) != "sequence":
            raise self.refusal(node, f"{what} must be a list", f"Write `{what}: [...]`")
        return list(node.value)

    def options(self, values: dict[str, yaml.Node], types: dict[str, type]) -> dict[str, Any]:
        """Scalars of these types, and the lists of patterns that every stage has."""
        options = self.scalars(values, types)
        for key in {"targets", "ignore"} & values.keys():
            options[key] = tuple(self.scalar(item, str, key) for item in self.items(values[key], key))
        return options

    def scalars(self, values: dict[str, yaml.Node], types: dict[str, type]) -> dict[str, Any]:
        """Those that are given."""
        given = {key: types[key] for key in types if key in values}
        return {
            key: self.number(values[key], key) if kind is float else self.scalar(values[key], kind, key)
            for key, kind in given.items()
        }

    def scalar(self, node: yaml.Node, expected: type, what: str) -> Any:
        """A scalar of just the `expected` type."""
        import yaml

        value = yaml.SafeLoader("").construct_object(node, deep=True) if kind_of(node) == "scalar" else None
        # bool is an int to Python but not to a reader of the recipe.
        if type(value) is not expected:
            shown = node.value if kind_of(node) == "scalar" else f"a {kind_of(node)}"
            raise self.refusal(node, f"{what}: {shown!r} is not of type {expected.__name__}", "Correct the value")
        return value

    def number(self, node: yaml.Node, what: str) -> float:
        """A number, whole or not. YAML 1.1 takes `1e-3` for a word, so the text counts unless it is quoted."""
        try:
            plain = kind_of(node) == "scalar" and cast("yaml.ScalarNode", node).style is None
            number = float(node.value) if plain else None
        except ValueError:
            number = None
        number = self.scalar(node, float, what) if number is None else number
        if not math.isfinite(number):
            raise self.refusal(node, f"{what}: {node.value!r} is not finite", "Correct the value")
        return number

    def size(self, node: yaml.Node, what: str) -> int:
        """Bytes, as `800MB` or a plain number."""
        if kind_of(node) != "scalar":
            raise self.refusal(node, f"{what} is a {kind_of(node)} and no size", "Write 800MB")
        return self.meant(node, lambda: parse_size(str(node.value)))

    def build(self, node: yaml.Node, kind: type, **options: Any) -> Any:
        """An object; what its class refuses is refused with the line."""
        return self.meant(node, lambda: kind(**options))

    def meant(self, node: yaml.Node, make: Callable[[], Any]) -> Any:
        """What a node means; a refusal says where it stands."""
        try:
            return make()
        except (RecipeError, SchemeError, DataError) as error:
            raise self.refusal(node, error.problem, error.remedy) from error

    def refusal(self, node: yaml.Node, problem: str, remedy: str) -> RecipeError:
        """With file and line."""
        return RecipeError(f"{self.origin}:{node.start_mark.line + 1}: {problem}", remedy)
