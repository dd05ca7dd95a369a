"""The tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.checkpoint.errors import DataError


def load_tokenizer(path: str | Path) -> Any:
    """The transformers tokenizer that lies in a model folder; nothing is downloaded.

    Raises:
        DataError: no tokenizer there, or one that cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    # transformers and the tokenizer library below it raise bare Exception too; all mean the same to a user.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(": ")
        raise DataError(
            f"{path} holds no tokenizer that can be read ({reason})",
            "Copy tokenizer.json and tokenizer_config.json of the model into it",
        ) from error
