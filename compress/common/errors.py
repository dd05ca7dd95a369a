"""Errors a user can act on. Each says what was wrong, with the numbers, and what mends it."""

from __future__ import annotations


class ToolkitError(Exception):
    """A refusal with a remedy; command lines print it as one line and exit with status 1.

    Args:
        problem: what was wrong, with the numbers.
        remedy: the command or change that mends it; empty only when nothing can.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}".rstrip(" .") + "." if self.remedy else self.problem


class CheckpointError(ToolkitError):
    """A checkpoint that cannot be read, written or trusted."""


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
