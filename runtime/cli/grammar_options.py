"""Options for what an answer must look like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.checkpoint.errors import RequestError

if TYPE_CHECKING:
    from runtime.sampling_params import Grammar


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    """What the text must look like; one of the two at most."""

    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", metavar="FILE", help="The text must be JSON of this schema.")
    ] = None
    regex: Annotated[
        str | None, typer.Option("--regex", help="The text must be matched by this regular expression, all of it.")
    ] = None

    def grammar(self) -> Grammar | None:
        """What the options say. Raises RequestError when both are given, or the file cannot be read."""
        from runtime.sampling_params import Grammar, GrammarKind

        if self.json_schema is not None and self.regex is not None:
            raise RequestError("--json-schema and --regex exclude each other", "Give one of them")
        if self.regex is not None:
            return Grammar(GrammarKind.REGEX, self.regex)
        if self.json_schema is None:
            return None
        try:
            return Grammar(GrammarKind.JSON_SCHEMA, self.json_schema.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(
                f"{self.json_schema} cannot be read: {error}", "Name a file with a JSON schema"
            ) from error
