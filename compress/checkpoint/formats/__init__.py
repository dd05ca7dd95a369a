"""Containers of packed checkpoints, one per file, and the choice between them."""

from __future__ import annotations

from collections.abc import Mapping

from compress.checkpoint.config import is_embedding
from compress.checkpoint.formats.base import Container
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.checkpoint.formats.dense import DENSE
from compress.checkpoint.scheme import GROUP_SIZES, MAX_BITS, MIN_BITS, targets
from compress.checkpoint.weights import Int, Scheme
from compress.checkpoint.weights.coded import INTEGERS
from compress.common.errors import SchemeError


def check_held(container: Container, scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raises SchemeError when a format cannot hold a weight `[O, I]` of a scheme, with the formats that can hold it and
    the nearest form that this one can."""
    try:
        container.check(scheme, shape)
    except SchemeError as error:
        holders = [each.name for each in (COMPRESSED_TENSORS, COMPRESS_RUNTIME) if _is_held(each, scheme, shape)][:1]
        others = " or ".join(f"--format {name}" for name in (*holders, DENSE.name))
        raise SchemeError(error.problem, f"Use {others}{_nearest(container, scheme, shape)}") from error


def _nearest(container: Container, scheme: Scheme, shape: tuple[int, int]) -> str:
    """The nearest form that a format holds, and the commands that make it; empty for a format that holds none."""
    found = nearest_held(container, scheme, shape)
    if found is None:
        return ""
    name, quantize = container.name, f"compress quantize SOURCE {_options(found)}"
    export = "" if container is COMPRESSED_TENSORS else f", then compress export packed --format {name} --out OTHER"
    return f"; the nearest form that {name} holds is {found}: {quantize}{export}"


def _options(target: Scheme) -> str:
    """Options of `compress quantize` that choose a form."""
    if not isinstance(target, Int):
        return f"--weights {target.word}"
    return f"--bits {target.bits} --group-size {-1 if target.group_size is None else target.group_size}"


def nearest_held(container: Container, scheme: Scheme, shape: tuple[int, int]) -> Scheme | None:
    """Returns the target of compression that a format holds in place of a weight's form: the nearest in size, of the
    same numbers where there are such. None for a format that holds none."""
    integers = (Int(bits, group) for bits in range(MIN_BITS, MAX_BITS + 1) for group in (*GROUP_SIZES, None))
    floats = (form.target() for form in targets().values() if form is not Int)
    fitting = [each for each in (*integers, *floats) if _is_held(container, each, shape)]
    size, is_integer = scheme.stored_bits(*shape), scheme.numbers in (Int.numbers, INTEGERS)

    def distance(other: Scheme) -> tuple[bool, int]:
        return (other.numbers == Int.numbers) != is_integer, abs(other.stored_bits(*shape) - size)

    return min(fitting, key=distance, default=None)


def _is_held(container: Container, scheme: Scheme, shape: tuple[int, int]) -> bool:
    try:
        container.check(scheme, shape)
    except SchemeError:
        return False
    return True


def format_for(schemes: Mapping[str, Scheme]) -> Container:
    """Returns the format of a new checkpoint: the one that most engines load, unless it cannot hold a form.

    Args:
        schemes: by module; other engines read no packed embedding, whatever its scheme.
    """
    special = any(scheme.structure or is_embedding(module) for module, scheme in schemes.items())
    return COMPRESS_RUNTIME if special else COMPRESSED_TENSORS
