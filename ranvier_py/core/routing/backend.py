"""One backend as the node sees it, and the values that are said of it.

A Backend is read by everybody and written by the Registry alone (core/routing/backends.py); its machines are in
core/routing/health.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from ranvier_py.core.errors import BadRequest, NoBackend, NotFound
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.health import Circuit, Health, Outcome, Vitals
from ranvier_py.core.routing.process import Process
from ranvier_py.core.routing.work import NO_LOAD, Load, SharedWork

NAME_CHARS_MAX = 128  # longer than any host:port in practice; the name travels in a header and in gossip
SUCCESS_WINDOW = 100.0  # requests: an engine that failed all of its last hundred has a rate near a third


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one probe found. `None` stands for «not asked, or not told»: it leaves what is known as it is.

    `refused`: nobody listened on the port, so the process was gone. `started_at`: process_start_time_seconds of the
    engine's own metrics, in the engine's clock; only ever compared with itself. `cards`: the entries of /v1/models.
    """

    ok: bool
    refused: bool = False
    status: int = 0
    latency_s: float = 0.0
    models: tuple[str, ...] | None = None
    cards: tuple[Mapping[str, Any], ...] = ()
    started_at: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Transition:
    """Something about a backend changed; for the log and the metrics. `what`: health, circuit, epoch or models."""

    backend: BackendId
    name: str
    what: str
    before: str
    after: str
    why: str


class Backend(SharedWork):
    """One engine. Satisfies placement.Candidate. Read it freely; only the Registry writes it."""

    __slots__ = (
        "cards",
        "draining",
        "foreign",
        "generation",
        "id",
        "last_probe",
        "load",
        "models",
        "name",
        "outcomes",
        "peers",
        "peers_moved_at",
        "probes_failed",
        "probes_ok",
        "process",
        "removed",
        "success_rate",
        "url",
        "vitals",
        "weight",
    )

    def __init__(self, id: BackendId, url: str, name: str, weight: float, generation: int, vitals: Vitals) -> None:  # noqa: A002
        super().__init__()
        self.id = id
        self.url = url  # normalised: scheme://host:port
        self.name = name
        self.weight = weight
        self.generation = generation
        self.vitals = vitals
        self.models: tuple[str, ...] | None = None  # sorted; None: not known yet, serves anything
        self.cards: tuple[Mapping[str, Any], ...] = ()
        self.peers = NO_LOAD
        self.peers_moved_at = 0.0  # when the queue of their requests was heard to move
        self.foreign = 0  # requests of others in the engine, by its own count
        self.load = 0  # always inflight + peer_load + foreign; an attribute because placement reads it 64 times
        self.success_rate = 1.0
        self.draining = False
        self.removed = False
        self.process = Process()
        self.last_probe: ProbeResult | None = None
        self.probes_ok = 0
        self.probes_failed = 0
        self.outcomes = dict.fromkeys(Outcome, 0)

    def __repr__(self) -> str:
        state = "removed" if self.removed else "draining" if self.draining else repr(self.vitals)
        return f"<Backend {self.id} {self.name} epoch {self.generation} load {self.load} {state}>"

    def peers_now(self) -> Load:
        return self.peers

    def peers_progress_at(self) -> float:
        return self.peers_moved_at

    def received(self, load: Load, now: float) -> None:
        """What peers have there together is now this."""
        before, self.peers = self.peers, load
        self.load += load.requests - before.requests
        came = load.waiting < before.waiting or load.tokens < before.tokens  # a first token
        if came or (load.waiting and not before.waiting and not self.own_waiting):
            self.peers_moved_at = now

    @property
    def peer_load(self) -> int:
        """Requests that peers have in flight there, as they report."""
        return self.peers.requests

    @property
    def used(self) -> bool:
        """Whether it was ever seen alive: by a probe before the last one, or by a request that reached it."""
        reached = sum(self.outcomes.values()) - self.outcomes[Outcome.CONNECT_ERROR]
        return self.probes_ok > 1 or self.inflight > 0 or reached > 0

    @property
    def health(self) -> Health:
        return self.vitals.health

    @property
    def circuit(self) -> Circuit:
        return self.vitals.circuit

    def rate(self, outcome: Outcome) -> None:
        """Count one more request into `success_rate`. What says nothing of the engine does not count."""
        if outcome is Outcome.SUCCESS:
            self.success_rate += (1.0 - self.success_rate) / SUCCESS_WINDOW
        elif outcome not in (Outcome.OVERLOADED, Outcome.CANCELLED):
            self.success_rate -= self.success_rate / SUCCESS_WINDOW

    def serves(self, model: str) -> bool:
        return not model or self.models is None or model in self.models


def normal_url(url: str) -> str:
    """scheme://host:port of an http or https origin. Raises BadRequest on anything else."""
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise BadRequest(f"not a URL: {url!r} ({exc})") from exc
    if parts.scheme not in ("http", "https") or not host:
        raise BadRequest(f"backend must be http://host:port or https://host:port, not {url!r}")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise BadRequest(f"backend must be an origin, without path, query or credentials: {url!r}")
    if port == 0 or not all("!" <= char <= "~" for char in host):
        raise BadRequest(f"not a host and port: {url!r}")
    port = port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://[{host}]:{port}" if ":" in host else f"{parts.scheme}://{host}:{port}"


class Empty(Enum):
    """Why a pool has nobody in it."""

    UNKNOWN_MODEL = "unknown_model"
    NOBODY = "nobody"


class Pool:
    """Who may serve one model just now. A snapshot: the tuple and the lists are never changed, a new Pool is made.

    `generations` is indexed by BackendId and holds -1 for who is not eligible, so that the route table filters claims
    by one comparison. `why` is None unless the pool is empty. `last_resort`: the circuits were overruled.
    """

    __slots__ = ("backends", "generations", "ids", "last_resort", "why")

    def __init__(self, backends: Sequence[Backend], slots: int, *, last_resort: bool, why: Empty | None) -> None:
        self.backends = tuple(backends)
        self.ids = tuple(backend.id for backend in backends)
        self.generations = [-1] * slots
        for backend in backends:
            self.generations[backend.id] = backend.generation
        self.last_resort = last_resort
        self.why = None if backends else why

    def __len__(self) -> int:
        return len(self.backends)

    def error(self, model: str) -> NotFound | NoBackend:
        """What to tell the client of an empty pool; the words of the 404 are OpenAI's."""
        if self.why is Empty.UNKNOWN_MODEL:
            return NotFound(f"The model `{model}` does not exist")
        return NoBackend("No backend is available to serve this request")
