"""The registry: who there is, who may be asked, what happens to them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ranvier_py.core.errors import BadRequest, NotFound
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import (
    Backend,
    BackendLimits,
    Circuit,
    Health,
    Outcome,
    Pool,
    ProbeResult,
    Registry,
)
from ranvier_py.core.routing.rates.work import InFlight, Load
from tests.examples import examples

UP = ProbeResult(True, status=200)
REFUSED = ProbeResult(False, refused=True, detail="refused")
TIMED_OUT = ProbeResult(False, detail="no answer")


def leaving(registry: Registry) -> int:
    """How many removed backends still have requests in flight."""
    return sum(backend is not None for backend in registry.ids.slots) - len(registry)


def serving(*models: str) -> ProbeResult:
    return ProbeResult(True, models=models, cards=tuple({"id": model} for model in models))


def started(at: float) -> ProbeResult:
    return ProbeResult(True, started_at=at)


def cluster(count: int, **limits: float) -> Registry:
    registry = Registry(BackendLimits(**limits))  # type: ignore[arg-type]
    for number in range(count):
        registry.add(f"http://10.0.0.{number + 1}:8000", name=f"e{number}")
    return registry


def lone() -> tuple[Registry, Backend]:
    registry = cluster(1)
    return registry, registry[BackendId(0)]


def names(pool: Pool) -> str:
    return " ".join(backend.name for backend in pool.backends)


def fail(registry: Registry, backend: Backend, times: int = 5, now: float = 0.0) -> None:
    for _ in range(times):
        registry.dispatched(backend, now)
        registry.finished(backend, Outcome.SERVER_ERROR, now)


def open_all(registry: Registry) -> None:
    for backend in registry:
        fail(registry, backend)


# -- who there is ----------------------------------------------------------------------------------------------------


def test_a_new_backend_may_be_asked_at_once_for_any_model() -> None:
    registry = Registry(BackendLimits())
    backend = registry.add("http://10.0.0.1:8000/")
    assert (backend.name, backend.url, backend.health) == ("10.0.0.1:8000", "http://10.0.0.1:8000", Health.UNKNOWN)
    assert registry.pools.pool("anything", 0).ids == (backend.id,)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "10.0.0.1:8000",
        "ftp://10.0.0.1",
        "http://",
        "http://host:99999",
        "http://host:0",
        "http://user:word@host:80",
        "http://host:80/path",
        "http://host:80/?q=1",
        "http://ho st:80",
        "http://[::1",
    ],
)
def test_what_is_no_origin_is_refused_and_changes_nothing(url: str) -> None:
    registry = Registry(BackendLimits())
    with pytest.raises(BadRequest):
        registry.add(url)
    assert len(registry) == registry.pools.version == 0


def test_a_path_in_a_url_is_refused_with_the_option_for_it() -> None:
    with pytest.raises(BadRequest, match=r"base_path=/openai/v1$"):
        Registry(BackendLimits()).add("http://gateway:8000/openai/v1/")


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("HTTP://Engine", "http://engine:80"),
        ("https://engine", "https://engine:443"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_backend_is_known_by_its_normal_url_and_its_name(url: str, normal: str) -> None:
    registry = Registry(BackendLimits())
    backend = registry.add(url, name="mine")
    assert backend.url == normal
    assert (
        registry.ids.find(url)
        is registry.ids.find(normal)
        is registry.ids.find("mine")
        is registry[backend.id]
        is backend
    )
    assert registry.ids.find("other") is registry.ids.find("http://other") is registry.ids.find("http://") is None


def test_a_second_backend_of_the_same_url_or_name_is_refused() -> None:
    registry = cluster(1)
    for url, name in [("http://10.0.0.1:8000", "new"), ("http://10.0.0.9:8000", "e0")]:
        with pytest.raises(BadRequest, match="there already"):
            registry.add(url, name=name)


@pytest.mark.parametrize("name", ["a b", "new\nline", "n" * 129, "ü"])
def test_a_name_that_cannot_stand_in_a_header_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="name"):
        Registry(BackendLimits()).add("http://host:80", name=name)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(BadRequest, match="weight"):
        Registry(BackendLimits()).add("http://host:80", weight=weight)


def test_the_registry_is_bounded() -> None:
    registry = cluster(2, backends_max=2)
    with pytest.raises(BadRequest, match="at most 2"):
        registry.add("http://10.0.0.9:8000")
    assert len(registry) == 2


def test_an_id_comes_back_under_a_new_generation_only() -> None:
    registry = cluster(2)
    old = registry.remove("e0")
    new = registry.add("http://10.0.0.1:8000")
    assert new.id == old.id
    assert new.generation > old.generation
    assert registry.pools.pool("", 0).generations[new.id] == new.generation


def test_the_id_of_a_removed_backend_is_kept_until_its_last_request_ended() -> None:
    """Else the late end of an old request would be counted for a newcomer."""
    registry, old = lone()
    registry.dispatched(old, 0)
    registry.remove("http://10.0.0.1:8000")
    assert (registry.pools.pool("", 0).ids, registry.pools.pool("", 0).unknown) == ((), False)
    newcomer = registry.add("http://10.0.0.1:8000")
    assert newcomer.id != old.id
    assert registry[old.id] is old
    assert leaving(registry) == 1
    assert registry.finished(old, Outcome.BROKEN, 0) == ()
    with pytest.raises(KeyError):
        registry[old.id]
    assert registry.add("http://10.0.0.2:8000").id == old.id
    assert newcomer.work.own.inflight == 0


def test_removing_or_draining_a_stranger_is_not_found() -> None:
    registry = cluster(1)
    for change in (registry.remove, registry.drain):
        with pytest.raises(NotFound):
            change("e7")


# -- who may be asked ------------------------------------------------------------------------------------------------


def test_a_pool_is_the_same_object_until_something_changes() -> None:
    registry = cluster(2)
    pool = registry.pools.pool("m", 0)
    registry.dispatched(registry[BackendId(0)], 0)
    registry.finished(registry[BackendId(0)], Outcome.SUCCESS, 0)
    registry.changes.probed(BackendId(0), UP, 0)
    assert registry.pools.pool("m", 1) is pool
    registry.drain("e0")
    assert registry.pools.pool("m", 1) is not pool


def test_a_draining_backend_gets_nothing_new_until_it_is_taken_back() -> None:
    registry = cluster(2)
    registry.drain("e0")
    pool = registry.pools.pool("m", 0)
    assert names(pool) == "e1"
    assert pool.generations == [-1, 1]
    registry.drain("e0", draining=False)
    assert names(registry.pools.pool("m", 0)) == "e0 e1"


def test_excluded_backends_are_left_out_of_this_pool_only() -> None:
    registry = cluster(3)
    assert names(registry.pools.pool("m", 0, exclude=[BackendId(1)])) == "e0 e2"
    assert names(registry.pools.pool("m", 0)) == "e0 e1 e2"


def test_the_same_list_again_in_another_order_changes_nothing() -> None:
    registry = cluster(1)
    registry.changes.probed(BackendId(0), serving("a", "b"), 0)
    pool = registry.pools.pool("a", 0)
    assert registry.changes.probed(BackendId(0), serving("b", "a"), 1) == []
    assert registry.pools.pool("a", 1) is pool
    assert len(pool.ids) == 1


def test_a_retry_may_reach_for_a_backend_behind_an_open_circuit_when_all_others_have_failed_it() -> None:
    registry = cluster(2)
    fail(registry, registry[BackendId(1)])
    pool = registry.pools.pool("", 0, exclude=[BackendId(0)])
    assert names(pool) == "e1"
    assert pool.last_resort


def test_three_failed_probes_take_a_backend_out_of_the_pool() -> None:
    registry = cluster(2)
    changes = [change for _ in range(3) for change in registry.changes.probed(BackendId(0), TIMED_OUT, 0)]
    assert [(change.name, change.what, change.after, change.why) for change in changes] == [
        ("e0", "health", "unhealthy", "no answer")
    ]
    assert names(registry.pools.pool("", 0)) == "e1"


def test_five_5xx_answers_take_a_backend_out_and_the_open_time_ends_in_one_trial() -> None:
    registry = cluster(2)
    bad = registry[BackendId(0)]
    fail(registry, bad)
    assert bad.circuit is Circuit.OPEN
    assert names(registry.pools.pool("", 29.9)) == "e1"
    assert names(registry.pools.pool("", 30)) == "e0 e1"
    registry.dispatched(bad, 30)
    assert names(registry.pools.pool("", 30)) == "e1"
    [change] = registry.finished(bad, Outcome.SUCCESS, 31)
    assert (change.what, change.before, change.after, change.why) == ("circuit", "trial", "closed", "success")
    assert names(registry.pools.pool("", 31)) == "e0 e1"


def test_when_every_circuit_is_open_all_living_backends_are_offered_as_a_last_resort() -> None:
    registry = cluster(3)
    for _ in range(3):
        registry.changes.probed(BackendId(1), REFUSED, 0)
    open_all(registry)
    pool = registry.pools.pool("", 1)
    assert names(pool) == "e0 e2"
    assert pool.last_resort
    assert registry.counters.last_resorts > 0


def test_a_last_resort_that_serves_gets_its_trial_before_its_time() -> None:
    registry = cluster(2)
    open_all(registry)
    registry.dispatched(registry[BackendId(1)], 1)
    registry.finished(registry[BackendId(1)], Outcome.SUCCESS, 2)
    pool = registry.pools.pool("", 2)
    assert names(pool) == "e1"
    assert not pool.last_resort


def test_when_nobody_lives_there_is_no_last_resort() -> None:
    registry = cluster(2)
    for backend in registry:
        for _ in range(3):
            registry.changes.probed(backend.id, REFUSED, 0)
    assert (registry.pools.pool("", 0).ids, registry.pools.pool("", 0).unknown) == ((), False)


# -- restarts --------------------------------------------------------------------------------------------------------


def test_a_new_start_time_is_a_new_generation() -> None:
    registry, backend = lone()
    registry.changes.probed(backend.id, started(1000.0), 0)
    pool = registry.pools.pool("", 0)
    assert registry.changes.probed(backend.id, started(1000.2), 1) == []
    [change] = registry.changes.probed(backend.id, started(2000.0), 2)
    assert (change.what, change.before, change.after) == ("generation", "1", "2")
    assert registry.pools.pool("", 2).generations == [2]
    assert pool.generations == [1]


@pytest.mark.parametrize(
    ("steps", "generation"),
    [
        pytest.param([UP, REFUSED, UP, UP], 2, id="back after refused connections"),
        pytest.param([started(1000.0), REFUSED, started(1000.0)], 1, id="the same start time after a refusal"),
        pytest.param([UP, TIMED_OUT, TIMED_OUT, TIMED_OUT, UP, UP], 1, id="a busy engine keeps its claims"),
        pytest.param([REFUSED, UP], 1, id="an engine that was still starting"),
        pytest.param(
            [Outcome.SUCCESS, REFUSED, started(1000.0), started(1000.0)],
            2,
            id="what served before the first good probe was gone since",
        ),
        pytest.param([REFUSED, Outcome.CONNECT_ERROR, started(1000.0)], 1, id="requests that never reached it"),
        pytest.param([Outcome.SUCCESS, TIMED_OUT, started(1000.0)], 2, id="a first start time after a time-out"),
        pytest.param([Outcome.SUCCESS, TIMED_OUT, UP], 1, id="no start time after a time-out"),
    ],
)
def test_what_probes_and_requests_find_is_another_process_or_the_same(
    steps: list[ProbeResult | Outcome], generation: int
) -> None:
    """A node that starts asks at once; where a process was not known yet, its claims would outlive it."""
    registry, backend = lone()
    for now, step in enumerate(steps):
        if isinstance(step, ProbeResult):
            registry.changes.probed(backend.id, step, now)
        else:
            registry.dispatched(backend, now)
            registry.finished(backend, step, now)
    assert backend.generation == generation
    assert registry.counters.backend_restarts == generation - 1


@pytest.mark.parametrize(
    ("before", "after", "generation"),
    [
        pytest.param(started(1000.0), [started(2000.0)], 2, id="another process"),
        pytest.param(started(1000.0), [started(1000.0)], 1, id="the same process at another address"),
        pytest.param(started(1000.0), [UP, UP, started(1000.0)], 1, id="its start time tells, even if it comes late"),
        pytest.param(UP, [UP, UP], 2, id="nothing tells, so it is another one, once"),
        pytest.param(UP, [TIMED_OUT, UP, UP], 2, id="at the first good probe"),
    ],
)
def test_behind_a_name_that_moved_is_another_process_unless_its_start_time_is_the_same(
    before: ProbeResult, after: list[ProbeResult], generation: int
) -> None:
    registry, backend = lone()
    began: list[int] = []
    registry.changes.restarted = lambda backend: began.append(backend.generation)
    registry.changes.probed(backend.id, before, 0)
    registry.changes.probed(backend.id, before, 1)
    backend.seen.process.name_moved()
    for now, result in enumerate(after, 2):
        registry.changes.probed(backend.id, result, now)
    assert backend.generation == generation
    assert began == [2][: generation - 1]


def test_a_restarted_engine_is_asked_again_without_waiting_for_the_open_time() -> None:
    registry = cluster(2)
    registry.changes.probed(BackendId(0), started(1000.0), 0)
    fail(registry, registry[BackendId(0)])
    changes = registry.changes.probed(BackendId(0), started(2000.0), 1)
    assert sorted(change.what for change in changes) == ["circuit", "generation"]
    assert names(registry.pools.pool("", 1)) == "e0 e1"


def test_a_probe_of_a_backend_that_is_gone_is_ignored() -> None:
    registry = cluster(1)
    registry.dispatched(registry[BackendId(0)], 0)
    registry.remove("e0")
    assert registry.changes.probed(BackendId(0), UP, 0) == ()
    assert registry.changes.probed(BackendId(77), UP, 0) == ()


# -- loads and statistics --------------------------------------------------------------------------------------------


def test_load_is_our_own_requests_and_those_of_the_peers() -> None:
    registry, backend = lone()
    registry.dispatched(backend, 0)
    registry.set_peer_load(backend.id, Load(5), 1.0)
    assert backend.load == 6
    registry.set_peer_load(backend.id, Load(2), 1.0)
    registry.finished(backend, Outcome.CANCELLED, 0)
    assert (backend.load, backend.work.own.inflight, backend.work.peers.requests) == (2, 0, 2)


def test_a_request_that_ends_twice_is_our_own_bug() -> None:
    registry = cluster(1)
    with pytest.raises(AssertionError, match="without beginning"):
        registry.finished(registry[BackendId(0)], Outcome.SUCCESS, 0)


def test_what_happened_is_counted() -> None:
    registry = cluster(2)
    registry.changes.probed(BackendId(0), ProbeResult(True, latency_s=0.01, models=("b", "a")), 0)
    fail(registry, registry[BackendId(0)])
    first = registry[BackendId(0)]
    assert (first.circuit, first.catalog.models) == (Circuit.OPEN, ("a", "b"))
    assert (first.seen.outcomes[Outcome.SERVER_ERROR], first.vitals.openings, first.seen.probes_ok) == (5, 1, 1)
    assert (registry.counters.backends_added, registry.counters.backends_removed, leaving(registry)) == (2, 0, 0)


def test_a_long_list_of_models_is_reported_in_short() -> None:
    registry = cluster(1)
    names = tuple(f"adapter-{number:04}" for number in range(4000))
    [*_, change] = registry.changes.probed(BackendId(0), ProbeResult(True, latency_s=0.01, models=names), 0)
    assert (change.what, change.before) == ("models", "unknown")
    assert change.after.startswith("adapter-0000,adapter-0001,")
    assert change.after.endswith("… (4000 models)")
    assert len(change.after) < 400
    [back] = registry.changes.probed(BackendId(0), ProbeResult(True, latency_s=0.01, models=("a", "b")), 1)
    assert (back.before, back.after) == (change.after, "a,b")


class AnyHistory(RuleBasedStateMachine):
    """Whatever happens in whatever order, a cached pool is what a fresh look would give."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(BackendLimits(backends_max=4, circuit_open_s=4))
        self.now = 0.0
        self.running: list[Backend] = []

    @rule(number=st.integers(0, 5))
    def add(self, number: int) -> None:
        taken = self.registry.ids.find(f"h{number}:80") is not None
        full = len(self.registry) + leaving(self.registry) >= 4
        if taken or full:
            with pytest.raises(BadRequest):
                self.registry.add(f"http://h{number}")
        else:
            self.registry.add(f"http://h{number}")

    @precondition(lambda self: len(self.registry))
    @rule(data=st.data())
    def remove_or_drain(self, data: st.DataObject) -> None:
        backend = data.draw(st.sampled_from(list(self.registry)))
        data.draw(st.sampled_from([self.registry.remove, self.registry.drain]))(backend.name)

    @precondition(lambda self: self.registry.pools.pool("m", self.now).ids)
    @rule(data=st.data())
    def dispatch(self, data: st.DataObject) -> None:
        backend = data.draw(st.sampled_from(self.registry.pools.pool("m", self.now).backends))
        self.registry.dispatched(backend, self.now)
        self.running.append(backend)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcome=st.sampled_from(Outcome))
    def finish(self, data: st.DataObject, outcome: Outcome) -> None:
        backend = data.draw(st.sampled_from(self.running))
        self.running.remove(backend)
        self.registry.finished(backend, outcome, self.now)

    @rule(
        id_=st.integers(0, 3), result=st.sampled_from([UP, REFUSED, TIMED_OUT, serving("m"), serving("n"), started(9)])
    )
    def probe(self, id_: int, result: ProbeResult) -> None:
        self.registry.changes.probed(BackendId(id_), result, self.now)

    @rule(step=st.floats(0.1, 5))
    def wait(self, step: float) -> None:
        self.now += step

    @invariant()
    def the_cached_pool_is_true(self) -> None:
        for model in ("m", "n", "x", ""):
            cached = self.registry.pools.pool(model, self.now)
            self.registry.pools.version += 1
            fresh = self.registry.pools.pool(model, self.now)
            assert (cached.ids, cached.generations, cached.last_resort, cached.unknown) == (
                fresh.ids,
                fresh.generations,
                fresh.last_resort,
                fresh.unknown,
            )

    @invariant()
    def every_request_is_counted_once(self) -> None:
        for backend in [*self.registry, *self.running]:
            assert backend.work.own.inflight == backend.load == self.running.count(backend)


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=examples(40), stateful_step_count=30)


# --- what peers report ------------------------------------------------------------------------------------------------


def test_one_peer_alone_does_not_take_a_backend_out() -> None:
    """One sick node could otherwise empty the pools of all others."""
    registry = Registry(BackendLimits())
    backend = registry.add("http://127.0.0.1:9001")
    assert not registry.changes.doubted(backend.id, 1, 1.0)
    assert registry.pools.pool("", 1.0).ids == (backend.id,)


def test_two_peers_or_one_and_our_own_failure_take_it_out_until_our_own_probes_succeed() -> None:
    for failures, observers in ((0, 2), (1, 1)):
        registry = Registry(BackendLimits())
        backend = registry.add("http://127.0.0.1:9001")
        for _ in range(failures):
            registry.changes.probed(backend.id, ProbeResult(ok=False), 1.0)
        (change,) = registry.changes.doubted(backend.id, observers, 2.0)
        assert (change.what, change.after) == ("health", "unhealthy")
        assert registry.pools.pool("", 2.0).silent == (failures == 0), "peers don't say whether they were refused"
        registry.changes.probed(backend.id, ProbeResult(ok=True), 3.0)
        assert backend.health is Health.UNHEALTHY
        registry.changes.probed(backend.id, ProbeResult(ok=True), 4.0)
        assert registry.pools.pool("", 4.0).ids == (backend.id,)
        assert not registry.pools.pool("", 4.0).silent


def test_what_is_pending_and_what_decodes_is_counted_from_start_to_end() -> None:
    registry, backend = lone()
    one, other = InFlight(500), InFlight(70)
    registry.dispatched(backend, 0.0, one)
    registry.dispatched(backend, 0.0, other)
    assert (backend.work.pending_tokens, backend.work.decoding) == (570, 0)
    assert backend.work.waiting == 2
    assert backend.work.prefilled(one, 0.5) == 0.5
    assert backend.work.waiting == 1
    assert (backend.work.pending_tokens, backend.work.decoding) == (70, 1)
    registry.finished(backend, Outcome.SUCCESS, 1.0, one)
    registry.finished(backend, Outcome.CANCELLED, 1.0, other)
    assert (backend.work.pending_tokens, backend.work.decoding) == (0, 0)


def test_the_success_rate_falls_by_faults_and_comes_back_by_successes_and_ignores_what_proves_nothing() -> None:
    registry, backend = lone()

    def end(outcome: Outcome, times: int) -> float:
        for _ in range(times):
            registry.dispatched(backend, 0.0)
            registry.finished(backend, outcome, 0.0)
        return backend.seen.success_rate

    assert end(Outcome.SUCCESS, 3) == 1.0
    assert end(Outcome.CANCELLED, 3) == 1.0
    assert end(Outcome.OVERLOADED, 3) == 1.0
    failed = end(Outcome.SERVER_ERROR, 10)
    assert 0.85 < failed < 0.95
    assert failed < end(Outcome.SUCCESS, 10) < 1.0


def test_what_peers_have_at_a_backend_counts_beside_our_own() -> None:
    registry, backend = lone()
    registry.dispatched(backend, 0.0, InFlight(500))
    registry.set_peer_load(backend.id, Load(5, 2, 3000), 1.0)
    assert (backend.load, backend.work.waiting, backend.work.decoding, backend.work.pending_tokens) == (6, 3, 3, 3500)
    assert backend.work.own.load == Load(1, 1, 500)
    registry.set_peer_load(backend.id, Load(0), 1.0)
    assert (backend.load, backend.work.waiting, backend.work.decoding, backend.work.pending_tokens) == (1, 1, 0, 500)


def test_a_queue_moves_when_a_first_token_comes_whoever_sent_the_request() -> None:
    """An engine serves our requests and those of peers in turn: what it has done of theirs is not to be waited for."""
    registry, backend = lone()
    registry.set_peer_load(backend.id, Load(1, 1, 500), 10.0)
    assert backend.work.progress_at == 10.0, "nobody else waits: it is the first"
    ours = InFlight(300)
    registry.dispatched(backend, 11.0, ours)
    assert backend.work.progress_at == 10.0, "it waits behind the peer's"
    registry.set_peer_load(backend.id, Load(2, 2, 900), 12.0)
    assert backend.work.progress_at == 10.0, "who comes moves nothing"
    registry.set_peer_load(backend.id, Load(2, 1, 400), 13.0)
    assert backend.work.progress_at == 13.0
    registry.set_peer_load(backend.id, Load(3, 1, 200), 14.0)
    assert backend.work.progress_at == 14.0, "one came and one had its first token since the last report"
    backend.work.prefilled(ours, 15.0)
    assert backend.work.progress_at == 15.0
    registry.set_peer_load(backend.id, Load(3, 0, 0), 16.0)
    registry.dispatched(backend, 17.0, InFlight(300))
    assert backend.work.progress_at == 17.0
    registry.set_peer_load(backend.id, Load(4, 1, 700), 18.0)
    assert backend.work.progress_at == 17.0, "it waits behind ours"
