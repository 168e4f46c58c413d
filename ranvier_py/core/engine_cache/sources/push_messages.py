"""Reads the messages of reporters, JSON values, without trusting them. Pure.

    POST /internal/eviction   {"worker_id":"a","evicted_hashes":["5f30…"]}    of 64 hexadecimal digits; "model" may be
    POST /internal/sync       {"worker_id":"a","active_hashes":["5f30…"]}     added. As the Purdue report has them
    POST /internal/events     an EventReport

Rule: a body of another form raises BadRequest, which says where; unknown members are ignored. Bounds: hashes, messages
and bytes; `check_structure` counts what a body would build before it is parsed; large bodies are read in a thread.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ranvier_py.core.engine_cache.sources.event_frames import PAYLOAD_BYTES_MAX
from ranvier_py.core.engine_cache.sources.publishers import RANKS_MAX
from ranvier_py.core.errors import BadRequest
from ranvier_py.core.prompts.body_json import bytes_in

EVICTED_MAX = 200_000
"""Hashes of one report: if a whole cache is cleared, a sync reports it."""

ACTIVE_MAX = 1_000_000
NAME_CHARACTERS_MAX = 300  # of a worker (which may be a URL), or of a model
HASH_DIGITS = 64
MESSAGES_MAX = 1_000  # fewer than a GapMachine recognises if they are repeated
NUMBER_MAX = (1 << 63) - 1
OTHER_MARKS_MAX = 1_000
"""Brackets, commas and colons of the rest of a body: names, which may be URLs, and members that are not known."""


class PrefixReport(NamedTuple):
    """Prefix hashes of one worker: those that it evicted, or all that it holds."""

    worker: str
    model: str
    hashes: Mapping[int, None]


Messages = Sequence[tuple[int, bytes]]
"""Sequence number and payload of each message, as the engine published them."""


class EventReport(NamedTuple):
    """Event batches of one data-parallel rank. `ranks` are all ranks of its engine; `ask` 0: nothing is replayed.

        {"worker_id":"a","rank":0,"ranks":[0,1],"connected":true,"begins":false,"messages":[[17,"base64"],…],"next":18,
         "ask":4,"replayed":[[3,"base64"],…],"ended":true}

    The answer has "replay":{"ask":4,"first":3} if the router lacks messages; `replayed` answers it, completely once it
    has `ended`. `connected`: the engine's events are being received. `begins`: a reporter's first report, which the
    router then asks for what it lacks. `next`: the number after all messages reported so far.
    """

    worker: str
    model: str
    rank: int
    ranks: tuple[int, ...]
    connected: bool
    begins: bool
    messages: Messages
    next: int
    ask: int
    replayed: Messages
    ended: bool


class Structure(NamedTuple):
    """How many lists and objects a body may have, and how many elements: so many, or one in so many bytes."""

    containers: int
    elements: int
    bytes_each: int = 0


PREFIXES = Structure(OTHER_MARKS_MAX, OTHER_MARKS_MAX, HASH_DIGITS)
EVENTS = Structure(2 * MESSAGES_MAX + OTHER_MARKS_MAX, 4 * MESSAGES_MAX + OTHER_MARKS_MAX)


def check_structure(data: bytes, most: Structure) -> None:
    """Raise BadRequest for a body with too many parts, without parsing it: neither hashes nor base64 have marks."""
    elements = most.elements + (len(data) // most.bytes_each if most.bytes_each else 0)
    is_too_much = bytes_in(data, b"[{") > most.containers or bytes_in(data, b":") > OTHER_MARKS_MAX
    if is_too_much or bytes_in(data, b",") > elements:
        raise BadRequest("the body has too many lists, members or elements")


def read_eviction(body: Mapping[str, Any]) -> PrefixReport:
    """Read an eviction report. Raises BadRequest."""
    return _prefixes(body, "evicted_hashes", EVICTED_MAX)


def read_sync(body: Mapping[str, Any]) -> PrefixReport:
    """Read a sync. Raises BadRequest."""
    return _prefixes(body, "active_hashes", ACTIVE_MAX)


def read_events(body: Mapping[str, Any]) -> EventReport:
    """Read a report of events. Raises BadRequest."""
    rank = _number(body.get("rank", 0), "rank", NUMBER_MAX)
    ranks = tuple(_number(each, "ranks", NUMBER_MAX) for each in _list(body, "ranks", RANKS_MAX, [rank]))
    if rank not in ranks:
        raise BadRequest("rank must be one of ranks")
    return EventReport(
        worker=_text(body, "worker_id"),
        model=_text(body, "model", ""),
        rank=rank,
        ranks=ranks,
        connected=body.get("connected", True) is True,
        begins=body.get("begins", False) is True,
        messages=_messages(body, "messages"),
        next=_number(body.get("next", 0), "next", NUMBER_MAX),
        ask=_number(body.get("ask", 0), "ask", NUMBER_MAX),
        replayed=_messages(body, "replayed"),
        ended=body.get("ended", False) is True,
    )


def hash_in(value: object, name: str) -> int:
    """Read a prefix hash. Raises BadRequest."""
    if type(value) is str and len(value) == HASH_DIGITS and not value.strip("0123456789abcdefABCDEF"):
        return int(value, 16)
    raise BadRequest(f"{name}: a prefix hash is {HASH_DIGITS} hexadecimal digits")


def _prefixes(body: Mapping[str, Any], name: str, most: int) -> PrefixReport:
    worker, model = _text(body, "worker_id"), _text(body, "model", "")
    return PrefixReport(worker, model, {hash_in(value, name): None for value in _list(body, name, most)})


def _messages(body: Mapping[str, Any], name: str) -> Messages:
    found = []
    for item in _list(body, name, MESSAGES_MAX, []):
        if type(item) is not list or len(item) != 2 or type(item[1]) is not str:
            raise BadRequest(f"{name}: a message is [number, base64]")
        try:
            payload = b64decode(item[1], validate=True)
        except ValueError as error:
            raise BadRequest(f"{name}: a payload must be base64") from error
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise BadRequest(f"{name}: a payload has at most {PAYLOAD_BYTES_MAX} bytes")
        found.append((_number(item[0], name, NUMBER_MAX), payload))
    return found


def _text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str) or len(value) > NAME_CHARACTERS_MAX or (default is None and not value):
        raise BadRequest(f"{name} must be a text of 1 to {NAME_CHARACTERS_MAX} characters")
    return value


def _list(body: Mapping[str, Any], name: str, most: int, default: object = None) -> Sequence[Any]:
    value = body.get(name, default)
    if not isinstance(value, list):
        raise BadRequest(f"{name} must be a list" if name in body else f"{name} is missing")
    if len(value) > most:
        raise BadRequest(f"{name}: at most {most}")
    return value


def _number(value: object, name: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise BadRequest(f"{name}: whole numbers from 0 to {most}")
    return value
