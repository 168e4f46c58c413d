"""What of a body is changed for the model that serves: its name, the length of an answer, members that the body lacks.

Rule: each is one splice, and all other bytes stay as they came. A cap holds for each spelling of the length that the
API has, and for a body that names none; what cannot be read as a number below it becomes the cap. Bodies that may not
be parsed are searched near their ends alone (`outer_members`): a member that stands elsewhere is not capped, and no
default is put beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import orjson

from ranvier_py.core.prompts.body_json import Splice
from ranvier_py.core.prompts.outer_members import Scalar, has_member, scalar_of
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


def body_splices(path: bytes, body: bytes, model: Scalar, served: Served) -> Sequence[Splice]:
    """Return the changes of a body whose outermost `model` is this one."""
    found: list[Splice] = []
    if served.model != model.value:
        found.append((model.start, model.end, orjson.dumps(served.model)))
    names, cap, defaults = LENGTHS.get(path), served.max_tokens, dict(served.defaults)
    if names is None or not (cap or defaults):
        return found
    wanted = next((defaults[name] for name in (*names, *ALL_LENGTHS) if name in defaults), None)
    defaults = {name: value for name, value in defaults.items() if name not in ALL_LENGTHS}
    found += length_splices(path, body, names, cap, wanted)
    if added := [(name, value) for name, value in defaults.items() if not has_member(body, name)]:
        # first, so that of a member that was overlooked the client's own, which comes later, counts
        place = body.find(b"{") + 1
        found.append((place, place, b"".join(b"%b:%b," % (dumped(name), dumped(value)) for name, value in added)))
    return found


def length_splices(path: bytes, body: bytes, names: Sequence[str], cap: int | None, wanted: object) -> Iterator[Splice]:
    """Yield what keeps the length of an answer within `cap`; `wanted` is what a body gets that names none."""
    given = [each for name in names if (each := scalar_of(body, name)) is not None and each.value is not None]
    if cap is not None:
        for each in given:
            if type(each.value) is not int or each.value > cap:
                yield each.start, each.end, b"%d" % cap
        if wanted is None and not (path == COMPLETION_PATH and cap >= COMPLETION_TOKENS):
            wanted = cap
        elif isinstance(wanted, int):
            wanted = min(wanted, cap)
    end = len(body.rstrip()) - 1
    if wanted is not None and not given and body[end : end + 1] == b"}":
        yield end, end, b',"%b":%b' % (names[0].encode(), dumped(wanted))  # last, so that it counts, whatever was null


def dumped(value: object) -> bytes:
    return orjson.dumps(value)
