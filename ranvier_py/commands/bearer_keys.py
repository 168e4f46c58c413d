"""Keys that a command shows to a router, from a file or the environment."""

from __future__ import annotations

import os
from pathlib import Path

from ranvier_py.config.secret_files import read_secret_file
from ranvier_py.core.errors import ConfigError


def bearer_key(variable: str, file: Path | None) -> str:
    """Return the key of this file, else of this variable or of the file that its twin names, else "". Raises
    ConfigError."""
    key, named = os.environ.get(variable, "").strip(), os.environ.get(f"{variable}_FILE", "")
    if file is None and key and named:
        raise ConfigError([f"{variable}_FILE: {variable} is set as well; set one of them"])
    if file is not None or named:
        return read_secret_file(file or Path(named))
    if not key.isprintable():
        raise ConfigError([f"{variable} must be one line of text, the key"])
    return key
