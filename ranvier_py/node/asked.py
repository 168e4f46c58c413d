"""A request to the control port, as the parts that answer it read it, and the answer.

Bounds: an order's body has ORDER_BYTES_MAX, so that building its objects and naming its errors holds up no request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from ranvier_py.core.errors import BadRequest, BodyTooLarge

NOT_REFUSED: Mapping[str, str] = MappingProxyType({})
NAME_SHOWN = 64  # characters of an unknown name that are shown: enough to see the typing error
ORDER_BYTES_MAX = 64 * 1024  # every order has a few short members
MEMBERS_MAX = 32  # each unknown one is looked up among the known

LISTED = 50  # routes or decisions in an answer unless `limit` is given: a screen
VERBOSE = "verbose"  # in the query of /readyz: asks for the verdict, too, which takes a key
PLAIN = "text/plain; charset=utf-8"


class ControlAnswer(NamedTuple):
    """An answer that is more than a JSON value with status 200; `kind`: the content type of bytes, a text or an
    iterator of pieces. `fields`: further ones of its head."""

    content: Any
    status: int = 200
    kind: str = ""
    fields: Mapping[str, str] = {}


class Asked(NamedTuple):
    """One request: what stands in its path at the places that a route names, its query, its fields, and its body.

    `worker`: the one whose own credential it has, instead of a key of the port. `caller`: id of its key, for the log.
    `role`: what it may do.
    """

    path: Mapping[str, str]
    query: Mapping[str, str]
    headers: Sequence[tuple[str, str]]
    body: Callable[[], Awaitable[bytes]]
    worker: str | None = None
    caller: str = "-"
    role: str = ""

    def field(self, name: str) -> str:
        """Return the value of one of its fields; "" without one."""
        return next((value for each, value in self.headers if each.lower() == name), "")

    def bearer(self) -> str:
        """Return its key; "" without one."""
        return bearer_of(self.field("authorization"))

    def fields(self) -> Sequence[tuple[bytes, bytes]]:
        """Return the fields of a request to be explained, without the one that holds this port's key."""
        lines = ((name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in self.headers)
        return [(name, value) for name, value in lines if name.lower() != b"authorization"]

    async def json(
        self, *members: str, others: bool = False, refused: Mapping[str, str] = NOT_REFUSED
    ) -> Mapping[str, Any]:
        """Return the request's JSON object. Raises BadRequest for other members than these; `others`: the caller
        checks; `refused`: why of those that are known elsewhere. Raises BodyTooLarge before it builds anything."""
        expected = "a JSON object with " + ", ".join(members)
        data = await self.body()
        if len(data) > ORDER_BYTES_MAX:
            raise BodyTooLarge(f"the body has more than {ORDER_BYTES_MAX} bytes, expected {expected}")
        body = object_of(data, expected)
        if len(body) > MEMBERS_MAX:
            raise BadRequest(f"the body has more than {MEMBERS_MAX} members, expected {expected}")
        for name in body:
            if name not in members and not others:
                why = refused.get(name) or f"there is no such member, expected {expected}"
                raise BadRequest(f"{name[:NAME_SHOWN]}: {why}")
        return body

    def worker_url(self) -> str:
        url = self.query.get("url", "")
        if not url:
            raise BadRequest("the query must name the worker: ?url=http://10.0.0.1:8000")
        return url

    def limit(self, most: int) -> int:
        return min(self.number("limit", LISTED, above=0), most)

    def number(self, name: str, default: int, above: int = -1) -> int:
        text = self.query.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > above):
            raise BadRequest(f"{name} must be a number above {above}")
        return int(text)


def bearer_of(authorization: str) -> str:
    """Return the key in this field; "" without one. The scheme may be in any case (RFC 9110, 11.1)."""
    kind, _, key = authorization.partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


JSON = "application/json"
TEXT_SCHEMA: Mapping[str, Any] = {"type": "string"}
YES_OR_NO: Mapping[str, Any] = {"type": "boolean"}
SCOPE: Mapping[str, Mapping[str, Any]] = {"cluster": YES_OR_NO}
"""Whether all nodes are meant."""
LIMIT: Mapping[str, Mapping[str, Any]] = {"limit": {"type": "integer", "minimum": 1, "maximum": 999_999_999}}
"""The query of what lists at most LISTED."""


class Route(NamedTuple):
    """A handler, and what the document of the control port has of it.

    `body`: JSON schemas of the members of its body, `required` of them, and whether there may be `others`; `query`:
    those of its query. `kinds`: content types of its answer. `statuses`: others than 200 with the same content.
    """

    handle: Callable[[Asked], Any]
    summary: str = ""
    body: Mapping[str, Mapping[str, Any]] | None = None
    required: Sequence[str] = ()
    others: bool = False
    may_lack_body: bool = False
    query: Mapping[str, Mapping[str, Any]] = {}
    kinds: Sequence[str] = (JSON,)
    statuses: Sequence[int] = ()


def object_of(data: bytes, expected: str = "a JSON object") -> Mapping[str, Any]:
    """Parse a JSON object. Raises BadRequest."""
    if not data.strip():
        raise BadRequest(f"the body is empty, expected {expected}")
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}; expected {expected}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be {expected}")
    return body


def text_of(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a text" if name in body else f"{name} is missing")
    return value


def fingerprint_of(text: str) -> int:
    """ "00ff…" -> its number. Raises BadRequest unless it is 1 to 16 hexadecimal digits and not 0."""
    digits = text.lower().removeprefix("0x")
    if not 1 <= len(digits) <= 16 or digits.strip("0123456789abcdef") or not int(digits, 16):
        raise BadRequest("a fingerprint is up to 16 hexadecimal digits, and not 0")
    return int(digits, 16)
