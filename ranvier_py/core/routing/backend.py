"""One backend as the node sees it, and the values that are said of it.

A Backend is read by everybody and written by the Registry alone (core/routing/backends.py); its machines are in
core/routing/health.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ranvier_py.core.addresses import DEFAULT_PORTS, checked_url, spelled
from ranvier_py.core.errors import BadRequest, NoBackend, NotFound
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.checkpoints.cache_profile import Signs
from ranvier_py.core.routing.health import FAULTS, Circuit, Health, Outcome, Vitals
from ranvier_py.core.routing.work import Work

NAME_CHARS_MAX = 128  # longer than any host:port in practice; the name travels in a header and in gossip
NOT_REACHED = (Outcome.CONNECT_ERROR, Outcome.NOT_SENT)
SUCCESS_WINDOW = 100.0  # requests: an engine that failed all of its last hundred has a rate near a third


START_TOLERANCE_S = 0.5
"""An exporter may compute its start time anew each time; no engine starts twice in half a second."""

NEVER_REPORTED = float("-inf")
SAME_RESTART_S = 30.0
"""A restart that we see so soon after a peer reported one is the same: three probe intervals of 10 s."""


def same_process(started_at: float, other: float) -> bool:
    """Whether two start times of an engine's own metrics are of one process."""
    return abs(started_at - other) <= START_TOLERANCE_S


@dataclass(slots=True)
class Process:
    """Which process is behind a backend: what probes and peers say of it, and when that means another one.

    A claim is worth what the process that served it holds: the next one holds nothing. Evidence, the best first: the
    start time in the engine's own metrics (another one is another process, the same one is the same); a refused
    connection (nobody listened, so what answers next is another). A mere time-out proves nothing, since a busy engine
    keeps its cache.

    The first word of a start time is special: what was claimed until then may be of any process since we began to ask.
    If a probe failed in between, in whatever way, those claims are void; they are few, since we begin with a probe.
    A peer's word of a start counts as our own until we look ourselves. Soon after peers reported a restart of an engine
    that has no start time, ours is taken for the same one.
    """

    started_at: float | None = None  # in the engine's clock; only ever compared with itself
    reported_at: float = NEVER_REPORTED  # when a peer reported a restart
    refused: bool = False  # a connection, since the last good probe
    has_remote_routes: bool = False  # peers' claims were taken since the last restart

    def answered(self, started_at: float | None, *, used: bool, failing: bool, now: float) -> str:
        """A good probe found this start time, or none. Why that is another process than before; "" if it is not.

        `used`: it may have claims, or was seen alive before. `failing`: the probe before this one failed.
        """
        why = self._judge(started_at, used=used, failing=failing, now=now)
        self.refused = False
        return why

    def reported(self, started_at: float, *, used: bool, failing: bool, now: float) -> str:
        """The same of a peer's word, of the process that it counts as we do. It says nothing once we know ourselves."""
        return "" if self.started_at is not None else self._judge(started_at, used=used, failing=failing, now=now)

    def _judge(self, reported: float | None, *, used: bool, failing: bool, now: float) -> str:
        known = self.started_at
        if known is not None and reported is not None:
            self.started_at = reported
            return "" if same_process(known, reported) else "start time changed"
        doubtful = self.refused or (failing and reported is not None)
        another = doubtful and (used or self.has_remote_routes) and now - self.reported_at >= SAME_RESTART_S
        self.started_at = reported if reported is not None else None if another else known
        return "back after refused connections" if another else ""

    def replaced(self, started_at: float, now: float) -> bool:
        """A peer saw it restart, at 0 if it knows no start time. Whether that is another process than we know."""
        if started_at and self.started_at is not None and same_process(self.started_at, started_at):
            return False
        self.started_at = started_at or None
        self.reported_at = now
        self.refused = False
        return True


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one probe found. `None` stands for «not asked, or not answered»: it leaves what is known as it is.

    `refused`: nobody listened on the port, so the process was gone. `started_at`: process_start_time_seconds of the
    engine's own metrics, in the engine's clock; only ever compared with itself. `cards`: the entries of /v1/models.
    `hybrid`: whether it has caches beside those of attention, as its metrics say; `signs`: what else these say of them.
    """

    ok: bool
    refused: bool = False
    status: int = 0
    latency_s: float = 0.0
    models: tuple[str, ...] | None = None
    cards: tuple[Mapping[str, Any], ...] = ()
    started_at: float | None = None
    detail: str = ""
    hybrid: bool | None = None
    signs: Signs | None = None


@dataclass(frozen=True, slots=True)
class Transition:
    """Something about a backend changed; for the log and the metrics. `what`: health, circuit, generation or models."""

    backend: BackendId
    name: str
    what: str
    before: str
    after: str
    why: str


SALTED_OWNERS = frozenset(("vllm", "sglang", "tensorrt_llm"))
"""Owners that the model cards of those engines name whose requests have a `cache_salt`."""


HOSTED_NAMES = (
    *("anthropic.com", "openai.com", "openai.azure.com", "services.ai.azure.com", "cognitiveservices.azure.com"),
    *("models.ai.azure.com", "googleapis.com", "openrouter.ai", "together.xyz", "together.ai", "groq.com", "x.ai"),
    *("fireworks.ai", "deepseek.com", "mistral.ai", "cohere.com", "cohere.ai", "perplexity.ai", "cerebras.ai"),
    *("deepinfra.com", "novita.ai", "moonshot.ai", "moonshot.cn", "z.ai", "bigmodel.cn", "minimax.io", "minimaxi.com"),
    *("dashscope.aliyuncs.com", "dashscope-intl.aliyuncs.com", "siliconflow.cn", "siliconflow.com", "nebius.com"),
    *("hyperbolic.xyz", "sambanova.ai", "replicate.com", "huggingface.co", "githubcopilot.com", "models.github.ai"),
    *("api.nvidia.com", "gateway.ai.cloudflare.com", "baseten.co", "ai21.com", "volces.com", "ai-gateway.vercel.sh"),
)
"""Hosts of providers, and all below them. What is not listed has `hosted` to say so."""

HOSTED_HOST = re.compile(r"bedrock(-\w+)*\.[\w-]+\.amazonaws\.com")  # other names below that are machines of anybody's

HOSTED_OWNERS = frozenset(("openai", "openai-internal", "system", "anthropic", "google", "mistralai", "azure"))
"""Owners that model cards of hosted providers name, and of gateways to them."""


def is_hosted_url(url: str) -> bool:
    """Whether a provider is known to serve there."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    listed = any(host == name or host.endswith(f".{name}") for name in HOSTED_NAMES)
    return listed or HOSTED_HOST.fullmatch(host) is not None


@dataclass(slots=True, eq=False, kw_only=True)
class Backend(Work):
    """One engine. Satisfies placement.Candidate. Read it freely; only the Registry writes it."""

    id: BackendId
    url: str  # normalised: scheme://host:port
    name: str
    weight: float
    generation: int
    vitals: Vitals
    models: tuple[str, ...] | None = None  # sorted; None: not known yet, serves anything
    cards: tuple[Mapping[str, Any], ...] = ()
    listed_hosted: bool | None = (
        None  # whether a provider's, as the operator has it, else by its URL; None: by its cards
    )
    hybrid: bool = False  # has caches beside those of attention
    signs: Signs = field(default_factory=Signs)  # of its cache's profile, by its metrics
    foreign: int = 0  # requests of others in the engine, by its own count
    load: int = 0  # always inflight + the peers' + foreign; an attribute because placement reads it 64 times
    success_rate: float = 1.0
    draining: bool = False
    removed: bool = False
    hit_generation: int = 0  # the last one of which an answer reported cached tokens
    process: Process = field(default_factory=Process)
    last_probe: ProbeResult | None = None
    probes_ok: int = 0
    probes_failed: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))

    @property
    def takes_salt(self) -> bool:
        """Whether its engine keeps caches apart by the `cache_salt` of a body, as far as its model cards say."""
        return not self.cards or any(card.get("owned_by") in SALTED_OWNERS for card in self.cards)

    @property
    def reports_hits(self) -> bool:
        """Whether this process has ever reported that something was cached. Until then its zeros say nothing."""
        return self.hit_generation == self.generation

    @property
    def owners(self) -> frozenset[str]:
        """Owners that its model cards name: which engine it is, as far as it says."""
        return frozenset([str(card.get("owned_by")) for card in self.cards])

    @property
    def hosted(self) -> bool:
        """Whether it is a hosted provider's: no rule of ours changes what it gets."""
        if self.listed_hosted is not None:
            return self.listed_hosted
        return not self.owners.isdisjoint(HOSTED_OWNERS)

    def __repr__(self) -> str:
        state = "removed" if self.removed else "draining" if self.draining else repr(self.vitals)
        return f"<Backend {self.id} {self.name} generation {self.generation} load {self.load} {state}>"

    @property
    def used(self) -> bool:
        """Whether it was ever seen alive: by a probe before the last one, or by a request that reached it."""
        reached = sum(self.outcomes.values()) - sum(map(self.outcomes.__getitem__, NOT_REACHED))
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
        elif outcome in FAULTS:
            self.success_rate -= self.success_rate / SUCCESS_WINDOW

    def serves(self, model: str) -> bool:
        return not model or self.models is None or model in self.models


def normal_url(url: str) -> str:
    """scheme://host:port of an http or https origin. Raises BadRequest on anything else."""
    try:
        parts = checked_url(url.strip(), ("http", "https"))
    except ValueError as error:
        raise BadRequest(str(error)) from error
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise BadRequest("must be a URL without path, query or credentials, like http://10.0.0.1:8000")
    assert parts.hostname is not None
    return f"{parts.scheme}://{spelled((parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme]))}"


class Pool:
    """Who may serve one model just now. A snapshot: the tuple and the lists are never changed, a new Pool is made.

    `generations` is indexed by BackendId and holds -1 for who is not eligible, so that the route table filters claims
    by one comparison. `last_resort`: the circuits were overruled. `unknown`: nobody serves this model.
    """

    __slots__ = ("backends", "generations", "ids", "last_resort", "unknown")

    def __init__(self, backends: Sequence[Backend], slots: int, *, last_resort: bool, unknown: bool) -> None:
        self.backends = tuple(backends)
        self.ids = tuple(backend.id for backend in backends)
        self.generations = [-1] * slots
        for backend in backends:
            self.generations[backend.id] = backend.generation
        self.last_resort = last_resort
        self.unknown = unknown

    def error(self, model: str) -> NotFound | NoBackend:
        """What an empty pool is for the client; the words of the 404 are OpenAI's."""
        if self.unknown:
            return NotFound(f"The model `{model}` does not exist")
        return NoBackend("No backend is available to serve this request")
