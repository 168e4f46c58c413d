"""Which backends refuse what others serve: a wrong key, another model, another version. They answer at once, look idle,
and would get most requests.

Rule: evidence is one request that one backend refused and another one served. A few in a row, of requests that are
alike (`kind_of`), and such requests avoid that backend; a few more of any kind, and all do, until it serves one, which
a probe finds out. So do failures of a kind (`failed`). An answer without a word is a refusal in words of its own.
Invariant: what a second one refuses as well counts for nothing (test_black_holes.py, test_blank_answers.py).
Bounds: ROWS_MAX rows, of which the oldest goes; AVOIDED_MAX.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter
from ranvier_py.core.routing.backend import Backend, Transition
from ranvier_py.core.routing.blame.wordings import ROWS_MAX, Wordings
from ranvier_py.core.routing.health import ILL_STATUSES, Circuit, Outcome

REFUSALS_TO_AVOID, UNLIKE_TO_AVOID = 2, 4
"""In a row, of requests that are alike, and of others. One may be about something that only this request has, such as
an image; each costs its client a second try."""

PROBE_REQUESTS, PROBE_S, PROBE_IDLE_S = 32, 5.0, 60.0
"""Requests that pass a backend over before one of them goes there: one in 5 s at most, and one a minute at least."""

AVOIDED_MAX = 1024  # rows; 1 MB with ROWS_MAX others. Clients choose the models that they name.

BLANK_STATUS = 200  # the status of a refusal that is an answer without a word
ABOUT_ALL = 0
OF_KEYS = (401, 403)
OF_FAULTS = {Outcome.BROKEN: 502, Outcome.TIMEOUT: 504}  # as clients would see them; of all others it is 500
SERVES = "serves"


@dataclass(slots=True)
class RefusalCounters:
    """What happened since the start."""

    contradicted: dict[str, int] = counter("Refusals of requests that another backend then served.", label="status")
    shared: int = counter("Refusals that a second backend shared, which are the request's own fault.")
    probes: int = counter("Requests sent to a backend that was avoided, to see whether it still refuses.")
    dropped: int = counter("Remembered refusals of backends dropped, or not acted on, for want of room.")


@dataclass(slots=True)
class Row:
    """Refusals in a row of one backend, of requests that are alike or of all."""

    since: float
    status: int = 0  # of the latest
    contradicted: int = 0  # of requests that another backend served
    faults: int = 0  # failures of requests that another backend served
    probed_at: float = 0.0
    passed: int = 0  # requests that avoided it since then


def kind_of(path: bytes, model: str, *, stream: bool) -> int:
    """Return what is equal for requests that are alike."""
    return hash((path, model, stream)) or 1


def wording_of_blanks(kind: int) -> int:
    """Return what is equal for answers without a word to requests of this kind, beside `wordings.wording_of`."""
    return hash((BLANK_STATUS, kind)) or 1


class Refusals:
    """The refusals of all backends. A `kind` is that of the request (`kind_of`)."""

    __slots__ = ("avoiding", "counters", "rows", "wordings")

    def __init__(self) -> None:
        self.counters = RefusalCounters()
        self.rows: BoundedDict[tuple[int, BackendId], Row] = BoundedDict(ROWS_MAX)
        self.avoiding: dict[int, dict[BackendId, Row]] = {}  # by kind; empty while no backend is avoided
        self.wordings = Wordings()

    # --- who is avoided ---------------------------------------------------------------------------------------------

    def avoided(self, kind: int) -> Sequence[BackendId]:
        """Return the backends that a request of this kind avoids."""
        return [*self.avoiding.get(ABOUT_ALL, ()), *self.avoiding.get(kind, ())]

    def probe(self, kind: int, able: Collection[BackendId], now: float) -> BackendId | None:
        """Count a request that avoids them. Returns the one of them that it should go to nevertheless, if any; only one
        of those `able` to serve it."""
        for each in (ABOUT_ALL, kind):
            for backend, row in self.avoiding.get(each, {}).items():
                row.passed += 1
                idle_s = now - row.probed_at
                is_due = idle_s >= PROBE_IDLE_S or (row.passed >= PROBE_REQUESTS and idle_s >= PROBE_S)
                if is_due and backend in able:
                    row.passed, row.probed_at = 0, now
                    self.counters.probes += 1
                    return backend
        return None

    def status_of(self, backend: BackendId) -> int:
        """Return the status with which it refuses what others serve; 0 if it does not."""
        return next((rows[backend].status for rows in self.avoiding.values() if backend in rows), 0)

    def worse_opinions(self, kind: int, backends: Sequence[Backend], wording: int) -> Sequence[BackendId]:
        """Return those of these backends that should not be the second to be asked: all that are not proven, or have
        refused others by this `wording`, or if none is left, those that have refused."""
        repeated = self.wordings.rows
        unproven = [each.id for each in backends if not self.is_proven(each, kind) or (wording, each.id) in repeated]
        if len(unproven) < len(backends):
            return unproven
        return [backend.id for backend in backends if self._has_refused(backend.id, kind)]

    def is_doubtful(self, backend: Backend, kind: int, others: Iterable[Backend]) -> bool:
        """Whether any refusal of this backend should be tried elsewhere, once. Call it before `refused`. A proven one
        has the last word."""
        if self._has_refused(backend.id, kind):
            return True
        has_served = backend.seen.outcomes[Outcome.SUCCESS] > 0
        return not has_served and any(self.is_proven(other, kind) for other in others)

    def is_proven(self, backend: Backend, kind: int) -> bool:
        return backend.seen.outcomes[Outcome.SUCCESS] > 0 and not self._has_refused(backend.id, kind)

    def _has_refused(self, backend: BackendId, kind: int) -> bool:
        """Whether it has refused a request like this, or any, and served none since."""
        return any((each, backend) in self.rows or backend in self.avoiding.get(each, ()) for each in (ABOUT_ALL, kind))

    # --- what happens -----------------------------------------------------------------------------------------------

    def refused(self, backend: Backend, kind: int, status: int, now: float) -> None:
        """Take in a refusal."""
        for scope in scopes_of(kind, status):
            row = self.avoiding.get(scope, {}).get(backend.id) or self.rows.get((scope, backend.id))
            if row is None:
                row = self.rows[scope, backend.id] = Row(now)
                self.counters.dropped += self.rows.dropped + self.wordings.rows.dropped
                self.rows.dropped = self.wordings.rows.dropped = 0
            row.status = status

    def blank(self, backend: Backend, kind: int, others: Iterable[Backend], now: float) -> bool:
        """Take in an answer without a word. Returns whether the request should be tried elsewhere, once."""
        is_doubtful = self.is_doubtful(backend, kind, others)
        self.refused(backend, kind, BLANK_STATUS, now)
        return self.wordings.refused(backend.id, wording_of_blanks(kind), is_doubtful=is_doubtful)

    def shared(self, backend: Backend, kind: int, status: int) -> None:
        """Take back a refusal, since a second backend, which has served others, refuses the request as well: that is
        the request's own fault."""
        self.counters.shared += 1
        for scope in scopes_of(kind, status):
            row = self.rows.get((scope, backend.id))
            if row is not None and not row.contradicted:
                del self.rows[scope, backend.id]

    def contradicted(self, backend: Backend, kind: int, status: int, now: float) -> Sequence[Transition]:
        """Take in that another backend served what this one refused."""
        self.counters.contradicted[str(status)] += 1
        before = self.status_of(backend.id)
        for scope in scopes_of(kind, status):
            row = self.rows.get((scope, backend.id))
            if row is None:  # it has served another request meanwhile, or is avoided already
                continue
            row.contradicted += 1
            alike = scope == kind or status in OF_KEYS
            if row.contradicted >= (REFUSALS_TO_AVOID if alike else UNLIKE_TO_AVOID):
                self._avoid(backend, scope, row, now)
        after = self.status_of(backend.id)
        why = "another backend serves what it refuses"
        return () if before or not after else [changed(backend, SERVES, answering(after), why)]

    def failed(self, backend: Backend, kind: int, outcome: Outcome, now: float) -> Sequence[Transition]:
        """Take in that another backend served what this one failed. As many as open a circuit have it avoided, where
        that stays closed because it serves others in between."""
        if backend.id in self.avoiding.get(kind, ()):
            return ()
        row = self.rows[kind, backend.id] = self.rows.get((kind, backend.id)) or Row(now)
        row.faults, row.status = row.faults + 1, OF_FAULTS.get(outcome, 500)
        vitals, before = backend.vitals, self.status_of(backend.id)
        if vitals.circuit is not Circuit.CLOSED or row.faults < vitals.limits.circuit_faults_to_open:
            return ()
        self._avoid(backend, kind, row, now)
        after = self.status_of(backend.id)
        why = "another backend serves what it fails"
        return () if before or not after else [changed(backend, SERVES, answering(after), why)]

    def _avoid(self, backend: Backend, scope: int, row: Row, now: float) -> None:
        if sum(map(len, self.avoiding.values())) >= AVOIDED_MAX:
            self.counters.dropped += 1
            return
        del self.rows[scope, backend.id]
        row.probed_at = now
        self.avoiding.setdefault(scope, {})[backend.id] = row

    def served(self, backend: Backend, kind: int, sent_at: float) -> Sequence[Transition]:
        """Take in that it serves a request that was sent then."""
        before = self.status_of(backend.id) if self.avoiding else 0
        for each in (ABOUT_ALL, kind):
            row = self.rows.get((each, backend.id))
            if row is not None and row.since <= sent_at:
                del self.rows[each, backend.id]
            self._release(backend.id, each, sent_at)
        if not before or self.status_of(backend.id):
            return ()
        return [changed(backend, answering(before), SERVES, "it served a request")]

    def forget(self, backend: BackendId) -> None:
        """Forget its refusals: another process is behind it, or another backend has its id."""
        for kind in list(self.avoiding):
            self._release(backend, kind, float("inf"))
        for key in [key for key in self.rows if key[1] == backend]:
            del self.rows[key]
        self.wordings.forget(backend)

    def _release(self, backend: BackendId, kind: int, sent_at: float) -> None:
        rows = self.avoiding.get(kind, {})
        if backend in rows and rows[backend].since <= sent_at:
            del rows[backend]
            if not rows:
                del self.avoiding[kind]


def scopes_of(kind: int, status: int) -> Sequence[int]:
    """Return what a refusal counts for: requests of one path and model, and all; one of keys for all alone."""
    return (ABOUT_ALL,) if status in OF_KEYS else (ABOUT_ALL, kind)


def answering(status: int) -> str:
    """Return how a backend does not serve what others serve, in words."""
    if status == BLANK_STATUS:
        return "answers nothing"
    return f"{'fails' if status in ILL_STATUSES else 'refuses'} with {status}"


def changed(backend: Backend, before: str, after: str, why: str) -> Transition:
    return Transition.of(backend, "answers", before, after, why)
