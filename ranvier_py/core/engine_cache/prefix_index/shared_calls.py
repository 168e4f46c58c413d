"""What a router and the scripts of the shared index say to each other: calls with their arguments, replies, answers.

A call names a script and has texts as arguments; lists travel as JSON in one of them. A reply is what a Redis client
makes of it: lists of bytes and whole numbers. Rule: a reply is believed in no part before it was looked at; whatever is
not as it should be raises BadReply, or, in an answer about one backend, is left out and counted.
Cost: about 1.5 us for a write, 1 us for each backend in an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import orjson

from ranvier_py.core.engine_cache.prefix_index.prefix_index import TOKENS_MAX, Storage

TOMBSTONE_S = 30.0
"""How long a removal is remembered: claims wait for milliseconds, those of a stuck router until it is called lost."""

GENERATION_MAX = 10**15

HOT, WARM, COOL, REMOVED, VOID = "h", "w", "c", "x", "v"
"""Verbs of a write. COOL: warm, if it is there; VOID: what was said of this backend before counts no more."""

VERB_OF = {Storage.HOT: HOT, Storage.WARM: WARM}
STORAGE_OF = {HOT: Storage.HOT, WARM: Storage.WARM}

ENTRY = re.compile(rb"(\d{1,10}) ([hw]) (\d{1,16}) (\d{1,16})\Z")


class BadReply(ValueError):
    """What came is no reply to what was asked."""


class Write(NamedTuple):
    """One thing to say. `tokens` -1: as many as are known. `left_s`: until the entry ends."""

    prefix: str
    backend: str
    sequence: int
    verb: str
    tokens: int
    left_s: float


class Call(NamedTuple):
    """A script and its arguments."""

    script: str
    arguments: tuple[str | bytes, ...]


class State(NamedTuple):
    """What each reply begins with. `cleared`, `now`: microseconds of Redis's clock; 0 where there was no clear."""

    generation: int
    cleared: int
    now: int


class Said(NamedTuple):
    """What Redis has of one prefix at one backend: the sequence and the end are in microseconds of its clock."""

    backend: str
    tokens: int
    storage: Storage
    sequence: int
    ends: int


def hello(believed: int, clear: bool) -> Call:
    """`believed`: the generation that was current when this router lost touch; 0 where it never had any."""
    return Call("hello", (str(believed), "1" if clear else "0"))


def write(generation: int, entries_max: int, ttl_s: float, writes: Iterable[Write]) -> Call:
    kept_ms, ttl_ms = round(1000 * min(TOMBSTONE_S, ttl_s)), round(1000 * ttl_s)
    items = [
        (one.prefix, one.backend, one.sequence, one.verb, one.tokens, max(1, round(1000 * one.left_s)))
        for one in writes
    ]
    return Call("write", (str(generation), str(entries_max), str(kept_ms), str(ttl_ms), orjson.dumps(items)))


def ask(generation: int, prefixes: Sequence[str]) -> Call:
    return Call("ask", (str(generation), orjson.dumps(prefixes)))


def tick(generation: int) -> Call:
    return Call("tick", (str(generation),))


def state_of(reply: object) -> State:
    """Raises BadReply."""
    if not isinstance(reply, list) or not reply or not isinstance(reply[0], list):
        raise BadReply("no list")
    numbers = [whole(item) for item in reply[0]]
    if len(numbers) != 3:
        raise BadReply("no state")
    state = State(*numbers)
    if state.generation > GENERATION_MAX or state.now <= 0:
        raise BadReply("no generation")
    return state


def counts_of(reply: object, number: int) -> list[int]:
    """The counts that follow the state. Raises BadReply."""
    if not isinstance(reply, list) or len(reply) < 2 or not isinstance(reply[1], list) or len(reply[1]) != number:
        raise BadReply("no counts")
    return [whole(item) for item in reply[1]]


def answers_of(reply: object, questions: int) -> tuple[list[list[Said]], int]:
    """What is said of each prefix that was asked for, and how much could not be read. Raises BadReply."""
    if not isinstance(reply, list) or len(reply) != 3 or not isinstance(reply[2], list) or len(reply[2]) != questions:
        raise BadReply("no answers")
    bad, found = 0, []
    for answer in reply[2]:
        if not isinstance(answer, list):
            raise BadReply("no answer")
        read = [said_of(name, text) for name, text in zip(answer[::2], answer[1::2], strict=False)]
        found.append([one for one in read if one is not None])
        bad += sum(one is None for one in read)
    return found, bad


def said_of(name: object, text: object) -> Said | None:
    """One backend of an answer; None for what can't be read."""
    if not isinstance(name, bytes) or not isinstance(text, bytes):
        return None
    found = ENTRY.match(text)
    if found is None:
        return None
    tokens, tier, sequence, ends_ms = found.groups()
    if int(tokens) > TOKENS_MAX:
        return None
    storage = STORAGE_OF[tier.decode()]
    return Said(name.decode(errors="replace"), int(tokens), storage, int(sequence), 1000 * int(ends_ms))


def voids_of(reply: object) -> dict[str, int]:
    """The last void of each backend. Raises BadReply."""
    if not isinstance(reply, list) or len(reply) != 3 or not isinstance(reply[2], list):
        raise BadReply("no voids")
    names, numbers = reply[2][::2], reply[2][1::2]
    pairs = zip(names, numbers, strict=False)
    return {name.decode(errors="replace"): whole(number) for name, number in pairs if isinstance(name, bytes)}


def whole(item: object) -> int:
    """Raises BadReply."""
    if type(item) is int and item >= 0:
        return item
    if isinstance(item, bytes) and len(item) <= 20 and item.isdigit():
        return int(item)
    raise BadReply("no number")
