"""The place of a model that a user names: a path, a bundled model or a model of the hub. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from compress.checkpoint.locate.hub import HubModel
from compress.common.cli import BUNDLED, bundled_model, bundled_path
from compress.common.files import in_home
from compress.common.model_folder import GGUF_SUFFIX, find_folder


def find_model(named: str | Path, *, weights: bool = True, values: bool = True, code: bool = False) -> Path:
    """Returns the folder or GGUF file of a model; downloads what the cache lacks of a model of the hub. A path that
    exists comes first; any other name is returned as a path.

    Args:
        weights: whether weights are needed, or only config, tokenizer and card.
        values: whether the values of weights are needed, or only names, dtypes and shapes: then weights of a dense
            model may consist of headers only.
        code: whether Python files may run, and so are needed too.

    Raises:
        CheckpointError: the hub has no such model, does not answer or refuses access, or the disk is too small.
    """
    if name := bundled_model(named):
        return bundled_path(name)
    path = in_home(named)
    if not path.exists() and (model := HubModel.parse(str(named))):
        return model.download(weights=weights, values=values, code=code)
    return path if path.is_file() and path.suffix.lower() == GGUF_SUFFIX else find_folder(path)


def shown_name(path: Path) -> str:
    """Returns the name by which a model is printed, and may be named again."""
    return str(HubModel.of_cached(path) or path)


def source_name(path: Path) -> str:
    """Returns the name by which a checkpoint records its source: `demo`, `org/name@commit`, or an absolute path."""
    if name := next((name for name in BUNDLED if path == bundled_path(name)), None):
        return name
    return str(HubModel.of_cached(path) or path.resolve())


def find_source(name: str) -> Path:
    """Returns the path of a recorded source, which may not exist any more; downloads nothing."""
    if name in BUNDLED:
        return bundled_path(name)
    model = HubModel.parse(name)
    return (model.cached() if model else None) or Path(name)
