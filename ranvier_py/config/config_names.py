"""How a key of the configuration is called outside a file: its flag, and its variable in the environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

ENV_PREFIX = "RANVIER_"
FILE_VARIABLE = "RANVIER_CONFIG"

RENAMED: Mapping[str, str] = MappingProxyType({"first_byte_timeout_s": "first_event_timeout_s"})
"""What keys were called before: old names are read wherever the new ones are."""


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return ENV_PREFIX + name.upper()


def keys_of(names: Iterable[str]) -> dict[str, str]:
    """Return these names by the key that each is; of two for one key the new one."""
    return {RENAMED.get(name, name): name for name in sorted(names, key=RENAMED.__contains__, reverse=True)}
