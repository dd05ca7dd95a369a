"""Engines that load what is written in each container, as measured by model type and form of the weights.

`scripts/measure_loaders.py --write` makes the table with real loaders; what it does not say is unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from compress.checkpoint.formats.base import CONTAINERS, RUNTIME, VLLM
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.dense import DENSE
from compress.checkpoint.formats.gguf import GGUF
from compress.checkpoint.scheme import Scheme
from compress.common.errors import SchemeError
from compress.models.wrappers import whole_config

LOADED_BY, REFUSED_BY, UNKNOWN = "loaded by", "not loaded by", "not known of"
"""Labels of engines by what they do."""
TABLE_FILE = Path(__file__).with_name("loaders.json")


@dataclass(frozen=True, slots=True)
class Reader:
    """An engine and what it does with a checkpoint.

    Attributes:
        loads: None where nothing is known.
        refusal: why it does not load it.
    """

    engine: str
    loads: bool | None
    refusal: str = ""


@dataclass(slots=True)
class Measured:
    """Outcomes of loading tiny models in an engine.

    Attributes:
        versions: of its packages.
        found: refusal by container, form and model type; "" where it loads.
    """

    versions: dict[str, str] = field(default_factory=dict)
    found: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Measured:
        """Parses an engine's part of the table, which lists model types by refusal."""
        found = {
            container: {
                form: {each: refusal for refusal, types in refusals.items() for each in types.split()}
                for form, refusals in forms.items()
            }
            for container, forms in entry["found"].items()
        }
        return cls(dict(entry["versions"]), found)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, with model types listed by refusal."""
        found: dict[str, dict[str, dict[str, str]]] = {}
        for container, forms in sorted(self.found.items()):
            for form, outcomes in sorted(forms.items()):
                refusals = sorted(set(outcomes.values()))
                found.setdefault(container, {})[form] = {
                    refusal: " ".join(sorted(each for each in outcomes if outcomes[each] == refusal))
                    for refusal in refusals
                }
        return {"versions": self.versions, "found": found}

    def refusal(self, container: str, form: str, model_type: str) -> str | None:
        """Returns why the engine refuses it, "" where it loads it, None where that was not measured."""
        return self.found.get(container, {}).get(form, {}).get(model_type)


def measured(file: Path = TABLE_FILE) -> dict[str, Measured]:
    """Reads the table, by engine."""
    return {name: Measured.from_dict(entry) for name, entry in json.loads(file.read_text(encoding="utf-8")).items()}


_table = cache(measured)

WITH_EXPERTS = "+experts"
MIXED = "mixed"
"""Name in the table of two forms in one checkpoint."""
ANY_FORM = DENSE.name, GGUF.name
"""Containers in which the stored types, not the forms, decide what loads them."""
SHOWS_ALL_FORMS = "llama"
"""Model type with which widths and sizes of groups were measured that others do not show: a refusal holds for all."""


def form_of(container: str, scheme: Scheme, with_groups: bool = False) -> str:
    """Names a form in the table: without ranks and numbers of columns, and without groups unless `with_groups`."""
    if container in ANY_FORM:
        return container
    if container == COMPRESS_RUNTIME.name:
        return scheme.key  # one plugin expands all
    dropped = r"\d+" if with_groups else r"g\d+|channel|\d+"
    return " ".join(word for word in str(scheme).split() if not re.fullmatch(dropped, word))


def readers(container: str, config: Mapping[str, Any], schemes: Iterable[Scheme]) -> list[Reader]:
    """Says what each engine does with a container of this name that holds the model of `config` in these forms."""
    engines, model_type, forms = CONTAINERS.find(container).engines, measured_type(config), set(schemes)
    return [_reader(engine, container, model_type, forms) for engine in engines]


def measured_engines() -> list[str]:
    """Returns the engines that loaders were measured of."""
    return [*_table()]


def check_loads(engine: str, container: str, config: Mapping[str, Any], schemes: Collection[Scheme]) -> None:
    """Raises SchemeError: an engine is not known to load these forms of the model of `config`, in a container of this
    name. Where its model type was not measured, that of `SHOWS_ALL_FORMS` tells."""
    found = [
        next((each for each in readers(container, described, schemes) if each.engine == engine), None)
        for described in (config, {"model_type": SHOWS_ALL_FORMS})
    ]
    forms = ", ".join(sorted(map(str, schemes)))
    if refused := next((each for each in found if each is not None and each.loads is False), None):
        raise SchemeError(f"{engine} does not load {forms}: {refused.refusal}")
    if not any(each is not None and each.loads for each in found):
        raise SchemeError(f"{engine} is not known to load {forms} in {container}")


def measured_type(config: Mapping[str, Any]) -> str:
    """Names a model in the table: its `model_type`, and whether it has the experts that a type has by choice."""
    model_type = str(whole_config(config).get("model_type"))
    return f"{model_type}{WITH_EXPERTS}" if config.get("enable_moe_block") else model_type


def _reader(engine: str, container: str, model_type: str, schemes: Collection[Scheme]) -> Reader:
    if engine == RUNTIME:
        return Reader(engine, True)
    table = _table().get(engine, Measured())
    forms = {form_of(container, scheme) for scheme in schemes} or {container}
    forms |= {MIXED} if len(schemes) > 1 and container not in ANY_FORM else set()
    found = [table.refusal(container, form, model_type) for form in forms]
    exact = [form_of(container, scheme, with_groups=True) for scheme in schemes]
    shown = [table.refusal(container, form, SHOWS_ALL_FORMS) for form in (*forms, *exact)]
    if refusal := next(filter(None, [*found, *shown]), ""):
        return Reader(engine, False, refusal)
    return Reader(engine, None if None in found else True)


def described(found: Collection[Reader]) -> dict[str, str]:
    """Lists engines by what they do; what none does is left out."""
    lists = {
        LOADED_BY: ", ".join(each.engine for each in found if each.loads) or "none",
        REFUSED_BY: "; ".join(f"{each.engine} ({each.refusal})" for each in found if each.loads is False),
        UNKNOWN: ", ".join(each.engine for each in found if each.loads is None),
    }
    return {label: engines for label, engines in lists.items() if engines}


ROUNDED_INPUTS = {"mxfp4": 4, "mxfp8": 8}
"""Bits to which vLLM rounds the inputs of layers in these forms, whatever `input_activations` says."""


def input_notes(schemes: Iterable[Scheme]) -> list[str]:
    """Says which forms vLLM multiplies with inputs of fewer bits than the checkpoint asks for."""
    words = sorted({scheme.word for scheme in schemes} & ROUNDED_INPUTS.keys())
    return [
        f"{VLLM} rounds the inputs of {word} layers to {ROUNDED_INPUTS[word]} bits as well, whatever config.json "
        "says: figures measured here do not hold there"
        for word in words
    ]
