"""Decides when an engine is asked for which of its pages, and reads health, model list and start time from them. Pure.

Rule: one health probe every interval, sooner while recent probes differ, so that three failures take seconds. Model
list and start time are asked for seldom, and again with the first good probe after a failure: it may be another
process. A page that an engine lacks is not asked for again until a probe fails. Metrics: an engine renders its page in
the process that serves requests, and twenty looks a second have made vLLM unresponsive (llm-d-router#1842): so the
interval grows with the time that a page takes, doubles with each failure, and is long where there is no such page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from random import Random
from typing import Any, NamedTuple

import orjson

from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics, read_metrics, read_start_time, signs_of
from ranvier_py.core.engine_cache.sources.engine_pages import read_marks
from ranvier_py.core.engine_cache.sources.event_values import EngineLoad
from ranvier_py.core.engine_cache.sources.publishers import RANKS_MAX
from ranvier_py.core.metrics import counter
from ranvier_py.core.options import SECONDS_MAX, Options, option, seconds
from ranvier_py.core.pauses import doubled
from ranvier_py.core.prompts.body_json import engine_json
from ranvier_py.core.routing.backend import ProbeResult
from ranvier_py.core.routing.processes.engine_marks import EngineMarks
from ranvier_py.core.routing.wanted.found_backend import authorization_of

HEALTH_BYTES_MAX = 64 * 1024  # engines answer with nothing or a line
MODELS_BYTES_MAX = 2 * 1024 * 1024  # about 10,000 adapters
METRICS_BYTES_MAX = 2 * 1024 * 1024  # vLLM's page is below 200 kB for one model; each adapter and rank adds some
MODELS_MAX = 4096  # per backend; more is a broken list
ALIVE_STATUSES = frozenset((401, 403))  # an engine that asks for a key is alive
LOOP_STATUS = 508
PROBE_FIELD = b"x-ranvier-probe"
"""By which a node knows a probe of its own, should it get one; it then answers with that status."""

MISSING_STATUSES = frozenset((404, 405))
KNOWN_STATUSES = (200, 404, 405)
"""Statuses that settle whether an engine has a page. With any other, the engine or a proxy before it is only busy
(429) or refuses us (401), and what it said there before stays."""
METRICS_PATHS = ("/metrics", "/prometheus/metrics")
"""TensorRT-LLM answers JSON at the first path, and the format that we read at the second."""

STARTS_AFTER_CHANGE = 5
"""Probes that ask for the start time at first and once it has changed: of two processes behind one URL, each of them
finds the other one with an even chance. After a restart they cost five pages."""

LOAD_LIFE_S = 10.0
"""A rank reports its load many times a second: one that is silent for this long is gone, as after a restart."""


@dataclass(slots=True)
class PollCounters:
    """What was polled since the start."""

    probes: int = counter("Health probes that were sent to engines.")
    probes_not_made: int = counter("Health probes for which this node had no descriptor, port or memory.")
    metrics_pages: int = counter("Requests for the metrics pages of engines.")
    metrics_failed: int = counter("Metrics pages of engines that did not come in time, were too long, or were refused.")
    metrics_unknown: int = counter("Metrics pages of engines without a metric that this node knows.")
    loads_reported: int = counter("Reports of engines about their queues that were used in place of a metrics page.")
    discoveries: int = counter("Requests to engines for where they publish their KV events.")


class Page(NamedTuple):
    """The answer to one GET. `body` is cut at its bound, and `is_cut` tells whether it was. Status 0: no answer."""

    status: int
    body: bytes
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class PollOptions(Options):
    """When engines are asked, and for how long. Times in seconds."""

    SECTION = "Backends"

    probe_interval_s: float = seconds(5.0, "Time between two health probes of one backend.")
    probe_timeout_s: float = seconds(
        3.0,
        "A probe that takes longer has failed, unless the engine sent something else meanwhile. An engine that only "
        "times out is still asked if no other serves the model.",
    )
    hang_s: float = seconds(
        8.0,
        "An engine with requests in flight hangs if it sends not a byte of anything, probes included, for so long, or "
        "for twice the predicted time of the work there. Requests without a first event then move where there is room.",
    )
    metrics_interval_s: float = option(
        5.0,
        "Time between two looks at the metrics of one engine: size of its cache, hits, queues. It grows where the page "
        "is slow. One node of a cluster looks at each engine. 0: none does.",
        most=SECONDS_MAX,
        key="engine_metrics_interval_s",
    )
    jitter: float = option(0.2, most=0.99)  # share of an interval, added or taken: keeps nodes and engines out of step
    probes_per_s_max: float = option(5.0, above=0)  # of all healthy backends together; with more the interval grows
    unsettled_interval_s: float = seconds(1.0)  # while the last answers differ; never above probe_interval_s
    unsettled_probes: int = option(3)  # probes in a row at that interval
    probe_gap_s: float = seconds(0.2)  # least time between two probes of one backend
    probes_at_once_max: int = option(64, least=1)  # bounds file descriptors
    models_interval_s: float = seconds(
        60.0,
        "Time between two looks at the model list of one engine: adapters come and go at run time. A request for a "
        "model that none lists, or an engine's answer that it lacks one, has them looked at sooner.",
    )
    start_time_interval_s: float = seconds(30.0)
    metrics_interval_max_s: float = seconds(60.0)  # after failures, unless metrics_interval_s is longer
    metrics_unknown_interval_s: float = seconds(600.0)  # without a page: the engine may be replaced by one that has it
    metrics_share_max: float = option(0.02, above=0, most=1.0)  # share of an engine's time that its page may take
    metrics_timeout_s: float = seconds(3.0)  # an engine in trouble is not to be asked more
    metrics_at_once_max: int = option(8, least=1)
    publishers_interval_s: float = seconds(60.0)  # the engine may have been restarted with other ports
    publishers_unanswered_interval_s: float = seconds(5.0)
    publishers_timeout_s: float = seconds(5.0)  # for one page
    publishers_gap_s: float = seconds(1.0)  # least time between two looks at one engine

    def jittered(self, interval_s: float, rng: Random) -> float:
        return interval_s * (1 + self.jitter * (2 * rng.random() - 1))


class HealthSchedule:
    """Schedules the probes of one backend. `ok` is the result of the last one; None before the first."""

    __slots__ = (
        "_models_at",
        "_start_at",
        "_started_at",
        "_starts_due",
        "_unsettled",
        "has_health",
        "has_metrics",
        "ok",
        "options",
        "wants_apis",
    )

    def __init__(self, options: PollOptions) -> None:
        self.options = options
        self._unsettled = 0  # probes still to come at the short interval
        self._models_at = self._start_at = -inf  # times when these were last known, or asked for
        self._started_at: float | None = None  # the start time that was read last
        self._starts_due = STARTS_AFTER_CHANGE  # probes still to come that ask for it, since it changed
        self.ok: bool | None = None
        self.has_health = True
        self.has_metrics = True
        self.wants_apis = True  # what it serves is asked of each process once

    def wants_models(self, now: float) -> bool:
        return not self.ok or now - self._models_at >= self.options.models_interval_s

    def models_known(self, now: float) -> None:
        self._models_at = now

    def wants_start_time(self, now: float) -> bool:
        """Whether the start time is due. If so, it counts as asked for."""
        late = now - self._start_at >= self.options.start_time_interval_s
        if not self.has_metrics or (self.ok and not late and self._starts_due == 0):
            return False
        self._start_at, self._starts_due = now, max(self._starts_due - 1, 0)
        return True

    def start_read(self, started_at: float | None) -> None:
        """Note a start time. Where it changed, the next probes show whether it changes back: several processes."""
        if started_at is not None:
            changed = self._started_at is not None and started_at != self._started_at
            self._starts_due = STARTS_AFTER_CHANGE if changed else self._starts_due
            self._started_at = started_at

    def moved(self) -> None:
        """Ask for everything with the next probe: another process may answer it."""
        self._models_at = self._start_at = -inf
        self.has_health = self.has_metrics = self.wants_apis = True

    def judged(self, ok: bool) -> None:
        """Note the result of a probe. A failure forgets which pages the engine lacks."""
        if self.ok is None and ok:
            self._unsettled = 0
        else:
            self._unsettled = self.options.unsettled_probes if ok is not self.ok else max(self._unsettled - 1, 0)
        if not ok:
            self.has_health = self.has_metrics = self.wants_apis = True
        self.ok = ok

    def interval_s(self, backends: int) -> float:
        """Seconds to the next probe. Healthy backends share a budget of probes: of many, each waits longer."""
        options = self.options
        if self._unsettled > 0:
            return min(options.unsettled_interval_s, options.probe_interval_s)
        return max(options.probe_interval_s, backends / options.probes_per_s_max if self.ok else 0.0)


class MetricsSchedule:
    """Schedules looks at one engine's metrics page, and adds what the engine's event stream says of its queue."""

    __slots__ = ("_failures", "_loads", "_page", "_reported_at", "_took_s", "_unknown", "options", "path")

    def __init__(self, options: PollOptions) -> None:
        self.options = options
        self._failures = 0  # in a row
        self._took_s = 0.0
        self._unknown = False
        self._page = EngineMetrics()  # the last page that said anything
        self._reported_at = -inf  # when metrics were last passed on
        self._loads: dict[int, tuple[EngineLoad, float]] = {}  # by rank, each with its time
        self.path = METRICS_PATHS[0]

    def looked(self, metrics: EngineMetrics | None, took_s: float, now: float) -> bool:
        """Note the result of a look; None: no answer in time. Returns whether the page says anything."""
        self._took_s = took_s
        self._failures = 0 if metrics is not None else self._failures + 1
        self._unknown = metrics is not None and not metrics.known
        if metrics is None or self._unknown:
            return False
        self._page, self._reported_at = metrics, now
        return True

    def interval_s(self) -> float:
        """Seconds to the next look."""
        options, wanted_s = self.options, self.options.metrics_interval_s
        if self._unknown:
            return max(wanted_s, options.metrics_unknown_interval_s)
        patient_s = doubled(wanted_s, self._failures, max(wanted_s, options.metrics_interval_max_s))
        return max(patient_s, self._took_s / options.metrics_share_max)

    def load_reported(self, load: EngineLoad, now: float) -> EngineMetrics | None:
        """Take an engine's own count of its queue (SGLang's LoadStat) as a look. None: unusable, or too soon.

        Other values are those of the last page, if any: SGLang has a page only if it is started so.
        """
        rank = load.rank or 0
        if load.running is None or rank >= RANKS_MAX:
            return None
        self._loads[rank] = load, now
        if now < self._reported_at + self.options.metrics_interval_s:
            return None
        self._reported_at = now
        loads = [each for each, at in self._loads.values() if now < at + LOAD_LIFE_S]
        capacity_tokens = sum([each.tokens_max or 0 for each in loads])
        return replace(
            self._page,
            running=sum([each.running or 0 for each in loads]),
            waiting=sum([each.waiting or 0 for each in loads]),
            capacity_tokens=self._page.capacity_tokens or capacity_tokens or None,
        )


def figures_of(page: Page, rank: int | None) -> EngineMetrics:
    """Return what a metrics page says of an engine, or of one rank of it."""
    body = page.body if page.status == 200 and not page.is_cut else b""
    return read_metrics(body, rank)


class ProcessPage(NamedTuple):
    """What a metrics page shows of the process; None: no page was read, or it does not show that."""

    started_at: float | None = None
    figures: EngineMetrics = EngineMetrics()
    marks: EngineMarks | None = None


def read_process(page: Page, rank: int | None) -> ProcessPage:
    """Return what a metrics page shows of the process, or of one rank of it."""
    if page.status != 200:
        return ProcessPage()
    started_at, figures = read_start_time(page.body), figures_of(page, rank)
    marks = EngineMarks() if page.is_cut else read_marks(page.body, figures, rank)
    return ProcessPage(started_at, figures, marks)


def own_fields(key: Callable[[], str], own_probe: bytes) -> dict[bytes | str, bytes | str]:
    """Return the fields by which an engine knows this node, and the node its own probe."""
    authorization = authorization_of(key())
    signed: dict[bytes | str, bytes | str] = {PROBE_FIELD: own_probe} if own_probe else {}
    return {**signed, "authorization": authorization} if authorization else signed


def failed_probe(page: Page, latency_s: float) -> ProbeResult:
    """Return the result of a probe whose answer is no living engine's."""
    loops = page.status == LOOP_STATUS
    detail = "this address leads to the node itself" if loops else f"status {page.status}"
    return ProbeResult(False, loops=loops, status=page.status, latency_s=latency_s, detail=detail)


def probe_result(
    page: Page,
    latency_s: float,
    listed: tuple[tuple[str, ...] | None, tuple[Mapping[str, Any], ...]],
    process: ProcessPage,
    lacks: frozenset[bytes] | None = None,
) -> ProbeResult:
    """Return the result of a good probe: `listed` models with their cards, the paths that it `lacks`, and what a
    metrics page says, if any."""
    started_at, known, marks = process
    models, cards = listed
    found = ProbeResult(
        ok=True,
        status=page.status,
        latency_s=latency_s,
        models=models,
        cards=cards,
        lacks=lacks,
        started_at=started_at,
        marks=marks,
        hybrid=known.hybrid,
    )
    if not known.known:
        return found
    found = replace(found, ranks=known.ranks, placeable=known.placeable)
    return replace(found, signs=signs_of(known), caches=known.caches, hit_tokens=known.hit_tokens)


class KeyRefusals:
    """The pages of one engine that it refuses to our key, or to us without one, as last answered. Bound: the paths."""

    __slots__ = ("_refused",)

    def __init__(self) -> None:
        self._refused: dict[str, int] = {}

    def answered(self, path: str, status: int) -> None:
        if status in ALIVE_STATUSES:
            self._refused[path] = status
        else:
            self._refused.pop(path, None)

    @property
    def text(self) -> str:
        """Which pages, with their statuses; "" if there are none."""
        return ", ".join(f"{status} at {path}" for path, status in sorted(self._refused.items()))


def is_alive(page: Page) -> bool:
    return 200 <= page.status < 300 or page.status in ALIVE_STATUSES


def read_models(page: Page) -> tuple[tuple[str, ...] | None, tuple[Mapping[str, Any], ...]]:
    """Return names and entries of a /v1/models page; (None, ()) if it has none.

    A page with too many parts is not read. Entries without a name are skipped, and members that JSON cannot
    express again, because the entries of all engines are served in one list.
    """
    if page.status != 200 or page.is_cut:
        return None, ()
    listed = engine_json(page.body)
    data = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(data, list):
        return None, ()
    found = [card for card in data[:MODELS_MAX] if isinstance(card, dict) and isinstance(card.get("id"), str)]
    cards = tuple({name: value for name, value in card.items() if is_json(name, value)} for card in found)
    cards = tuple(card for card in cards if "id" in card)
    return (tuple(card["id"] for card in cards), cards) if cards else (None, ())


def is_json(name: str, value: object) -> bool:
    """Whether a member can be written as JSON again: not with a lone surrogate, or nested too deeply."""
    try:
        orjson.dumps({name: value})
    except (TypeError, RecursionError):  # orjson's own error is the former
        return False
    return True
