"""Where a node finds backends beside its configuration, and how these places are written."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.config.config_values import OptionalPath, key
from ranvier_py.core.options import Options


@dataclass(frozen=True, slots=True)
class DiscoveryOptions(Options):
    """Sources of backends."""

    backends_file: OptionalPath = key(
        None,
        "Backends",
        "File of backends that a node follows: TOML or YAML with backend as here, or a manifest of SMG in JSON. It is "
        "looked at each second, and taken whole once it has settled, or not at all: then its last good content holds.",
    )
