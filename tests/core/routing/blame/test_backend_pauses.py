"""Who is passed over for a while, by whom."""

from __future__ import annotations

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import Registry
from ranvier_py.core.routing.blame.backend_pauses import CREDENTIALS_MAX, Pauses
from ranvier_py.core.routing.health import BackendLimits

A, B = BackendId(0), BackendId(1)


def of(pauses: Pauses, credential: bytes, now: float) -> tuple[BackendId, ...]:
    return pauses.of(lambda: credential, now)


def test_a_pause_for_everybody_ends_by_itself() -> None:
    pauses = Pauses()
    assert pauses.over_at <= 0.0
    pauses.begin(A, 5.0)
    pauses.begin(A, 3.0)  # the longer one counts
    assert of(pauses, b"anybody", 4.9) == (A,)
    assert pauses.left_s(A, 4.0) == 1.0
    assert of(pauses, b"anybody", 5.0) == ()
    assert pauses.over_at == 5.0


def test_a_pause_for_one_credential_concerns_no_other() -> None:
    pauses = Pauses()
    pauses.begin(B, 5.0, b"one")
    pauses.begin(A, 2.0)
    assert of(pauses, b"one", 1.0) == (A, B)
    assert of(pauses, b"other", 1.0) == (A,)
    assert of(pauses, b"one", 3.0) == (B,)
    assert pauses.left_s(B, 1.0) == 0.0
    assert of(pauses, b"one", 5.0) == ()


def test_no_credential_is_looked_at_while_none_was_limited() -> None:
    pauses = Pauses()
    pauses.begin(A, 5.0)

    def unwanted() -> bytes:
        raise AssertionError

    assert pauses.of(unwanted, 1.0) == (A,)


def test_credentials_are_bounded_and_what_is_dropped_is_counted() -> None:
    pauses = Pauses()
    for number in range(CREDENTIALS_MAX + 2):
        pauses.begin(A, 5.0, b"%d" % number)
    assert pauses.counters.dropped == 2
    assert of(pauses, b"1", 1.0) == ()
    assert of(pauses, b"2", 1.0) == (A,)
    assert pauses.counters.begun == {"credential": CREDENTIALS_MAX + 2}


def test_backends_to_be_avoided_are_in_the_pool_only_if_no_other_is() -> None:
    registry = Registry(BackendLimits())
    for number in range(2):
        registry.add(f"http://10.0.0.{number + 1}:8000")
    assert registry.pools.pool("", 0.0, (), (A,)).ids == (B,)
    assert registry.pools.pool("", 0.0, (), (A,)) is registry.pools.pool("", 0.0, (), (A,))
    assert registry.pools.pool("", 0.0, (), (A, B)).ids == (A, B)
    assert registry.pools.pool("", 0.0, [B], (A,)).ids == (A,)
    assert registry.pools.pool("", 0.0).ids == (A, B)


def test_a_backend_that_is_removed_or_restarted_pauses_no_more() -> None:
    registry = Registry(BackendLimits())
    backend = registry.add("http://10.0.0.1:8000", name="e0")
    registry.pauses.begin(backend.id, 30.0)
    registry.changes.restart(backend, "seen", 1.0)
    assert of(registry.pauses, b"", 1.0) == ()
    registry.pauses.begin(backend.id, 30.0)
    registry.remove("e0")
    assert of(registry.pauses, b"", 1.0) == ()
