"""Sensitivities on disk, written as they are measured. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.common.errors import CheckpointError
from compress.common.files import atomic_file
from compress.search.space import Candidate, LayerGroup

FORMAT_VERSION = 1


@dataclass
class Sensitivities:
    """Divergence in nats caused by each layer group alone, by candidate.

    It depends on neither the other candidates nor the target, so a second search of the same model reuses it.

    Attributes:
        path: the file.
        identity: everything that they depend on.
        values: by name of the group, then by candidate.
    """

    path: Path
    identity: dict[str, Any]
    values: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, Any], restart: bool = False) -> Sensitivities:
        """Opens the file of earlier searches, or begins one.

        Args:
            restart: ignores stored values.

        Raises:
            CheckpointError: the file is damaged, or belongs to another model, text or method.
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

    def get(self, group: LayerGroup, candidate: Candidate) -> float | None:
        return self.values.get(group.name, {}).get(str(candidate))

    def of(self, group: LayerGroup, candidate: Candidate) -> float:
        """Returns a stored value."""
        return self.values[group.name][str(candidate)]

    def add(self, group: LayerGroup, candidate: Candidate, divergence: float) -> None:
        """Stores one value, on disk too."""
        self.values.setdefault(group.name, {})[str(candidate)] = divergence
        stored = {"format_version": FORMAT_VERSION, "identity": self.identity, "values": self.values}
        with atomic_file(self.path) as stream:
            stream.write(json.dumps(stored, indent=1).encode())
