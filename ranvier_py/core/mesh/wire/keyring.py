"""The cluster's keys: text of a key file -> KeyRing. To rotate them: docs/cluster.md.

Rule: a line has one key of 32 bytes, as 64 hexadecimal digits or as base64. The first key is the primary, which seals;
all keys open. `id:key` gives a key its number (1 to 255) in packets; without it the number is made from the key
itself, so that a key keeps its number when lines move. Empty lines and lines that start with # do not count. At no
time is anything unsealed accepted. No key is ever part of an error, of a repr or of a log. Bound: KEYS_MAX.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from hashlib import blake2b

from ranvier_py.core.errors import ConfigError

KEYS_MAX = 4  # the old and the new one, and two more for a rotation that was not finished
KEY_BYTES = 32
INSECURE_KEY_ID = 0


class KeyRing:
    """At most KEYS_MAX keys by number. Immutable; `Sealer.rekey` replaces it by a new ring."""

    __slots__ = ("keys", "primary")

    def __init__(self, keys: Mapping[int, bytes], primary: int) -> None:
        assert 0 < len(keys) <= KEYS_MAX
        assert all(0 <= number <= 255 and len(key) == KEY_BYTES for number, key in keys.items())
        assert primary in keys
        self.keys: Mapping[int, bytes] = dict(keys)
        self.primary = primary

    @property
    def insecure(self) -> bool:
        """Whether anybody can seal and open: there is no secret."""
        return self.primary == INSECURE_KEY_ID

    def __repr__(self) -> str:
        return f"KeyRing(ids={list(self.keys)}, primary={self.primary})"


def insecure_ring() -> KeyRing:
    """Return the ring of a cluster that is configured to do without a key."""
    return KeyRing({INSECURE_KEY_ID: bytes(KEY_BYTES)}, INSECURE_KEY_ID)


def parse_key_ring(text: str) -> KeyRing:
    """Return the ring of a key file. Raises ConfigError with one line for each problem, without the keys."""
    keys: dict[int, bytes] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        written = line.strip()
        if not written or written.startswith("#"):
            continue
        key_id, key, problem = parse_line(written)
        if not problem and key in keys.values():
            problem = "is the same key as one above"
        elif not problem and key_id in keys:
            problem = f"has the key id {key_id}, as one above: write other ids in front of the keys, as in 7:key"
        elif not problem and len(keys) == KEYS_MAX:
            problem = f"is one key too many: at most {KEYS_MAX}"
        if problem:
            problems.append(f"cluster key file: line {number} {problem}")
        else:
            keys[key_id] = key
    if not keys and not problems:
        problems.append("cluster key file: there is no key in it")
    if problems:
        raise ConfigError(problems)
    return KeyRing(keys, next(iter(keys)))


def parse_line(written: str) -> tuple[int, bytes, str]:
    """Return (key id, key, problem) of a line that is not empty; `problem` is empty for a good one."""
    prefix, colon, rest = written.partition(":")
    key = key_of(rest.strip() if colon else written)
    if key is None:
        return 0, b"", "must be 32 bytes as 64 hexadecimal digits or as base64, with or without `id:` before them"
    if len(frozenset(key)) == 1:
        return 0, b"", "is no secret: all of its bytes are the same"
    if not colon:
        return id_of(key), key, ""
    if not (prefix.isascii() and prefix.isdigit() and len(prefix) <= 3 and 0 < int(prefix) <= 255):
        return 0, b"", "must have a number from 1 to 255 before the colon"
    return int(prefix), key, ""


def key_of(written: str) -> bytes | None:
    """Return the 32 bytes, or None. Base64 may be standard or URL-safe, with or without the = at the end."""
    if len(written) not in (43, 44, 2 * KEY_BYTES):
        return None
    standard = written.replace("-", "+").replace("_", "/").ljust(44, "=")
    try:
        key = bytes.fromhex(written) if len(written) == 2 * KEY_BYTES else b64decode(standard, validate=True)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None  # `fromhex` passes over blanks


def id_of(key: bytes) -> int:
    """Return 1 to 255, always the same for one key. It reveals 8 bits of a hash of 256 secret ones: nothing of use."""
    return 1 + blake2b(key, digest_size=8, person=b"ranvier key id").digest()[0] % 255
