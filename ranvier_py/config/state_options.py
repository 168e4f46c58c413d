"""Where a node keeps what must outlive a restart."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.config.config_values import OptionalPath, key
from ranvier_py.core.options import Options


@dataclass(frozen=True, slots=True)
class StateOptions(Options):
    """The folder of a node's state."""

    state_folder: OptionalPath = key(
        None,
        "Backends",
        "Folder that keeps what operators order of backends while nodes run, for the next start; it is made if it is "
        "missing. What the configuration has of a backend wins where that was edited since. Without, orders end with "
        "the process.",
    )
