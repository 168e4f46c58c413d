"""Where a node reads its configuration, for a reload."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ranvier_py.config.config_loader import Loaded
from ranvier_py.config.config_model import Config


class ConfigSource(NamedTuple):
    """Where a node's configuration came from.

    `load` reads it as at the start; it blocks for some small files, and raises ConfigError. `own` adapts it for one of
    several workers. `spread` makes the other workers reload it, too. `is_newer`: it was reloaded since this process was
    configured.
    """

    load: Callable[[], Loaded]
    own: Callable[[Config], Config] = lambda config: config
    spread: Callable[[], object] = lambda: None
    is_newer: bool = False
