"""What is lent to groups of limits for a slot, so that most requests need no look at their counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.access.identity import Identity, Tenant
from ranvier_py.core.access.limit_values import Budget, CalendarWindow, Limits, Unit
from ranvier_py.core.access.limits.count import SLOT_S
from ranvier_py.core.access.limits.limiter import NOTHING, Grant
from ranvier_py.core.access.limits.meter_groups import Excess, MeterGroup, Meters
from ranvier_py.core.access.limits.meters import Amounts
from tests.core.access.limits.limit_net import LimitNet, meters

LIMIT = 1000
BUDGET = Budget(1000, CalendarWindow.MONTH, Unit.COST)
steps = st.lists(
    st.tuples(st.integers(0, 3), st.floats(1, 40), st.floats(0, 60), st.floats(0, 0.2), st.booleans()), max_size=150
)


@given(steps)
def test_keys_that_share_a_limit_take_together_no_more_than_it_whatever_is_lent_to_each(
    work: list[tuple[int, float, float, float, bool]],
) -> None:
    net = LimitNet(1)
    limiter, now = net.nodes[1].limiter, net.now
    shared = meters(tokens_per_minute=LIMIT, requests_per_minute=100)
    keys = [MeterGroup((*shared, *meters(uncached_tokens_per_minute=400 + key))) for key in range(4)]
    held = list[tuple[Grant, float]]()
    for key, need, used, wait_s, settles in work:
        now += wait_s
        found = limiter.reserve(keys[key], Amounts(need, need), now)
        if isinstance(found, Grant):
            held.append((found, need))
        assert sum(tokens for _, tokens in held) <= LIMIT + 1e-6
        assert len(held) <= 100
        if settles and held:
            grant, tokens = held.pop(0)
            took = min(used, tokens)
            limiter.settle(Amounts(took, took), grant)
            held.append((grant, took))


def test_a_peers_counts_are_taken_from_what_was_lent() -> None:
    net = LimitNet(2)
    limits = meters(tokens_per_minute=100_000)
    group = net.nodes[1].groups.setdefault(limits, MeterGroup(limits, limits))
    assert isinstance(net.reserve(1, limits, 10), Grant)
    before = net.nodes[1].limiter.shown(group, net.now)
    net.settle(2, net.decided(2, limits, 5000), 5000)
    net.run(0.15)
    assert net.nodes[1].limiter.shown(group, net.now) == before - 5000


def test_cost_is_lent_apart_since_a_token_may_cost_more_than_one() -> None:
    net = LimitNet(1)
    limiter = net.nodes[1].limiter
    group = MeterGroup((*meters(tokens_per_minute=1_000_000), *meters(budget=(BUDGET,))))
    grants = [limiter.reserve(group, Amounts(1.0, 1.0, 30.0), net.now) for _ in range(50)]
    assert sum(isinstance(one, Grant) for one in grants) == 33


def test_the_first_look_in_a_slot_is_for_all_limits_of_a_request_once_it_is_known_how_much_these_vary() -> None:
    net = LimitNet(1)
    limiter, limits = net.nodes[1].limiter, Limits(requests_per_minute=9999, tokens_per_minute=99_999)
    found = Meters().of(Identity(Tenant("a", limits)))
    for now in (net.now, net.now + SLOT_S):
        assert isinstance(head := limiter.reserve(found.first, NOTHING, now), Grant)
        assert (found.rest.until > now) == (now > net.now)
        assert limiter.grow(head, found.rest, Amounts(100.0, 100.0), now, Excess(50.0**2, 200.0))
