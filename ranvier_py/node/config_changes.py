"""What a reload finds to be different, for the log: each key with its old and new value, and files with other content.

Rule: no secret is shown: neither the value of a secret key, nor user, password or query in the URL of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ranvier_py.config.config_model import KEYS, SECRETS, Config, shown
from ranvier_py.config.config_reference import toml_value
from ranvier_py.io.certificates import described

VALUE_CHARACTERS_MAX = 1000  # a line of the log stays readable though a hundred backends change

FOLLOWED = ("tls_certificate_file", "client_rules_file", "chat_template")
"""Keys of files that a node reads only when it starts or reloads, whose content is no key's value."""


def changes(before: Config, after: Config, names: Iterable[str]) -> Iterator[str]:
    """Yield «key old -> new» for these keys; of a long list the items that differ."""
    for name in names:
        old, new = KEYS[name].value_in(before), KEYS[name].value_in(after)
        texts, end = (toml_value(shown(old)), toml_value(shown(new))), ""
        if texts[0] == texts[1] or (name in SECRETS and None not in (old, new)):
            end = " (what is not shown differs)"
        elif max(map(len, texts)) > VALUE_CHARACTERS_MAX and isinstance(old, tuple):
            texts, end = (without(old, new), without(new, old)), " (only what differs)"
        yield f"{name} {cut(texts[0])} -> {cut(texts[1])}{end}"


def without(items: tuple[Any, ...], others: tuple[Any, ...]) -> str:
    return toml_value(shown(tuple(item for item in items if item not in others)))


def cut(text: str) -> str:
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[:VALUE_CHARACTERS_MAX]}…"


def renewal(name: str, path: Path) -> str:
    """Return how to name a file with other content: of a certificate what tells it from another. Blocks for a file."""
    text = f"{name} {path}"
    if name == "tls_certificate_file":
        with suppress(OSError, ValueError):  # OpenSSL has read it, but may be less strict
            text += f": {described(path)}"
    return text


def contents(config: Config) -> dict[str, bytes]:
    """Return a digest of each file in FOLLOWED that is configured, by key. Blocks for some small files."""
    found: dict[str, bytes] = {}
    for name in FOLLOWED:
        path: Path | None = KEYS[name].value_in(config)
        if path is not None:
            found[name] = digest_of(path)
    return found


def digest_of(path: Path) -> bytes:
    """Return a digest of a file; empty if it can't be read."""
    try:
        return blake2b(path.read_bytes(), digest_size=16).digest()
    except OSError:
        return b""


def replaced(before: Config, after: Config, old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[str]:
    """Return the keys that name the same file as before, whose content is another one."""
    return [
        name
        for name, digest in new.items()
        if KEYS[name].value_in(before) == KEYS[name].value_in(after) and old.get(name, digest) != digest
    ]
