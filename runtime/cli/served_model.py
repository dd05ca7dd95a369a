"""A loaded model and the HTTP application around it, for every command that serves requests."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compress.checkpoint.demo import demo_model_path

if TYPE_CHECKING:
    from fastapi import FastAPI

    from runtime.config import RuntimeConfig
    from runtime.engine import Engine
    from runtime.server.limits import Limits
    from runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One engine, its tokenizer, and the application through which clients reach it under `name`."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    app: FastAPI


def name_of(path: Path) -> str:
    """What clients call the model of a folder when nobody says otherwise."""
    return "demo" if path == demo_model_path() else path.resolve().name


def load_served_model(
    path: Path,
    name: str,
    config: RuntimeConfig,
    limits: Callable[[int], Limits],
    *,
    api_key: str | None = None,
    allowed_hosts: Collection[str] = (),
) -> ServedModel:
    """Loads a checkpoint and wraps it. Imports torch; the engine's thread starts with the application.

    Args:
        limits: what the server takes on, given the context length that the loaded model has.
        api_key: key that clients must send; None asks for none.
        allowed_hosts: names by which clients may call the server; empty for any.

    Raises:
        CheckpointError: the folder cannot be loaded, and why.
        ToolkitError: the configuration asks for what this machine or the model does not have.
    """
    from runtime.engine_thread import EngineThread
    from runtime.llm import load_engine
    from runtime.server.app import create_app

    engine, tokenizer = load_engine(path, config)
    app = create_app(
        EngineThread(engine),
        tokenizer,
        name,
        limits(engine.runner.max_model_len),
        render_metrics=engine.render_metrics,
        api_key=api_key,
        allowed_hosts=allowed_hosts,
    )
    return ServedModel(name, engine, tokenizer, app)
