"""The messages of the push protocol as JSON values: read without trust, written for the other side. Pure.

    POST /internal/eviction   {"worker_id":"a","evicted_hashes":["5f30…"]}                        as the report has it
                              … "stored":[…], "hash_scheme":…, "incarnation":…, "seq":7, "model":…           and ours
    POST /internal/sync       {"worker_id":"a","active_hashes":["5f30…"]}                 all that it holds, in one
                              … "count":9, "digest":"16 hex digits"                       are we equal?
                              … "certain":false                                           but I missed some of my engine
                              … "sums":"base64 of 1024 numbers of 64 bits"                where not?
                              … "buckets":{"17":[…]}                                      what is there
    the answer, always        {"status":"ok" or "old", "resync":true, "want":null, "sums" or [17, …]}

A hash is written as its scheme has it: `prefix_hash` (the default) 64 hex digits, `fingerprint:MARK` a number. Where
something is held, an item is a hash alone or [hash, tokens, tier, parent], of which the last may be missing.

Rules: what is not of this shape raises BadRequest, which says where; an unknown scheme raises UnknownScheme (422), or
every hash of it would wipe out what is known. Members that are not known are passed over.
Bounds: hashes in one message; texts. Cost: 2 us for a hash, so that large bodies are read in a thread.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ranvier_py.core.engine_cache.sources.event_values import HELD_TIERS
from ranvier_py.core.engine_cache.sources.push_state import Word, by_bucket
from ranvier_py.core.engine_cache.sources.push_table import BUCKETS, Entry
from ranvier_py.core.errors import BadRequest, RequestError

PREFIX_HASH = "prefix_hash"
FINGERPRINT = "fingerprint:"  # and the mark of the scheme: see `core.recording.scheme_mark`

EVICTED_MAX = 200_000
"""Hashes of one report: a cache that is cleared at once comes as a snapshot."""

ACTIVE_MAX = 1_000_000
NAME_CHARACTERS_MAX = 300  # of a worker (a URL may be its name), a model, an incarnation
SEQ_MAX = 1 << 53
TOKENS_MAX = 1 << 31


class UnknownScheme(RequestError):
    """These hashes mean nothing here. `known` are those that do."""

    status, code = 422, "unknown_hash_scheme"


class Eviction(NamedTuple):
    worker: str
    word: Word
    evicted: Sequence[int]
    stored: Sequence[Entry]


class Sync(NamedTuple):
    """Exactly one of `active`, `digest`, `sums` and `buckets` is not None; `hashes` and
    `certain` (nothing of the engine was missed) come with a digest. What is held
    comes by bucket, and there by hash; `active` has all buckets."""

    worker: str
    word: Word
    active: Mapping[int, Mapping[int, Entry]] | None = None
    hashes: int = 0
    certain: bool = True
    digest: int | None = None
    sums: Sequence[int] | None = None
    buckets: Mapping[int, Mapping[int, Entry]] | None = None


# --- reading --------------------------------------------------------------------------------------------------------


def read_eviction(body: Mapping[str, Any], fingerprints: str) -> Eviction:
    """`fingerprints` is the mark of this node's fingerprints. Raises BadRequest, UnknownScheme."""
    worker, word = read_head(body, fingerprints)
    hashes = list_of(body, "evicted_hashes", EVICTED_MAX)
    stored = list_of(body, "stored", EVICTED_MAX) if "stored" in body else ()
    read = READERS[word.scheme.partition(":")[0]]
    return Eviction(
        worker,
        word,
        [read(value, "evicted_hashes") for value in hashes],
        [entry_of(value, read, "stored") for value in stored],
    )


def read_sync(body: Mapping[str, Any], fingerprints: str) -> Sync:
    """The same for a sync."""
    worker, word = read_head(body, fingerprints)
    read = READERS[word.scheme.partition(":")[0]]
    forms = [name for name in ("active_hashes", "digest", "sums", "buckets") if name in body]
    if len(forms) != 1:
        raise BadRequest("a sync has exactly one of active_hashes, digest, sums and buckets")
    if forms == ["active_hashes"]:
        items = list_of(body, "active_hashes", ACTIVE_MAX)
        entries = (entry_of(value, read, "active_hashes") for value in items)
        return Sync(worker, word, by_bucket(entries, range(BUCKETS)))
    if not word.incarnation:
        raise BadRequest(f"a sync by {forms[0]} needs an incarnation and a seq")
    if forms == ["digest"]:
        count = number_of(body.get("count"), "count", ACTIVE_MAX * 1000)
        certain = body.get("certain", True)
        if not isinstance(certain, bool):
            raise BadRequest("certain must be true or false")
        return Sync(worker, word, hashes=count, certain=certain, digest=hex_of(body["digest"], "digest", 16))
    if forms == ["sums"]:
        return Sync(worker, word, sums=read_sums(body["sums"]))
    buckets = body["buckets"]
    if not isinstance(buckets, dict) or len(buckets) > BUCKETS:
        raise BadRequest("buckets must be an object of buckets")
    held = list(bucket_items(buckets, read))
    entries = (entry for _, entries in held for entry in entries)
    return Sync(worker, word, buckets=by_bucket(entries, [place for place, _ in held]))


def read_head(body: Mapping[str, Any], fingerprints: str) -> tuple[str, Word]:
    """Who speaks, in which scheme, at which number; the model that the hashes are of, if that is said."""
    worker = text_of(body, "worker_id")
    scheme = text_of(body, "hash_scheme", PREFIX_HASH)
    if scheme not in (PREFIX_HASH, FINGERPRINT + fingerprints):
        raise UnknownScheme(f"hash_scheme: this node knows {PREFIX_HASH} and {FINGERPRINT}{fingerprints}")
    incarnation = text_of(body, "incarnation", "")
    if not incarnation and "seq" in body:
        raise BadRequest("a seq needs an incarnation: without, a restart looks like a repetition")
    seq = number_of(body.get("seq"), "seq", SEQ_MAX) if incarnation else 0
    return worker, Word(scheme, incarnation, seq, text_of(body, "model", ""))


def bucket_items(buckets: Mapping[str, Any], read: Any) -> Iterable[tuple[int, Sequence[Entry]]]:
    left = ACTIVE_MAX
    for name, items in buckets.items():
        place = int(name) if name.isascii() and name.isdigit() and len(name) < 6 else BUCKETS
        if place >= BUCKETS or not isinstance(items, list):
            raise BadRequest(f"buckets: lists under the numbers 0 to {BUCKETS - 1}")
        left -= len(items)
        if left < 0:
            raise BadRequest(f"buckets: at most {ACTIVE_MAX} hashes")
        yield place, [entry_of(value, read, "buckets") for value in items]


def text_of(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str) or len(value) > NAME_CHARACTERS_MAX or (default is None and not value):
        raise BadRequest(f"{name} must be a text of 1 to {NAME_CHARACTERS_MAX} characters")
    return value


def list_of(body: Mapping[str, Any], name: str, most: int) -> Sequence[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        raise BadRequest(f"{name} must be a list" if name in body else f"{name} is missing")
    if len(value) > most:
        raise BadRequest(f"{name}: at most {most} hashes")
    return value


def number_of(value: object, name: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise BadRequest(f"{name} must be a whole number from 0 to {most}")
    return value


def hex_of(value: object, name: str, digits: int) -> int:
    if type(value) is str and len(value) == digits and not value.strip("0123456789abcdefABCDEF"):
        return int(value, 16)
    raise BadRequest(f"{name}: a hash is {digits} hexadecimal digits here")


def read_prefix_hash(value: object, name: str) -> int:
    return hex_of(value, name, 64)


def read_fingerprint(value: object, name: str) -> int:
    if type(value) is not int or not 0 < value < 1 << 64:
        raise BadRequest(f"{name}: a fingerprint is a number of 64 bits, and not 0")
    return value


READERS = {PREFIX_HASH: read_prefix_hash, FINGERPRINT[:-1]: read_fingerprint}


def entry_of(value: object, read: Any, name: str) -> Entry:
    if type(value) is not list:
        return Entry(read(value, name))
    if not 1 <= len(value) <= 4:
        raise BadRequest(f"{name}: an item is a hash or [hash, tokens, tier, parent]")
    tokens = number_of(value[1], f"{name}: tokens", TOKENS_MAX) if len(value) > 1 else 0
    tier = HELD_TIERS[number_of(value[2], f"{name}: tier", len(HELD_TIERS) - 1)] if len(value) > 2 else HELD_TIERS[0]
    parent = read(value[3], name) if len(value) > 3 and value[3] else 0
    return Entry(read(value[0], name), tokens, tier, parent)


def read_sums(value: object) -> list[int]:
    try:
        data = b64decode(value, validate=True) if type(value) is str else b""
    except ValueError as error:
        raise BadRequest("sums must be base64") from error
    if len(data) != 8 * BUCKETS:
        raise BadRequest(f"sums must be {BUCKETS} numbers of 64 bits")
    found: list[int] = np.frombuffer(data, dtype="<u8").tolist()
    return found


# --- writing --------------------------------------------------------------------------------------------------------


def written_hash(scheme: str, key: int) -> str | int:
    return f"{key:064x}" if scheme == PREFIX_HASH else key


def written_entry(scheme: str, entry: Entry) -> Any:
    """As short as it can be said."""
    name = written_hash(scheme, entry.key)
    if entry.parent:
        return [name, entry.tokens, int(entry.tier), written_hash(scheme, entry.parent)]
    if entry.tier:
        return [name, entry.tokens, int(entry.tier)]
    return [name, entry.tokens] if entry.tokens else name


def written_sums(sums: Sequence[int]) -> str:
    return b64encode(np.array(sums, dtype="<u8").tobytes()).decode()
