"""Errors with a problem description, including numbers, and a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Self


def sentences(*parts: str) -> str:
    """Joins parts of a message that are not empty, each ended by one full stop unless it has an end."""
    ended = (part if part.endswith((".", "?", "!")) else f"{part}." for part in map(str.strip, parts) if part)
    return " ".join(ended)


def nearest(wanted: str, known: Iterable[str], what: str) -> str:
    """Writes a remedy: the nearest known word, if one is near, and all of them."""
    words = [*known]
    near = get_close_matches(wanted, words, n=1, cutoff=0.5)
    suggestion = f"Did you mean {near[0]!r}? " if near else ""
    return f"{suggestion}{what}: {', '.join(words)}"


class ToolkitError(Exception):
    """A refusal with a remedy; command lines print it as one line and exit with status 1.

    Args:
        problem: what was wrong, with the numbers.
        remedy: command or change that fixes it; empty only if there is none.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    @classmethod
    def unknown(cls, kind: str, name: object, known: Iterable[str], what: str = "Known", remedy: str = "") -> Self:
        """Builds the refusal of a name that is not among those of a kind.

        Args:
            what: introduces the known names, such as the option that takes them.
            remedy: what else helps.
        """
        return cls(f"unknown {kind} {name!r}", sentences(nearest(str(name), known, what), remedy))

    @classmethod
    def missing(cls, kind: str, path: object, remedy: str) -> Self:
        """Builds the refusal of a file or folder that does not exist."""
        return cls(f"{kind} {path} does not exist", remedy)

    def __str__(self) -> str:
        return sentences(self.problem, self.remedy) if self.remedy else self.problem


class OutOfMemoryError(ToolkitError):
    """A lack of memory, on a device or of the host. `what`: what needs it, with the numbers."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"out of memory: {what}", remedy)


_SHORTAGES = ("allocate memory", "out of memory", "failed to map segment")
"""Parts of the messages of torch and the linker for a lack of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether Python, torch or the linker lacks memory, on a device or of the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without its import
        return True
    return isinstance(error, RuntimeError | ImportError) and any(mark in str(error) for mark in _SHORTAGES)


class CheckpointError(ToolkitError):
    """A checkpoint that cannot be read, written or trusted."""


class UnsupportedModelError(CheckpointError):
    """A sound model that this runtime does not serve."""


class SchemeError(ToolkitError):
    """A quantization scheme that cannot be applied to a weight."""


class RecipeError(ToolkitError):
    """A recipe that says something unknown or impossible."""


class DataError(ToolkitError):
    """Calibration or evaluation text that cannot be used."""


class NumericsError(ToolkitError):
    """NaN or infinity where numbers were expected."""


class RequestError(ToolkitError):
    """A generation request that this engine refuses; servers answer 400."""


class LongPromptError(RequestError):
    """A prompt that cannot fit into the context, whatever is asked of it."""
