"""Errors with a problem description, including numbers, and a remedy."""

from __future__ import annotations


def sentences(*parts: str) -> str:
    """Joins parts of a message that are not empty, each ended by one full stop unless it has an end."""
    ended = (part if part.endswith((".", "?", "!")) else f"{part}." for part in map(str.strip, parts) if part)
    return " ".join(ended)


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

    def __str__(self) -> str:
        return sentences(self.problem, self.remedy) if self.remedy else self.problem


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
