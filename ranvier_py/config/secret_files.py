"""Files that hold one secret each."""

from __future__ import annotations

from pathlib import Path

from ranvier_py.core.errors import ConfigError

SECRET_FILE_BYTES_MAX = 4096
"""A key file is one line; a longer file was named by mistake."""


def read_secret_file(path: Path) -> str:
    """Return the one line of a secret's file. Raises ConfigError; the message does not show the secret."""
    try:
        with path.open("rb") as stream:
            content = stream.read(SECRET_FILE_BYTES_MAX + 1)
        text = content.decode().strip()
    except OSError as error:
        raise ConfigError([f"{path} can't be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path} is not text"]) from error
    if len(content) > SECRET_FILE_BYTES_MAX or not text or not text.isprintable():
        raise ConfigError([f"{path} must hold one line of text, the secret"])
    return text
