"""One client's request, and what has become of it so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ranvier_py.core.answers.answer_stream import ResponseName
from ranvier_py.core.clients.body_mender import BodyMender, Engines, Mended
from ranvier_py.core.clients.known_clients import USER_AGENT
from ranvier_py.core.errors import RanvierError, words_of
from ranvier_py.core.prompts.request_apis import APIS
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backends import Registry
from ranvier_py.core.routing.request_paths import PATHS
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.failed_tries import FailedTries
from ranvier_py.proxy.http_values import Fields, HttpRequest, HttpResponseHead
from ranvier_py.proxy.shared_answer import SharedAnswer

new = tuple.__new__
"""Creates a NamedTuple in half the time of a call of its class."""

ERROR_CHARACTERS_MAX = 500  # of the reasons of failed attempts in one line; then the last one alone

HIT, MISS, BYPASS = b"HIT", b"MISS", b"BYPASS"
"""What the response cache did with a request, as the field X-Cache names it."""


@dataclass(slots=True)
class ServedRequest:
    """One client's request, and what has become of it so far, for its line in the log."""

    request: HttpRequest
    client: Client
    request_id: bytes
    started_at: float
    attempt: Attempt | None = None  # the latest one
    status: int = 0
    tries: int = 0
    failed_tries: FailedTries | None = None  # once one has failed
    first_byte_at: float = 0.0
    sent_bytes: int = 0
    outcome: str = "cancelled"
    error: str = ""  # of the attempts that failed
    cached: bytes = b""  # what the response cache did: HIT, MISS or BYPASS; empty without one
    shared: SharedAnswer | None = None  # set if others may get its answer, too
    naming: ResponseName | None = None  # set if an engine may keep its answer; finds the answer's id
    tenant: bytes = b""
    moved: bool = False  # it was placed again because its engine hung
    stays: bool = False  # that is not allowed
    upgrades: bool = False  # it asks for a WebSocket
    unmended: HttpRequest | None = None  # the request as it came, if a rule changed its body

    def mend(self, mender: BodyMender, path: bytes, registry: Registry) -> Mended | None:
        """Apply the operator's rules to the body; None if it stays as it came."""
        request = self.request
        mended = mended_by(mender, path, request, registry)
        if mended is not None and mended.sent is not request.body:
            self.request, self.unmended = request.with_body(mended.sent), request
        return mended

    def failed(self, error: RanvierError) -> None:
        """Note why the latest attempt failed, with the cause, which clients do not see."""
        words, cause = str(error), words_of(error)
        self.note(words + (f": {cause}" if cause not in words else ""))

    def note(self, reason: str) -> None:
        """Note why the latest attempt failed."""
        assert self.attempt is not None
        before = f"{self.error}; " if 0 < len(self.error) < ERROR_CHARACTERS_MAX else ""
        self.error = f"{before}{self.attempt.decision.backend_name}: {reason}"

    def own_fields(self, attempt: Attempt, head: HttpResponseHead, may_see: Callable[[bytes | None], bool]) -> Fields:
        """Return the fields that are added to the head of an answer."""
        fields = []
        if may_see(self.request.fields.control_key):
            decision = attempt.decision
            fields = [
                (b"x-ranvier-backend", decision.backend_name.encode()),
                (b"x-ranvier-reason", decision.reason.encode()),
                (b"x-ranvier-matched-tokens", b"%d" % decision.matched_tokens),
            ]
        if self.cached:
            fields.append((b"x-cache", self.cached))
        if not head.fields.names_request:  # else the backend's own id stays
            fields.append((b"x-request-id", self.request_id))
        return fields

    def summary(self, now: float) -> RequestSummary:
        """Return its line in the log."""
        request = self.request
        placed = ("", "", "cache" if self.cached == HIT else "", "", 0, 0)
        if self.attempt is not None:
            decision = self.attempt.decision
            placed = (
                *(decision.backend_name, decision.policy, decision.reason),
                *(decision.source, decision.matched_tokens, self.attempt.prompt_tokens),
            )
        first_byte_ms = round(1000 * (self.first_byte_at - self.started_at), 3) if self.first_byte_at else 0.0
        words = (self.request_id.decode("latin-1"), request.method.decode("latin-1"), request.path.decode("latin-1"))
        total_ms = round(1000 * (now - self.started_at), 3)
        end = (self.tries, first_byte_ms, total_ms, self.sent_bytes, self.error)
        return new(RequestSummary, (*words, self.status, self.outcome, *placed, *end))


def mended_by(mender: BodyMender, path: bytes, request: HttpRequest, registry: Registry) -> Mended | None:
    """Apply the rules to a request's body. Returns None if it stays as it came."""
    rule = PATHS.get(path)
    api = APIS.get(rule.reader) if rule is not None else None
    if api is None:
        return None
    agent = next((value for name, value in request.headers if name.lower() == USER_AGENT), b"")
    client, session = request.fields.client, request.fields.session
    return mender.mend(request.body, api, client, agent, session, lambda model: Engines(*registry.engines(model)))
