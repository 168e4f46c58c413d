"""One backend as the node sees it: its state, its process, its probes, and the pools of backends.

Anything may read a Backend; only the Registry writes it (`backends`). Its state machines are in `health`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

from ranvier_py.core.addresses import DEFAULT_PORTS, checked_url, is_address, spelled
from ranvier_py.core.errors import BadRequest
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter
from ranvier_py.core.routing.checkpoints.cache_profile import Signs
from ranvier_py.core.routing.health import FAULTS, Circuit, Health, Outcome, Vitals
from ranvier_py.core.routing.processes.engine_marks import EngineMarks, OtherNames
from ranvier_py.core.routing.processes.ranks import rank_of
from ranvier_py.core.routing.processes.reuse import Reuse
from ranvier_py.core.routing.processes.several_processes import SeveralProcesses, advice, same_process
from ranvier_py.core.routing.rates.work import Work
from ranvier_py.core.routing.request_paths import MESSAGES_PATH

NAME_CHARS_MAX = 128  # of ASCII; longer than any host:port in practice; the name travels in a header and in gossip
MODELS_CHARS_MAX = 300  # of a list of models in the log
NOT_REACHED = (Outcome.CONNECT_ERROR, Outcome.NOT_SENT)
SUCCESS_WINDOW = 100.0  # requests: an engine that failed all of its last hundred has a rate of about a third


Card = Mapping[str, Any]
"""One model in an engine's list."""

NEVER_REPORTED = float("-inf")
SAME_RESTART_S = 30.0
"""A restart seen here so soon after a peer reported one is the same restart: three probe intervals of 10 s."""


@dataclass(slots=True)
class Process:
    """Which process is behind a backend, by probes and peers' reports, and whether a report means another process.

    Claims are of one process: the next one holds nothing. Evidence, the best first: the start time in the engine's own
    metrics (a different one means another process, the same one the same process); a refused connection (nothing
    listened, so what answers next is another process). A mere time-out proves nothing, since a busy engine keeps its
    cache. If the backend's name has none of its addresses of before (`moved`), what answers there is another process
    unless its start time says that it is the same. Of several processes (`SeveralProcesses`) none is another.

    The first start time is special: claims made before it may be of any process since probes began. If the probe before
    it failed, in whatever way, those claims are void; they are few, since a node begins with a probe. A peer's report
    of a start time counts as a probe's until this node has one itself. A restart without a start time that is seen soon
    after peers reported one is taken for the same restart.
    """

    started_at: float | None = None  # in the engine's clock; only ever compared with itself
    reported_at: float = NEVER_REPORTED  # when a peer reported a restart
    refused: bool = False  # a connection, since the last good probe
    moved: bool = False  # its name, since the last good probe that could tell what answers there
    has_remote_routes: bool = False  # peers' claims were taken since the last restart
    several: SeveralProcesses = field(default_factory=SeveralProcesses)

    def answered(self, started_at: float | None, *, used: bool, failing: bool, now: float) -> str:
        """Take in a good probe's start time, if any. Returns why this is another process than before; "" if it is not.

        `used`: it may have claims, or was seen alive before. `failing`: the probe before this one failed.
        """
        if started_at is not None:
            self.several.take(started_at, now)
        why = self._judge(started_at, used=used, failing=failing, now=now)
        self.refused = False
        return why

    def reported(self, started_at: float, *, used: bool, failing: bool, now: float) -> str:
        """Take in a start time by a peer's report, of the process with our generation; ignored once we have one."""
        return "" if self.started_at is not None else self._judge(started_at, used=used, failing=failing, now=now)

    def _judge(self, reported: float | None, *, used: bool, failing: bool, now: float) -> str:
        known = self.started_at
        if self.several.count(now) > 1:
            self.started_at = reported if known is None else known
            moved, self.moved = self.moved, False
            return "its name has other addresses" if moved and used else ""
        if known is not None and reported is not None:
            self.started_at, self.moved = reported, False
            return "" if same_process(known, reported) else "start time changed"
        moved = self.moved and known is None  # else the start time will tell
        self.moved = self.moved and not moved
        doubtful = self.refused or moved or (failing and reported is not None)
        another = doubtful and (used or self.has_remote_routes) and now - self.reported_at >= SAME_RESTART_S
        self.started_at = reported if reported is not None else None if another else known
        return ("its name has another address" if moved else "back after refused connections") if another else ""

    def name_moved(self) -> None:
        """Note that the backend's name has none of its addresses of before. The next probe shows what answers there."""
        self.moved = True
        self.several.moved()

    def replaced(self, started_at: float, now: float) -> bool:
        """Take in a restart that a peer saw; `started_at` 0: unknown. Whether it began another process than known."""
        if started_at and self.started_at is not None and same_process(self.started_at, started_at):
            return False
        if self.several.count(now) > 1:
            return False
        self.started_at = started_at or None
        self.reported_at = now
        self.refused = False
        return True


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one probe found. None means «not asked, or not answered», and leaves what is known as it is.

    `refused`: nothing listened on the port, so the process was gone. `timed_out`: no answer within `latency_s`, so that
    the engine may be busy. `started_at`: process_start_time_seconds of the
    engine's own metrics, in the engine's clock; only ever compared with itself. `cards`: the entries of /v1/models.
    `hybrid`: whether by its metrics it has caches beside attention's; `signs`: what else its metrics show of these.
    `ranks`: how many data-parallel ranks these are of; `placeable`: as how many backends those can be placed.
    `caches`, `hit_tokens`: whether by its metrics it caches prefixes, and how many tokens it has found so far.
    `lacks`: paths of inference that it does not serve. `loops`: behind it is the node itself.
    """

    ok: bool
    refused: bool = False
    loops: bool = False
    status: int = 0
    latency_s: float = 0.0
    models: tuple[str, ...] | None = None
    cards: tuple[Card, ...] = ()
    lacks: frozenset[bytes] | None = None
    started_at: float | None = None
    detail: str = ""
    timed_out: bool = False
    hybrid: bool | None = None
    signs: Signs | None = None
    caches: bool | None = None
    hit_tokens: int | None = None
    key_refused: str = ""  # the pages that it refuses to our key, with 401 or 403
    ranks: int | None = None
    placeable: int | None = None
    marks: EngineMarks | None = None  # of its process


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of a backend, for the log and the metrics. `what`: health, circuit, generation or models."""

    backend: BackendId
    name: str
    what: str
    before: str
    after: str
    why: str

    @classmethod
    def of(cls, backend: Backend, what: str, before: str, after: str, why: str) -> Transition:
        return cls(backend=backend.id, name=backend.name, what=what, before=before, after=after, why=why)


KEY_ACCEPTED, KEY_REFUSED = "accepted", "refused"
"""Whether an engine gives its pages to a node that asks with a key of the engine, or of all."""

SALTED_OWNERS = frozenset(("vllm", "sglang", "tensorrt_llm"))
"""Owners in the model cards of engines that know a `cache_salt` in requests."""
SALTED_MESSAGES_OWNERS = SALTED_OWNERS - {"sglang"}
"""Those that know it in /v1/messages as well: vLLM since July 2026 (vllm#49498), SGLang does not."""


HOSTED_NAMES = (
    *("anthropic.com", "openai.com", "openai.azure.com", "services.ai.azure.com", "cognitiveservices.azure.com"),
    *("models.ai.azure.com", "googleapis.com", "openrouter.ai", "together.xyz", "together.ai", "groq.com", "x.ai"),
    *("fireworks.ai", "deepseek.com", "mistral.ai", "cohere.com", "cohere.ai", "perplexity.ai", "cerebras.ai"),
    *("deepinfra.com", "novita.ai", "moonshot.ai", "moonshot.cn", "z.ai", "bigmodel.cn", "minimax.io", "minimaxi.com"),
    *("dashscope.aliyuncs.com", "dashscope-intl.aliyuncs.com", "siliconflow.cn", "siliconflow.com", "nebius.com"),
    *("hyperbolic.xyz", "sambanova.ai", "replicate.com", "huggingface.co", "githubcopilot.com", "models.github.ai"),
    *("api.nvidia.com", "gateway.ai.cloudflare.com", "baseten.co", "ai21.com", "volces.com", "ai-gateway.vercel.sh"),
)
"""Domains of hosted providers, with all names below them. For others the operator sets `hosted`."""

HOSTED_HOST = re.compile(r"bedrock(-\w+)*\.[\w-]+\.amazonaws\.com")  # other names below it are customers' machines

HOSTED_OWNED_BY = frozenset(("openai", "openai-internal", "system", "anthropic", "google", "mistralai", "azure"))
"""What the model cards of hosted providers say that they are owned by, and those of gateways to them."""


def is_hosted_url(url: str) -> bool:
    """Whether the URL's host is known to be a hosted provider's."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    listed = any(host == name or host.endswith(f".{name}") for name in HOSTED_NAMES)
    return listed or HOSTED_HOST.fullmatch(host) is not None


@dataclass(slots=True, eq=False)
class SeenOfBackend:
    """What one backend has shown of itself: to probes, on its pages, and by how requests there ended."""

    last_probe: ProbeResult | None = None
    probed_at: float = NEVER_REPORTED  # when it last answered a probe
    probes_ok: int = 0
    probes_failed: int = 0
    received_at: float = NEVER_REPORTED  # when a byte last came from the engine: of an answer, a page, or an event
    process: Process = field(default_factory=Process)
    hybrid: bool = False  # has caches beside those of attention
    signs: Signs = field(default_factory=Signs)  # of its cache's profile, by its metrics
    lacks: frozenset[bytes] = frozenset()  # paths of inference that it does not serve
    key_refused: str = ""  # the pages that it refuses to our key, by the last probe
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    success_rate: float = 1.0
    complaint: str = ""  # why a request there failed last

    def probe(self, result: ProbeResult) -> None:
        self.last_probe = result
        self.probes_ok += result.ok
        self.probes_failed += not result.ok
        self.hybrid = self.hybrid if result.hybrid is None else result.hybrid
        self.signs = result.signs or self.signs

    @property
    def alive(self) -> bool:
        """Whether a probe before the last one saw it alive, or a request that has ended reached it."""
        reached = sum(self.outcomes.values()) - sum(map(self.outcomes.__getitem__, NOT_REACHED))
        return self.probes_ok > 1 or reached > 0

    def rate(self, outcome: Outcome) -> None:
        """Count one more request into `success_rate`. Outcomes that say nothing about the engine do not count."""
        if outcome is Outcome.SUCCESS:
            self.success_rate += (1.0 - self.success_rate) / SUCCESS_WINDOW
        elif outcome in FAULTS:
            self.success_rate -= self.success_rate / SUCCESS_WINDOW


@dataclass(slots=True, eq=False)
class Behind:
    """Which engines answer behind one URL: one, several processes, or data-parallel ranks."""

    rank: int | None  # the one that the URL names, if any
    processes: int = 1  # that surely answer there
    ranks: int = 1  # data-parallel ones that its pages or events show, unless it is one of them
    as_ranks: tuple[Backend, ...] = ()  # the backends that stand for its ranks, and get its requests
    names: OtherNames = field(default_factory=OtherNames)


@dataclass(slots=True, eq=False, kw_only=True)
class Catalog:
    """Which models one backend serves, and what engine it is by its model cards."""

    models: tuple[str, ...] | None = None  # sorted; None: not known yet, serves anything
    cards: tuple[Card, ...] = ()
    owned_by: frozenset[str] = frozenset()  # what the cards say that they are owned by, which shows what engine it is
    lengths: Mapping[str, int] = field(default_factory=dict)  # by model (`blame.context_lengths`)
    any_model: bool = False  # its engine ignores the names of models, so that it serves each
    # whether a hosted provider's, as the operator set it, else by its URL; None: by its cards
    listed_hosted: bool | None = None

    def takes_salt(self, path: bytes) -> bool:
        """Whether its engine obeys a body's `cache_salt` on this path: by its model cards, and without any, too."""
        known = SALTED_MESSAGES_OWNERS if path == MESSAGES_PATH else SALTED_OWNERS
        return not self.cards or not known.isdisjoint(self.owned_by)

    @property
    def hosted(self) -> bool:
        """Whether it is a hosted provider's, whose requests no rule of `core/clients` may change."""
        if self.listed_hosted is not None:
            return self.listed_hosted
        return not self.owned_by.isdisjoint(HOSTED_OWNED_BY)

    def serves(self, model: str) -> bool:
        """Whether it may serve this model, "" being any."""
        return not model or self.models is None or model in self.models or self.any_model or self.has_adapter(model)

    def has_adapter(self, model: str) -> bool:
        """Whether an engine of SGLang's may serve what it does not list: the model of its own that it calls `default`,
        or an adapter, `base:adapter`, of which only itself knows whether it is loaded."""
        base, colon, _ = model.partition(":")
        named = base == "default" or bool(colon and self.models is not None and base in self.models)
        return named and "sglang" in self.owned_by

    def lists_adapter(self, model: str) -> bool:
        """Whether it lists the adapter of `base:adapter`: not every version of SGLang does."""
        return self.models is not None and model.partition(":")[2] in self.models and self.has_adapter(model)


@dataclass(slots=True, eq=False)
class Origin:
    """Who wants one backend, and who lets it get no requests."""

    wanted_by: tuple[str, ...] = ()  # kinds of sources (`wanted`); of a rank that a node found itself: none
    drained: bool = False  # by an operator; nodes share that
    leaving: str = ""  # why, if its sources let it end, or can't confirm it: each node sees that itself


@dataclass(slots=True, eq=False, kw_only=True)
class Backend:
    """One engine. Satisfies placement.Candidate. Read it freely; only the Registry writes it."""

    id: BackendId
    url: str  # normalised: scheme://host:port
    name: str
    weight: float
    generation: int
    vitals: Vitals
    behind: Behind
    catalog: Catalog
    load: int = 0  # own requests in flight + the peers' + foreign ones; an attribute because placement reads it often
    work: Work = field(default_factory=Work)
    seen: SeenOfBackend = field(default_factory=SeenOfBackend)
    reuse: Reuse = field(default_factory=Reuse)  # of prefixes, by its process
    origin: Origin = field(default_factory=Origin)
    removed: bool = False

    @property
    def draining(self) -> bool:
        """Whether it gets no new requests, though it may well answer some."""
        return self.origin.drained or bool(self.origin.leaving)

    @property
    def advice(self) -> str:
        """What the operator should do about its URL; "" if that leads to one cache, and no other URL does."""
        behind = self.behind
        return advice(behind.processes, 1 if behind.as_ranks else behind.ranks, self.url) or behind.names.advice

    def key_changed(self, refused: str) -> list[Transition]:
        """Take in which pages it refuses to our key. Invariant: that is a state, with a transition where it begins and
        where it ends, and takes no request from it (test_keys_refused.py)."""
        before, self.seen.key_refused = self.seen.key_refused, refused
        if bool(before) is bool(refused):
            return []
        names = (KEY_REFUSED, KEY_ACCEPTED) if before else (KEY_ACCEPTED, KEY_REFUSED)
        why = f"{refused}: see backend_api_key, and its api_key_file" if refused else "all its pages are given to us"
        return [Transition.of(self, "key", *names, why)]

    def __repr__(self) -> str:
        state = "removed" if self.removed else "draining" if self.draining else repr(self.vitals)
        return f"<Backend {self.id} {self.name} generation {self.generation} load {self.load} {state}>"

    @property
    def used(self) -> bool:
        """Whether it was ever seen alive, or may have been reached by a request."""
        return self.work.own.inflight > 0 or self.seen.alive

    @property
    def health(self) -> Health:
        return self.vitals.health

    @property
    def circuit(self) -> Circuit:
        return self.vitals.circuit


def normal_url(url: str) -> str:
    """Return scheme://host:port of an http or https origin, and its rank. Raises BadRequest on anything else."""
    try:
        parts = checked_url(url.strip(), ("http", "https"))
    except ValueError as error:
        raise BadRequest(str(error)) from error
    path = parts.path.rstrip("/")
    if path and not parts.query and parts.username is None:
        raise BadRequest(f"must be a URL without path; what precedes all paths of an engine is base_path={path}")
    if path or parts.query or parts.username is not None:
        raise BadRequest("must be a URL without path, query or credentials, like http://10.0.0.1:8000")
    try:
        rank = rank_of(url.strip())
    except ValueError as error:
        raise BadRequest(str(error)) from error
    assert parts.hostname is not None
    host = canonical(parts.hostname) if is_address(parts.hostname) else parts.hostname
    place = f"{parts.scheme}://{spelled((host, parts.port or DEFAULT_PORTS[parts.scheme]))}"
    return place if rank is None else f"{place}#rank={rank}"


def canonical(address: str) -> str:
    """Return the one spelling of an IP address; an IPv4 address within IPv6 is dotted, as of Python 3.13."""
    found = ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return f"::ffff:{mapped}" if mapped else str(found)


@dataclass(slots=True)
class RegistryCounters:
    """What happened since the start."""

    backends_added: int = counter("Backends added since the start of the node.")
    backends_removed: int = counter("Backends removed since the start of the node.")
    backend_restarts: int = counter("Engines that came back as another process.")
    last_resorts: int = counter("Placements among all backends of a model because all circuits were open.")
    silent_resorts: int = counter(
        "Placements among backends unhealthy by time-outs alone, because there were no others."
    )
    probes_overruled: int = counter("Probes that timed out while the engine answered or sent something else.")


class Pool:
    """The backends that may serve one model now. A snapshot: it is never changed, but replaced by a new Pool.

    `generations` is indexed by BackendId and has -1 for backends that are not eligible, or reuse no prefixes, so that
    the route table filters claims by one comparison. `reuses`: whether all of them reuse prefixes. `last_resort`: the
    circuits were overruled. `silent`: so were the probes, which timed out. `unknown`: no backend serves this model.
    """

    __slots__ = ("backends", "generations", "ids", "last_resort", "reuses", "silent", "unknown")

    def __init__(
        self, backends: Sequence[Backend], slots: int, *, last_resort: bool, unknown: bool, silent: bool = False
    ) -> None:
        self.backends = tuple(backends)
        self.ids = tuple(backend.id for backend in backends)
        self.generations = [-1] * slots
        self.reuses = True
        for backend in backends:
            believed = backend.reuse.believed
            self.reuses = self.reuses and believed
            self.generations[backend.id] = backend.generation if believed else -1
        self.last_resort = last_resort
        self.silent = silent
        self.unknown = unknown


def in_short(models: Sequence[str]) -> str:
    """Return the names of models, comma-separated; of a long list as many characters as a log line has room for."""
    names = ",".join(models)
    return names if len(names) <= MODELS_CHARS_MAX else f"{names[:MODELS_CHARS_MAX]}… ({len(models)} models)"


def all_of_sglang(backends: Iterable[Backend], model: str) -> bool:
    """Whether all backends that may serve `model` are SGLang's, by their model cards."""
    serving = False
    for backend in backends:  # in most fleets the first one decides
        if backend.catalog.serves(model):
            if "sglang" not in backend.catalog.owned_by:
                return False
            serving = True
    return serving
