"""Several models of one server: their names, the memory that they share, and engines that are loaded on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.cli import SIZE_OPTION, option
from compress.common.errors import ToolkitError
from runtime.cli.options import name_of, resolve_model
from runtime.core.adapter import parse_modules, share_modules
from runtime.core.config import DataParallelOptions, LimitOptions, Limits, RuntimeConfig
from runtime.deploy.kv_events import KVEventOptions
from runtime.served_engine import EngineSource, load_apart
from runtime.transfer.options import BOTH, TransferOptions

if TYPE_CHECKING:
    from runtime.engine.engine_client import EngineClient
    from runtime.model_sizes import ModelSize
    from runtime.routing.on_demand import ModelMemory, OnDemandEngine
    from runtime.routing.routes import Routes
    from runtime.server.app import ServedModel


@dataclass(frozen=True, slots=True)
class SeveralModelsOptions:
    """Several models of one server."""

    model_memory: int | None = option(
        default=None,
        **SIZE_OPTION,
        help="Memory for all models that are loaded at once, where several are served: idle ones are unloaded, least "
        "recently used first, when the next one would exceed it. Default: what is free at the start.",
    )
    route: Path | None = option(
        default=None,
        metavar="FILE",
        help="YAML file of virtual models, which choose a served model for a request by rules, or ask a small model "
        "first and a large one where the small one is not confident.",
    )


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model with its name in the API. `where`: what the user is told."""

    name: str
    path: Path
    where: str


def resolve_models(given: Sequence[str], name: str | None, code: bool) -> list[NamedModel]:
    """Returns the models of arguments of the form `MODEL` or `NAME=MODEL`.

    Args:
        name: value of `--served-model-name`.
        code: whether Python files of the models may run.

    Raises:
        CheckpointError: as `resolve_model`.
        ToolkitError: names are missing or not distinct.
    """
    if name is not None and len(given) > 1:
        raise ToolkitError("--served-model-name names one model, and several are served", "Write NAME=MODEL for each")
    found = [_resolve(text, name, code) for text in given or ("",)]
    names = [model.name for model in found]
    for model in found:
        if names.count(model.name) > 1:
            raise ToolkitError(f"two models are named {model.name!r}", "Write NAME=MODEL, with a name for each")
    return found


def _resolve(text: str, name: str | None, code: bool) -> NamedModel:
    given, _, model = text.partition("=") if "=" in text and not Path(text).exists() else ("", "", text)
    path, where = resolve_model(Path(model) if model else None, code)
    return NamedModel(name or given or name_of(path), path, where)


@dataclass(frozen=True, slots=True)
class SeveralModels:
    """The models of a server by name; the first one is loaded at the start.

    Attributes:
        sources: with the adapters of each in its configuration.
        sizes: of all engines of a model.
        engines, transfer: engines of each of them.
        memory: memory that they share.
        routes: virtual models.
    """

    sources: Mapping[str, EngineSource]
    sizes: Mapping[str, ModelSize]
    engines: DataParallelOptions
    transfer: TransferOptions
    memory: ModelMemory
    routes: Routes

    def describe(self) -> str:
        """Describes the memory."""
        needs = ", ".join(f"{name} {_size_text(size.num_bytes)}" for name, size in self.sizes.items())
        return f"memory    {needs}; {_size_text(self.memory.limit)} for what is loaded"

    def engine(self, name: str, loaded: EngineClient | None = None) -> OnDemandEngine:
        """Returns the engine of a model, which may be loaded already."""
        from runtime.routing.on_demand import OnDemandEngine

        source = self.sources[name]
        config = replace(source.config, lora_modules=None, enable_lora=source.config.serves_adapters)
        load = partial(_load, replace(source, config=config), self.engines, self.transfer)
        adapters = _adapters_of(source)
        return OnDemandEngine(name, self.sizes[name].num_bytes, self.memory, load, loaded, adapters)

    def parts(self, limits: LimitOptions) -> dict[str, Any]:
        """Returns what the application has in addition to the first model, and the adapters of that one. Raises
        CheckpointError if a model has no tokenizer."""
        first = next(iter(self.sources.values()))
        return {"others": list(self._others(limits)), "routes": self.routes, "adapters": _adapters_of(first)}

    def _others(self, limits: LimitOptions) -> Iterator[ServedModel]:
        from runtime.server.app import ServedModel
        from runtime.text.tokenizer import Tokenizer

        for name in [*self.sources][1:]:
            allowed = Limits(**asdict(limits), max_model_len=self.sizes[name].max_model_len)
            source = self.sources[name]
            tokenizer, adapters = Tokenizer.open(source.path), _adapters_of(source)
            yield ServedModel(self.engine(name), tokenizer, name, allowed, adapters)


def _adapters_of(source: EngineSource) -> dict[str, Path]:
    return parse_modules(source.config.lora_modules or ())


def plan_models(
    models: Sequence[NamedModel],
    source: EngineSource,
    events: Sequence[KVEventOptions | None],
    engines: DataParallelOptions,
    transfer: TransferOptions,
    options: SeveralModelsOptions,
) -> SeveralModels | None:
    """Measures the models of a server, and prints their memory. Returns None for a single model.

    Args:
        source: that of the first one, with the adapters of all.
        events: events of the KV cache of each.

    Raises:
        CheckpointError: a folder cannot be read or served.
        ToolkitError: a model exceeds the memory, options do not go with the number of models, it is not clear for which
            model an adapter is, or the file of virtual models is wrong.
    """
    _check_options(transfer, options, len(models))
    if len(models) == 1:
        return None
    from runtime.routing.on_demand import ModelMemory
    from runtime.routing.route_file import read_routes

    names = [model.name for model in models]
    routes = read_routes(options.route, names) if options.route is not None else {}
    configs = _share_adapters(source.config, names, routes)
    sources = {
        model.name: replace(source, path=model.path, config=configs[model.name], kv_events=published)
        for model, published in zip(models, events, strict=True)
    }
    sizes = _measure(sources, engines, transfer)
    limit = options.model_memory or sizes[names[0]].free_bytes
    _check_sizes(sizes, source, limit)
    several = SeveralModels(sources, sizes, engines, transfer, ModelMemory(limit), routes)
    print(several.describe(), flush=True)
    return several


def _share_adapters(config: RuntimeConfig, names: Sequence[str], routes: Routes) -> dict[str, RuntimeConfig]:
    """Returns the configuration of each model, with its own adapters. Checks the adapters, which most models load later
    only."""
    from runtime.adapters.config import LoraConfig

    for name, path in parse_modules(config.lora_modules or ()).items():
        LoraConfig.read(path)
        if name in routes:
            problem = f"--lora-modules names an adapter {name!r}, as a virtual model of --route is named"
            raise ToolkitError(problem, "Give one of them another name")
    shared = share_modules(config.lora_modules or (), names)
    return {name: replace(config, lora_modules=own) for name, own in shared.items()}


def _measure(
    sources: Mapping[str, EngineSource], engines: DataParallelOptions, transfer: TransferOptions
) -> dict[str, ModelSize]:
    """Returns the sizes of all engines of each model together."""
    from runtime.model_sizes import measure_apart

    parts = transfer.parts(engines.data_parallel_size, Path())
    counts = Counter(part.role for part in parts)
    kinds = [next(part for part in parts if part.role == role) for role in counts]
    found = iter(measure_apart([(each.path, kind.adapt(each.config)) for each in sources.values() for kind in kinds]))
    sizes = {}
    for name in sources:
        own = [next(found) for _ in kinds]
        num_bytes = sum(size.num_bytes * count for size, count in zip(own, counts.values(), strict=True))
        sizes[name] = replace(own[0], num_bytes=num_bytes)
    return sizes


def _check_sizes(sizes: Mapping[str, ModelSize], source: EngineSource, limit: int) -> None:
    """Raises ToolkitError for a model that never fits."""
    if source.config.kv_memory_bytes is None and any(size.device != "cpu" for size in sizes.values()):
        problem = "several models on a GPU need --kv-memory: by default one model takes all memory that is free"
        raise ToolkitError(problem, "Add --kv-memory SIZE, the KV cache of each model")
    for name, size in sizes.items():
        if size.num_bytes > limit:
            problem = f"the model {name} needs {_size_text(size.num_bytes)}, and {_size_text(limit)} are allowed"
            raise ToolkitError(problem, "Use a larger --model-memory, or a smaller --kv-memory")


def _size_text(num_bytes: int) -> str:
    """Formats a size as options take it; the function that others use imports torch."""
    return f"{num_bytes / 2**20:.0f}MiB"


def _load(
    source: EngineSource, engines: DataParallelOptions, transfer: TransferOptions, stack: ExitStack
) -> EngineClient:
    return load_apart(source, engines, transfer, stack).client


def _check_options(transfer: TransferOptions, options: SeveralModelsOptions, num_models: int) -> None:
    """Raises ToolkitError for options of several models with one, and for those of one with several."""
    if num_models == 1:
        for name, is_given in {"--route": options.route, "--model-memory": options.model_memory}.items():
            if is_given is not None:
                raise ToolkitError(f"{name} has no effect on one model", "Name several: runtime serve MODEL MODEL")
        return
    if transfer.role != BOTH:
        problem = f"--role {transfer.role} does not go with several models: a --transfer-socket has pages of one model"
        raise ToolkitError(problem, "Use --prefill-engines, or a server for each model")
