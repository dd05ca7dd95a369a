"""Sensitivities on disk: every figure is there as soon as it was measured. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.common.errors import CheckpointError
from compress.common.files import atomic_file
from compress.search.space import Form, Unit

FORMAT_VERSION = 1


@dataclass
class Sensitivities:
    """The divergence that each unit alone causes, by form, in nats.

    They depend on neither menu nor target, so that a second search of the same model finds them here.

    Attributes:
        path: the file.
        identity: what they depend on.
        values: by name of the unit, then by form.
    """

    path: Path
    identity: dict[str, Any]
    values: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, Any], restart: bool = False) -> Sensitivities:
        """What earlier searches left in a file, or nothing yet.

        Args:
            restart: leaves out what is there.

        Raises:
            CheckpointError: the file is damaged, or its figures are of another model, text or method.
        """
        now = dict(identity)
        if restart or not path.is_file():
            return cls(path, now)
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            version, before, values = stored["format_version"], stored["identity"], stored["values"]
            values = {name: {key: float(value) for key, value in each.items()} for name, each in values.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} holds no sensitivities: {error!r}", "Remove it, or add --restart") from error
        differing = [key for key in now | before if now.get(key) != before.get(key)]
        if version != FORMAT_VERSION or differing:
            what = ", ".join(sorted(differing)) or f"format_version {version}"
            raise CheckpointError(
                f"{path} holds sensitivities of another configuration ({what} differ)",
                "Name another file with --sensitivities, or add --restart to measure them anew",
            )
        return cls(path, now, values)

    def get(self, unit: Unit, form: Form) -> float | None:
        return self.values.get(unit.name, {}).get(str(form))

    def of(self, unit: Unit, form: Form) -> float:
        """A figure that is known."""
        return self.values[unit.name][str(form)]

    def add(self, unit: Unit, form: Form, divergence: float) -> None:
        """Keeps one figure, on disk too."""
        self.values.setdefault(unit.name, {})[str(form)] = divergence
        stored = {"format_version": FORMAT_VERSION, "identity": self.identity, "values": self.values}
        with atomic_file(self.path) as stream:
            stream.write(json.dumps(stored, indent=1).encode())
