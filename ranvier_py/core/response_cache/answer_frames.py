"""Encodes a stored answer as bytes, for stores beyond this process.

    1 version | 16 BLAKE2b of key and rest | msgpack [api, model, tenant, content type, body, counts, whether a stream,
                                                      age in seconds, prompt tokens, output tokens]

The age at the time of writing replaces `stored_at`, which only this process's clock can read. Bytes are not trusted:
what is cut, changed, of another key, of another version, too large or too much to be parsed is no answer.
"""

from __future__ import annotations

from hashlib import blake2b
from math import isfinite

import msgpack  # type: ignore[import-untyped]

from ranvier_py.core.prompts.body_json import excess
from ranvier_py.core.response_cache.cache_keys import APIS
from ranvier_py.core.response_cache.stored_answers import CONTENT_TYPES, COUNTS_BYTES_MAX, StoredAnswer

VERSION = b"\x01"
DIGEST_BYTES = 16
HEAD_BYTES = len(VERSION) + DIGEST_BYTES
FIELDS = 10
TOKENS_MAX = 1 << 53
KINDS = (str, str, bytes, bytes, bytes, bytes, bool, float, int, int)


def encoded(key: bytes, answer: StoredAnswer, now: float) -> bytes:
    """Encode the answer to the question with this key; `now` is read from the clock of `stored_at`."""
    age_s = max(0.0, now - answer.stored_at)
    named = (answer.api, answer.model, answer.tenant, answer.content_type)
    tokens = (min(each, TOKENS_MAX) for each in answer.tokens)
    fields = (*named, answer.body, answer.counts, answer.stream, age_s, *tokens)
    payload: bytes = msgpack.packb(fields, unicode_errors="surrogatepass")
    return VERSION + digest_of(key, payload) + payload


def decoded(key: bytes, data: bytes, now: float, bytes_max: int) -> StoredAnswer | None:
    """Decode what `encoded` made for this key, as if stored its age before `now`; None for all else, or too large."""
    if not HEAD_BYTES < len(data) <= bytes_max or data[:1] != VERSION:
        return None
    payload = data[HEAD_BYTES:]
    if data[1:HEAD_BYTES] != digest_of(key, payload):
        return None
    try:
        fields = msgpack.unpackb(
            payload, max_array_len=FIELDS, max_map_len=0, max_ext_len=0, unicode_errors="surrogatepass"
        )
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    if type(fields) is not list or tuple(map(type, fields)) != KINDS:
        return None
    api, model, tenant, content_type, body, counts, stream, age_s, *tokens = fields
    is_sound = isfinite(age_s) and age_s >= 0 and all(0 <= each <= TOKENS_MAX for each in tokens)
    if not is_sound or api not in APIS.values() or not is_content_type(content_type, stream=stream):
        return None
    if len(counts) > COUNTS_BYTES_MAX or (not stream and excess(body)):
        return None
    return StoredAnswer(
        api=api,
        model=model,
        tenant=tenant,
        content_type=content_type,
        body=body,
        counts=counts,
        stream=stream,
        stored_at=now - age_s,
        tokens=(tokens[0], tokens[1]),
    )


def is_content_type(found: bytes, *, stream: bool) -> bool:
    """Whether it is a content type of this kind of answer, and has no second header line."""
    return found.startswith(CONTENT_TYPES[stream]) and b"\r" not in found and b"\n" not in found


def digest_of(key: bytes, payload: bytes) -> bytes:
    return blake2b(len(key).to_bytes(2, "little") + key + payload, digest_size=DIGEST_BYTES).digest()
