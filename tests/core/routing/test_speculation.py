"""Requests in flight are found by those that follow, and leave nothing behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.placement import Holder
from ranvier_py.core.routing.route_table import Trust
from ranvier_py.core.routing.speculation import Speculation

ONE, TWO = BackendId(1), BackendId(2)
GENERATIONS = (0, 5, 5)
CHAIN = [(64, 40, 41), (32, 30, 0), (16, 20, 21)]


def holders(speculation: Speculation, fingerprint: int) -> set[BackendId]:
    return {holder.backend for holder in speculation.match([(16, fingerprint, 0)], (0, 0, 0), wanted=9)}


def test_a_request_with_the_same_new_prefix_finds_the_one_in_flight() -> None:
    speculation = Speculation()
    speculation.add([30, 21], ONE)
    assert speculation.match(CHAIN, GENERATIONS, 1) == [Holder(ONE, 32, Trust.LOCAL)]
    assert speculation.match(CHAIN[2:], GENERATIONS, 1) == [Holder(ONE, 16, Trust.LOCAL)]
    assert speculation.match([(8, 1, 2)], GENERATIONS, 1) == []


def test_each_backend_comes_once_at_its_deepest_depth_and_no_more_than_wanted() -> None:
    speculation = Speculation()
    speculation.add([30, 20], ONE)
    speculation.add([20], TWO)
    both = [Holder(ONE, 32, Trust.LOCAL), Holder(TWO, 16, Trust.LOCAL)]
    assert speculation.match(CHAIN, GENERATIONS, 5) == both
    assert speculation.match(CHAIN, GENERATIONS, 1) == both[:1]


def test_what_is_no_deeper_than_is_known_already_is_not_read() -> None:
    speculation = Speculation()
    speculation.add([30], ONE)
    assert speculation.match(CHAIN, GENERATIONS, 1, deeper_than=31) == [Holder(ONE, 32, Trust.LOCAL)]
    assert speculation.match(CHAIN, GENERATIONS, 1, deeper_than=32) == []


def test_backends_that_are_not_eligible_are_passed_over() -> None:
    speculation = Speculation()
    speculation.add([40], ONE)
    speculation.add([41], TWO)
    assert speculation.match(CHAIN, (0, -1, 5), 1) == [Holder(TWO, 64, Trust.LOCAL)]
    assert speculation.match(CHAIN, (0,), 1) == []


def test_a_prefix_stays_claimed_until_its_last_attempt_has_ended() -> None:
    speculation = Speculation()
    first, second = speculation.add([30], ONE), speculation.add([30], ONE)
    speculation.remove(first, ONE)
    assert holders(speculation, 30) == {ONE}
    speculation.remove(second, ONE)
    assert holders(speculation, 30) == set()
    assert len(speculation) == 0


def test_an_attempt_that_finds_no_room_claims_nothing_and_is_counted() -> None:
    speculation = Speculation(capacity=3)
    claimed = speculation.add([1, 2], ONE)
    assert speculation.add([3, 4], TWO) == ()
    assert speculation.counters.dropped == 1
    assert len(speculation) == 2
    speculation.remove(claimed, ONE)
    assert speculation.add([3, 4, 0], TWO) == [3, 4]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), max_size=5), st.integers(0, 2).map(BackendId), st.integers(0, 5), st.booleans()
        ),
        max_size=30,
    )
)
def test_holders_are_always_those_of_the_attempts_that_are_left(
    steps: list[tuple[list[int], BackendId, int, bool]],
) -> None:
    """A plain list of open attempts is the model."""
    speculation = Speculation(capacity=20)
    attempts: list[tuple[Sequence[int], BackendId]] = []
    for fps, backend, which, ends in steps:
        if ends and attempts:
            speculation.remove(*attempts.pop(which % len(attempts)))
        elif claimed := speculation.add(fps, backend):
            attempts.append((claimed, backend))
        counts = Counter((fp, backend) for claimed, backend in attempts for fp in claimed)
        for fp in range(1, 6):
            assert holders(speculation, fp) == {holder for known, holder in counts if known == fp}
        counters = speculation.counters
        assert (counters.attempts, counters.fingerprints) == (len(attempts), counts.total())
        assert counters.fingerprints <= 20, "the capacity"
    for attempt in attempts:
        speculation.remove(*attempt)
    assert len(speculation) == 0
