"""How a key of the configuration is called outside a file: its flag, and its variable in the environment."""

from __future__ import annotations

ENV_PREFIX = "RANVIER_"
FILE_VARIABLE = "RANVIER_CONFIG"


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return ENV_PREFIX + name.upper()
