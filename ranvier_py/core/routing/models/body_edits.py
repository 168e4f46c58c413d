"""What of a body is changed for the model that serves: its name, the length of an answer, members that the body lacks.

Rule: each is one splice, and all other bytes stay as they came. A cap holds for each spelling of the length that the
API has, and for a body that names none; what cannot be read as a number below it becomes the cap. Of bodies too large
to be walked only the ends are searched (`outer_values`): a length that stands elsewhere is not capped, and no default
is put beside a member.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import orjson

from ranvier_py.core.prompts.body_json import Splice
from ranvier_py.core.prompts.outer_values import OuterValues, Scalar
from ranvier_py.core.routing.models.model_rules import Served
from ranvier_py.core.routing.request_paths import CHAT_PATH, COMPLETION_PATH, MESSAGES_PATH, RESPONSES_PATH

LENGTHS: Mapping[bytes, Sequence[str]] = {
    CHAT_PATH: ("max_tokens", "max_completion_tokens"),
    COMPLETION_PATH: ("max_tokens",),
    MESSAGES_PATH: ("max_tokens",),
    RESPONSES_PATH: ("max_output_tokens",),
}
"""How each API that generates spells the longest answer, the usual name first."""

ALL_LENGTHS = frozenset(name for names in LENGTHS.values() for name in names)
COMPLETION_TOKENS = 16  # of a completion that names no length, by OpenAI's API and the engines'


def body_splices(
    path: bytes, values: OuterValues, model: Scalar, served: Served
) -> Generator[None, None, Sequence[Splice]]:
    """Return the changes of a body whose outermost `model` is this one. Yields after each portion of work."""
    found: list[Splice] = []
    if served.model != model.value:
        found.append((model.start, model.end, orjson.dumps(served.model)))
    names, cap, defaults = LENGTHS.get(path), served.max_tokens, dict(served.defaults)
    if names is None or not (cap or defaults):
        return found
    wanted = next((defaults[name] for name in (*names, *ALL_LENGTHS) if name in defaults), None)
    found += yield from length_splices(path, values, names, cap, wanted)
    added = []
    for name, value in defaults.items():
        if name not in ALL_LENGTHS and not (yield from values.has(name)):
            added.append(b"%b:%b," % (dumped(name), dumped(value)))
    if added:
        # first, so that of a member that was overlooked the client's own, which comes later, counts
        place = values.body.find(b"{") + 1
        found.append((place, place, b"".join(added)))
    return found


def length_splices(
    path: bytes, values: OuterValues, names: Sequence[str], cap: int | None, wanted: object
) -> Generator[None, None, Sequence[Splice]]:
    """Return what keeps the length of an answer within `cap`; `wanted` is what a body gets that names none."""
    body, given, found = values.body, list[Scalar](), list[Splice]()
    for name in names:
        each = yield from values.find(name)
        given += [each] if each is not None and each.value is not None else []
    if cap is not None:
        found += [
            (each.start, each.end, b"%d" % cap) for each in given if type(each.value) is not int or each.value > cap
        ]
        if wanted is None and not (path == COMPLETION_PATH and cap >= COMPLETION_TOKENS):
            wanted = cap
        elif isinstance(wanted, int):
            wanted = min(wanted, cap)
    end = len(body.rstrip()) - 1
    if wanted is not None and not given and body[end : end + 1] == b"}":
        found.append((end, end, b',"%b":%b' % (names[0].encode(), dumped(wanted))))  # last, so that it counts
    return found


def dumped(value: object) -> bytes:
    return orjson.dumps(value)
