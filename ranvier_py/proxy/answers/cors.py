"""What browsers may read of the node's own answers: what engines allow the same page, or what the operator does.

Rules: an origin is allowed what an engine's last answer to it allowed, until an engine answers otherwise; it is due to
be asked for again after KNOWN_S. Origins of the operator need no engine, and engines' own words on the matter do not
reach a page then. Bound: ORIGINS_MAX, the oldest is forgotten.
"""

from __future__ import annotations

from collections.abc import Collection

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.proxy.http_values import Fields, Headers, HttpResponseHead

ORIGINS_MAX = 1024
KNOWN_S, REFUSED_S, UNANSWERED_S = 600.0, 60.0, 10.0
"""How long an engine's answer holds: as long as Starlette lets browsers keep one; and if it was a refusal, or none."""

PREFIX = b"access-control-"
ORIGIN, CREDENTIALS = PREFIX + b"allow-origin", PREFIX + b"allow-credentials"
ANY = b"*"
EXPOSED = (PREFIX + b"expose-headers", b"age, retry-after, x-cache, x-request-id")
METHODS = (PREFIX + b"allow-methods", b"DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT")
MAX_AGE = (PREFIX + b"max-age", b"600")


class Cors:
    """`origins`: those that the operator allows; if there are none, engines decide. It may be replaced."""

    def __init__(self) -> None:
        self.origins: Collection[str] = ()
        self._known: BoundedDict[bytes, tuple[float, Fields]] = BoundedDict(ORIGINS_MAX)

    def fields(self, origin: bytes) -> Fields:
        """Return the fields by which a page of this origin may read an answer; none if it may not, or who knows."""
        if self.origins:
            allowed = ANY if "*" in self.origins else origin
            return of_origin(allowed) if allowed == ANY or origin.decode("latin-1") in self.origins else ()
        return self._known.get(origin, (0.0, ()))[1]

    def is_due(self, origin: bytes, now: float) -> bool:
        """Whether an engine should be asked what it allows this origin."""
        return not self.origins and self._known.get(origin, (0.0, ()))[0] <= now

    def asked(self, origin: bytes, head: HttpResponseHead | None, now: float) -> None:
        """Take an engine's answer to a preflight; None if no engine answered."""
        if head is None:
            self._known[origin] = now + UNANSWERED_S, self.fields(origin)
        elif not self.learn(origin, head, now):
            self._known[origin] = now + REFUSED_S, ()

    def learn(self, origin: bytes, head: HttpResponseHead, now: float) -> bool:
        """Take what an engine's answer allows this origin. Returns whether it allows it anything."""
        found = {name.lower(): value for name, value in head.headers}
        allowed = found.get(ORIGIN, b"")
        if allowed not in (ANY, origin):
            return False
        more = [(CREDENTIALS, b"true")] if found.get(CREDENTIALS) == b"true" else []
        self._known[origin] = now + KNOWN_S, (*of_origin(allowed), *more)
        return True

    def relayed(self, head: HttpResponseHead, origin: bytes, now: float) -> HttpResponseHead:
        """Return an engine's head as a page of this origin gets it; and learn from it."""
        if self.origins:
            return self.replaced(head, origin)
        if self.is_due(origin, now):
            self.learn(origin, head, now)
        return head

    def replaced(self, head: HttpResponseHead, origin: bytes) -> HttpResponseHead:
        """Return a head with our fields instead of those that an engine has for whoever asked it. No origin: none."""
        kept = [field for field in head.headers if not field[0].lower().startswith(PREFIX)]
        headers: Headers = [*kept, *(self.fields(origin) if origin else ())]
        return HttpResponseHead(head.status, head.reason, headers, head.framing)


def of_origin(allowed: bytes) -> Fields:
    """Return the fields that allow an origin, or any."""
    return ((ORIGIN, allowed), EXPOSED) if allowed == ANY else ((ORIGIN, allowed), (b"vary", b"Origin"), EXPOSED)
