"""How many answers a body asks for, and how long ones, wherever it says so: a limit reserves room for all of them.

Rule: the last member of a name in the outermost object counts, by whatever spelling and in whatever encoding engines
take, as an engine reads it. Where that cannot be found out it is taken for the most that it may be: of a body that is
too large to be walked, the greatest number behind such a name anywhere. Pauses after each portion of work.
Bounds: those of `outer_values` and `reserved_members`; CHOICES_MAX.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import orjson

from ranvier_py.core.prompts.body_json import excess
from ranvier_py.core.prompts.outer_values import OuterValues, elements, whole_value
from ranvier_py.core.prompts.reserved_members import (
    NAME_ESCAPE,
    OVERLAP_BYTES,
    SLICE_BYTES,
    contained,
    escaped_name_in,
    slices,
)

CHOICES_MAX = 16_384  # of one prompt: OpenAI's API has 128, engines take far more
SAMPLING = "sampling_params"  # where SGLang's /generate has its numbers: an object, or one for each prompt
CHOICES: Mapping[str, Sequence[str]] = dict.fromkeys(("chat", "completion", "generate"), ("n", "best_of"))
LENGTHS: Mapping[str, Sequence[str]] = {
    "chat": ("max_tokens", "max_completion_tokens"),
    "completion": ("max_tokens",),
    "messages": ("max_tokens",),
    "responses": ("max_output_tokens",),
    "generate": ("max_new_tokens",),
}
PROMPTS: Mapping[str, Sequence[str]] = {"completion": ("prompt",), "generate": ("text", "input_ids")}
"""Members that count answers, and bound them, and those that may be a list of prompts, by how a body is read."""

NAMED = {name.encode(): name for names in (*CHOICES.values(), *LENGTHS.values()) for name in names}
NUMBER = re.compile(rb'"(n|best_of|max_[a-z_]*tokens)"[ \t\r\n]*+:?[ \t\r\n]*+(?:"?([-+0-9.eE]{1,32})|\Z)')
LIST = re.compile(rb'"(prompt|text|input_ids)"[ \t\r\n]*+:[ \t\r\n]*+\[[ \t\r\n]*+(["\[])')


class AskedAnswers(NamedTuple):
    """`choices`: answers to each prompt; `most`: tokens of each of them."""

    prompts: int = 1
    choices: int = 1
    most: float = inf


ONE_ANSWER = AskedAnswers()


def may_ask(body: bytes) -> bool:
    """Whether `asked_answers` may find more than ONE_ANSWER in a body, if no prompt of its API is a list."""
    if len(body) > SLICE_BYTES or b"\0" in body:
        return True
    return b'"max_' in body or b'"n"' in body or b'"best_of"' in body or NAME_ESCAPE.search(body) is not None


def asked_answers(body: bytes, api: str) -> Generator[None, None, AskedAnswers]:
    """Find out what a body asks for that is read as this API. Yields after each portion of work."""
    values = OuterValues(plain(body) if b"\0" in body else body)
    if not values.is_walked:
        return (yield from most_asked(values.body, api))
    prompts = 1
    for name in PROMPTS.get(api, ()):
        place = yield from values.last_place(name)
        prompts = max(prompts, (yield from elements(values.body, place)) if place else 1)
    if api == "generate":
        found = yield from sampling_of(values)
        if found is None:
            return AskedAnswers(prompts, CHOICES_MAX)
        return made(prompts, [one.get(name) for one in found for name in CHOICES[api]], lengths_of(found, api))
    choices, lengths = list[object](), list[object]()
    for names, numbers in ((CHOICES.get(api, ()), choices), (LENGTHS.get(api, ()), lengths)):
        for name in names:
            scalar = yield from values.last(name)
            numbers.append(scalar.value if scalar is not None else None)
    return made(prompts, choices, lengths)


def lengths_of(found: Iterable[Mapping[str, Any]], api: str) -> Sequence[object]:
    return [one.get(name) for one in found for name in LENGTHS[api]]


def made(prompts: int, choices: Iterable[object], lengths: Iterable[object]) -> AskedAnswers:
    number = max([1, *map(number_of, choices)])
    given = [length for length in map(number_of, lengths) if length > 0]
    return AskedAnswers(max(prompts, 1), int(min(number, CHOICES_MAX)), max(given, default=inf))


def number_of(value: object) -> float:
    """Return a number as engines take it: texts, too; 0 for what is none."""
    try:
        number = float(value) if isinstance(value, int | float | str | bytes) else 0.0
    except (ValueError, OverflowError):
        return 0.0
    return number if number == number else 0.0  # noqa: PLR0124  # not NaN


def sampling_of(values: OuterValues) -> Generator[None, None, Sequence[Mapping[str, Any]] | None]:
    """Return the objects in which SGLang's /generate has its numbers; None if they are too many to be parsed."""
    place = yield from values.last_place(SAMPLING)
    if not place:
        return ()
    text = yield from whole_value(values.body, place)
    if excess(text):
        return None
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return ()
    return [one for one in contained(found) if type(one) is dict]


def most_asked(body: bytes, api: str) -> Generator[None, None, AskedAnswers]:
    """Return the most that a body may ask for which is not walked: by all its numbers, and as prompts all its texts or
    lists, if a prompt may be a list of these."""
    choices, lengths, kinds = list[object](), list[object](), dict[bytes, None]()
    texts, lists, is_unsure = 0, 0, False
    for piece in slices(body, SLICE_BYTES // 4):  # each may have tens of thousands of numbers
        for found in NUMBER.finditer(piece):
            name, number = found[1].decode(), found[2]
            if name in CHOICES.get(api, ()):
                choices.append(number)
            elif name in LENGTHS[api]:
                lengths.append(number)
            # what stands that far behind its name may not be whole in the next slice
            is_unsure = is_unsure or (number is None and found.end() - found.start() > OVERLAP_BYTES // 2)
        is_unsure = is_unsure or bool(escaped_name_in(piece, NAMED))
        if api in PROMPTS:
            texts, lists = texts + piece.count(b'"') // 2, lists + piece.count(b"[")
            kinds.update((found[2], None) for found in LIST.finditer(piece) if found[1].decode() in PROMPTS[api])
        yield
    prompts = max([1, *[texts if kind == b'"' else lists for kind in kinds]])
    return AskedAnswers(prompts, CHOICES_MAX) if is_unsure else made(prompts, choices, lengths)


def plain(body: bytes) -> bytes:
    """Return a body in UTF-8 that is in UTF-16 or UTF-32, which Python's parser takes as well."""
    try:
        return body.decode(json.detect_encoding(body)).encode()
    except UnicodeError:
        return body
