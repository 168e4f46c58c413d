"""Limits over several nodes: what is granted far from a limit, near it, and while nodes are away."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.access.identity import Identity, Tenant
from ranvier_py.core.access.limit_values import Budget, CalendarWindow, Limits, Mode
from ranvier_py.core.access.limits.count import MINUTE_SLOTS, SLOT_S, CountRow
from ranvier_py.core.access.limits.homes import AskRow
from ranvier_py.core.access.limits.limit_gossip import LimitCounts, LimitQuestion
from ranvier_py.core.access.limits.limiter import ASK_S, Grant, HomeQuestion, Limiter, Refusal
from ranvier_py.core.access.limits.meter_groups import Excess, IdentityMeters, MeterGroup, Meters
from ranvier_py.core.access.limits.meters import Amounts, LimitSpan, meters_of
from ranvier_py.core.access.limits.shares import BEAT_S, BEATS_LOST, LOSS_MAX, MISTAKEN_MAX, STALE_S
from tests.core.access.limits.limit_net import LimitNet, meters

TOKENS = meters(tokens_per_minute=1000)
FEW = meters(requests_per_minute=5)
MONTH = meters(budget=(Budget(1000, CalendarWindow.MONTH),))


def granted(*found: object) -> int:
    return sum(isinstance(one, Grant) for one in found)


def test_far_from_a_limit_a_node_decides_at_once_and_its_peers_know_within_a_moment() -> None:
    net = LimitNet(4)
    assert isinstance(net.reserve(1, TOKENS, 30), Grant)
    net.run(0.15)
    assert [net.taken(session, *TOKENS) for session in net.nodes] == [30] * 4
    assert not [message for *_, message, _ in net.sent if isinstance(message, LimitQuestion)]


@pytest.mark.parametrize("loss", [0.0, 0.2])
@pytest.mark.parametrize("limits", [TOKENS, FEW, MONTH, meters(concurrent=5)], ids=str)
def test_requests_at_all_nodes_at_once_get_together_no_more_than_the_limit(limits: tuple, loss: float) -> None:
    net = LimitNet(8, loss=loss)
    tokens = 200.0
    found = [net.reserve(session, limits, tokens) for session in net.nodes for _ in range(4)]
    net.run(0.2)
    outcomes = [one.outcome if isinstance(one, HomeQuestion) else one for one in found]
    assert granted(*outcomes) == 5
    assert len(outcomes) == granted(*outcomes) + sum(isinstance(one, Refusal) for one in outcomes)


def test_what_is_settled_below_its_reservation_is_free_for_others_at_once() -> None:
    net = LimitNet(3)
    first = net.decided(1, TOKENS, 900)
    assert isinstance(net.decided(2, TOKENS, 200), Refusal)
    net.settle(1, first, 100)
    net.run(0.2)
    assert isinstance(net.decided(2, TOKENS, 800), Grant)
    assert isinstance(net.decided(3, TOKENS, 200), Refusal)


def test_a_grant_is_settled_once() -> None:
    net = LimitNet(1)
    grant = net.decided(1, TOKENS, 900)
    assert isinstance(grant, Grant)
    for _ in range(2):
        net.settle(1, grant, 100)
        net.nodes[1].limiter.release(grant)
    assert net.taken(1, *TOKENS) == 100


def test_a_refusal_has_the_time_until_the_request_fits() -> None:
    net = LimitNet(2)
    net.settle(1, net.decided(1, TOKENS, 600), 600)
    net.run(20.0)
    net.settle(1, net.decided(1, TOKENS, 300), 300)
    refusal = net.decided(2, TOKENS, 200)
    assert isinstance(refusal, Refusal)
    assert 39 < refusal.retry_after_s < 42
    net.run(refusal.retry_after_s)
    assert isinstance(net.decided(2, TOKENS, 200), Grant)


def test_a_budget_that_is_spent_is_open_again_when_its_window_begins_anew() -> None:
    net = LimitNet(1)
    limits = meters(budget=(Budget(1000, CalendarWindow.HOUR),))
    net.settle(1, net.decided(1, limits, 600), 900)
    refusal = net.decided(1, limits, 200)
    assert isinstance(refusal, Refusal)
    assert refusal.retry_after_s == 3600 - (1_778_000_000 + net.now) % 3600
    net.run(refusal.retry_after_s + 0.1)
    assert isinstance(net.decided(1, limits, 1000), Grant)


def test_what_is_surely_larger_than_a_limit_never_fits_and_what_may_be_waits_for_all_of_it() -> None:
    net = LimitNet(1)
    limiter, group = net.nodes[1].limiter, MeterGroup(TOKENS)
    sure = limiter.reserve(group, net_amounts(1500), net.now, sure=1001)
    assert isinstance(sure, Refusal)
    assert sure.never
    assert isinstance(limiter.reserve(group, net_amounts(1500), net.now, sure=1000), Grant)
    assert isinstance(limiter.reserve(group, net_amounts(1), net.now), Refusal)


def test_requests_that_run_at_once_hold_room_for_their_sum_and_not_each_for_its_longest() -> None:
    limiter, group = LimitNet(1).nodes[1].limiter, MeterGroup(meters(tokens_per_minute=100_000))
    excess, rng, grants = Excess(100.0**2, 200.0), Random(1), list[Grant]()
    while isinstance(found := limiter.reserve(group, net_amounts(100), 10.0, excess=excess), Grant):
        grants.append(found)
    assert 935 <= len(grants) <= 945  # 1,000 without any margin, 438 if nine in ten stay within theirs
    for grant in grants:
        limiter.settle(net_amounts(rng.expovariate(1 / 100)), grant)
    assert 85_000 < 100_000 - limiter.room.left(group.meters[0], 10.0) < 100_000


def test_one_request_holds_no_more_room_than_it_may_take_at_most() -> None:
    limiter, group = LimitNet(1).nodes[1].limiter, MeterGroup(meters(tokens_per_minute=1000))
    excess = Excess(400.0**2, 100.0)
    assert isinstance(limiter.reserve(group, net_amounts(800), 10.0, excess=excess), Grant)
    assert isinstance(limiter.reserve(group, net_amounts(50), 10.0, excess=excess), Refusal)


def test_reservations_that_are_no_whole_numbers_leave_nothing_that_stops_the_next_request() -> None:
    limiter, group, rng = LimitNet(1).nodes[1].limiter, MeterGroup(meters(tokens_per_minute=100_000)), Random(1)
    excess = Excess(100.0**2, 200.0)
    for turn in range(50):
        now = 10.0 + turn * 30.0  # each looks at its count anew
        grants = [limiter.reserve(group, net_amounts(rng.expovariate(1 / 1000)), now, excess=excess) for _ in range(8)]
        assert granted(*grants) == 8
        rng.shuffle(grants)
        for grant in grants:
            assert isinstance(grant, Grant)
            limiter.settle(net_amounts(rng.expovariate(1 / 1000)), grant)


def net_amounts(tokens: float) -> Amounts:
    return Amounts(tokens, tokens, tokens)


steps = st.lists(
    st.tuples(st.floats(0, 0.4), st.floats(0, 0.7), st.integers(1, 40), st.integers(0, 60), st.sampled_from("sst")),
    max_size=25,
)


@given(steps)
def test_a_request_is_counted_once_by_its_head_and_once_by_its_tokens_however_long_it_waits_between_both(
    work: list[tuple[float, float, int, int, str]],
) -> None:
    net = LimitNet(1)
    limiter, now = net.nodes[1].limiter, net.now
    limits = Limits(requests_per_minute=9999, tokens_per_minute=99_999, concurrent=99)
    found, held = Meters().of(Identity(Tenant("a", limits))), list[tuple[Amounts, list[Grant]]]()
    for before_s, between_s, need, used, _ in work:
        now += before_s
        head = limiter.reserve(found.first, Amounts(), now)
        assert isinstance(head, Grant)
        now += between_s
        both = limiter.reserve(found.rest, Amounts(need, need), now, held=head)
        assert isinstance(both, Grant)
        held.append((Amounts(used, used), [head] if both is head else [head, both]))
        limiter.counts.book(now)
    assert taken(limiter, found, now) == [len(work), len(work), sum(need for _, _, need, *_ in work)]
    for (took, grants), (*_, end) in zip(held, work, strict=True):
        if end == "s":
            settle = limiter.settle if len(grants) == 1 else limiter.settle_all
            settle(took, *grants)
        limiter.release(*grants)  # what is settled stays so
    counted = [used for *_, used, end in work if end == "s"]
    assert taken(limiter, found, now) == [len(counted), 0, sum(counted)]
    assert limiter.counts.granted == len(counted), "what was released, as by a refusal of its tokens, is none"


def taken(limiter: Limiter, found: IdentityMeters, now: float) -> list[float]:
    limiter.counts.book(now)
    return [limiter.counts.count(meter, now).taken for group in (found.first, found.rest) for meter in group.meters]


def test_a_home_that_is_so_busy_that_it_reads_a_question_after_the_asker_gave_up_books_nothing() -> None:
    """Nobody would ever settle it: a busy home refused all for a minute."""
    net = LimitNet(2)
    home, (limit,) = net.nodes[1].limiter, meters(tokens_per_minute=1000)
    ask = AskRow(limit.id, limit.span, 7, 0, reserved=0.0, settled=0.0, used=0.0, extra=100.0, amount=1000.0)
    home.counts.merge(CountRow(limit.id, 2, limit.span, 7, 0, 100.0, 100.0, 0.0), net.now)  # reserved, and given up
    assert home.home.decide(2, 1, (ask,), net.now) == limit.id
    assert home.counts.count(limit, net.now).taken == 0.0
    assert home.home.decide(2, 2, (ask._replace(reserved=100.0, settled=100.0),), net.now) == 0
    assert home.counts.count(limit, net.now).taken == 100.0


def test_a_limit_in_the_shadow_refuses_nothing_and_counts_what_it_would_have_refused() -> None:
    net = LimitNet(1)
    limits = meters(tokens_per_minute=1000, mode=Mode.SHADOW)
    assert granted(*[net.decided(1, limits, 600) for _ in range(3)]) == 3
    assert net.nodes[1].limiter.counters.shadowed == {"tokens per minute": 2}


def test_all_limits_of_a_request_grant_it_or_none_counts_it() -> None:
    net = LimitNet(2)
    limits = (*meters(requests_per_minute=50), *TOKENS)
    net.decided(1, limits, 1000)
    net.run(0.01)
    assert isinstance(net.decided(2, limits, 10), Refusal)
    net.run(0.2)
    assert [net.taken(1, limit) for limit in limits] == [1, 1000]


def test_a_claim_on_a_place_ends_with_its_request_and_three_seconds_after_its_node_died() -> None:
    limits = meters(concurrent=3)
    net = LimitNet(3)
    first = [net.decided(1, limits) for _ in range(3)]
    assert granted(*first) == 3
    net.settle(1, first[0], 0)
    net.run(0.2)
    assert granted(net.decided(2, limits), net.decided(3, limits)) == 1
    net.kill(1)
    net.run(2.0)
    assert isinstance(net.decided(2, limits), Refusal)
    net.run(4.0)
    assert granted(*[net.decided(3, limits) for _ in range(3)]) == 2


@pytest.mark.parametrize("side", [(1,), (1, 2), (3, 4)])
def test_both_sides_of_a_partition_get_together_no_more_than_the_limit(side: tuple[int, ...]) -> None:
    net = LimitNet(4)
    for session in net.nodes:
        net.settle(session, net.decided(session, MONTH, 50), 50)
    net.run(0.5)
    net.part(*side)
    net.run(3.0)
    both = []
    for _ in range(60):
        both += [net.decided(session, MONTH, 20) for session in net.nodes]
        net.run(0.002)
    assert 30 <= granted(*both) <= 40
    net.heal()
    net.run(40.0)
    assert 800 <= net.taken(1, *MONTH) == net.taken(4, *MONTH) <= 1000


def test_a_side_that_goes_on_while_the_other_is_silent_wins_no_share_of_it() -> None:
    net, limits = LimitNet(4), meters(requests_per_minute=60)
    granted_ones = [net.settle(session, net.decided(session, limits), 1) for session in net.nodes for _ in range(5)]
    net.run(0.5)
    net.part(1, 2)
    found = []
    for _ in range(40):
        found += [net.decided(session, limits) for session in net.nodes]
        net.run(0.4)
    assert 30 <= granted(*found) <= 60 - len(granted_ones)


def test_a_node_that_left_hands_its_share_over_and_one_that_died_keeps_it_for_an_hour() -> None:
    for leaves in (True, False):
        net = LimitNet(2)
        for session in net.nodes:
            net.settle(session, net.decided(session, MONTH, 100), 100)
        net.run(0.5)
        net.nodes[1].left += [2] * leaves
        net.kill(2)
        net.run(5.0)
        assert granted(*[net.decided(1, MONTH, 100) for _ in range(9)]) == (8 if leaves else 4)
        net.run(3700.0)
        assert granted(*[net.decided(1, MONTH, 100) for _ in range(9)]) == (0 if leaves else 4)


def test_a_home_that_does_not_answer_costs_a_request_fifty_milliseconds_and_then_the_share_decides() -> None:
    net = LimitNet(3)
    home = net.home(*TOKENS)
    asker = next(session for session in net.nodes if session != home)
    net.drop = lambda _source, _target, message: isinstance(message, LimitQuestion)
    net.settle(asker, net.decided(asker, TOKENS, 300), 300)
    net.run(0.2)
    for waits in (True, False):  # a home that was silent twice in a row is not asked for a while
        began = net.now
        net.settle(asker, net.decided(asker, TOKENS, 100), 0)
        assert (net.now > began + ASK_S - 1e-9) is waits
        assert net.now < began + ASK_S + 0.01


def test_counts_for_which_there_is_no_room_wait_for_their_turn_those_first_that_are_near_their_limit() -> None:
    net = LimitNet(2)
    far, near = (tuple(meters_of(f"key {number}", Limits(tokens_per_minute=9000), "a")) for number in (0, 1))
    others = [tuple(meters_of(f"key {number}", Limits(tokens_per_minute=9000), "a")) for number in range(2, 400)]
    for limits in (far, *others):
        net.settle(1, net.decided(1, limits, 10.0), 10.0)
    net.settle(1, net.decided(1, near, 5000.0), 5000.0)
    net.run(0.5)
    assert net.taken(2, *near) == 5000.0
    assert sum(net.taken(2, *limits) > 0 for limits in others) < 200
    net.run(5.0)
    assert all(net.taken(2, *limits) == 10.0 for limits in (far, *others))


def test_a_node_whose_counts_are_late_is_there_as_long_as_its_datagrams_come_and_no_longer() -> None:
    assert LOSS_MAX**BEATS_LOST <= MISTAKEN_MAX
    net = LimitNet(3, loss=LOSS_MAX)
    before = net.drop
    net.drop = lambda source, target, message: isinstance(message, LimitCounts) or before(source, target, message)
    net.run(20.0)
    limiter = net.nodes[1].limiter
    assert (len(limiter.peers.live), limiter.peers.staleness(net.now) > 19.0) == (2, True)
    net.drop = lambda *_: True
    net.run(STALE_S + BEAT_S)
    assert not limiter.peers.live


def test_a_node_that_was_busy_itself_asks_once_more_before_it_decides_alone() -> None:
    net = LimitNet(3)
    home = net.home(*FEW)
    asker = next(session for session in net.nodes if session != home)
    net.asleep.append(home)
    question = net.reserve(asker, FEW)
    assert isinstance(question, HomeQuestion)
    net.asleep.append(asker)
    net.run(4 * ASK_S)
    net.asleep.clear()
    net.run(0.01)
    assert isinstance(question.outcome, Grant)
    assert net.nodes[asker].limiter.counters.asked == {"granted": 1}


def test_what_a_home_granted_and_its_asker_did_not_use_is_free_again() -> None:
    net = LimitNet(3)
    home = net.home(*TOKENS)
    asker = next(session for session in net.nodes if session != home)
    net.settle(home, net.decided(home, TOKENS, 600), 600)
    net.run(0.2)
    question = net.reserve(asker, TOKENS, 300)
    assert isinstance(question, HomeQuestion)
    net.run(0.0015)  # the home has granted it
    assert net.taken(home, *TOKENS) == 900
    net.nodes[asker].limiter.abandon(question, net.now)
    net.run(0.5)
    assert [net.taken(session, *TOKENS) for session in net.nodes] == [600] * 3


def test_a_home_grants_what_is_free_as_soon_as_the_minute_is_over() -> None:
    net = LimitNet(3)
    home, (limit,) = net.home(*TOKENS), TOKENS
    net.settle(home, net.decided(home, TOKENS, 900), 900)
    over = (int(net.now / SLOT_S) + MINUTE_SLOTS + 1) * SLOT_S
    net.run(over - net.now - 0.3)
    for number, at, refused in ((1, over - 0.1, limit.id), (2, over, 0)):
        asked = AskRow(limit.id, limit.span, int(at / SLOT_S), 0, 0.0, 0.0, 0.0, 900.0, limit.amount)
        assert net.nodes[home].limiter.home.decide(home + 1, number, [asked], at) == refused


@pytest.mark.parametrize("limits", [meters(tokens_per_minute=9000), MONTH, meters(concurrent=9)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_no_reservation_is_lost_for_ever_whatever_gets_lost_and_whoever_gives_up(limits: tuple, seed: int) -> None:
    net, rng, running, used = LimitNet(4, seed, loss=0.2), Random(seed), list[tuple[int, Grant]](), 0
    for _ in range(120):
        session = rng.choice(list(net.nodes))
        found = net.reserve(session, limits, 100.0)
        net.run(rng.choice((0.001, 0.02, 0.1)))
        if isinstance(found, HomeQuestion):
            if found.outcome is None or rng.random() < 0.3:
                net.nodes[session].limiter.abandon(found, net.now)  # its client left
                continue
            found = found.outcome
        if isinstance(found, Grant):
            running.append((session, found))
        if running and rng.random() < 0.5:
            net.settle(*running.pop(rng.randrange(len(running))), took := rng.randrange(100))
            used += took
    net.run(0.5)
    net.kill(4)  # what it told of before stays taken, as it was reserved
    for session, grant in running:
        if session != 4:
            net.settle(session, grant, 10)
        used += 100 if session == 4 else 10
    net.run(8.0)
    (limit,) = limits
    expected = used if limit.span > LimitSpan.REQUEST else 0
    assert [net.taken(session, limit) for session in net.nodes] == [expected] * 3


def test_a_new_amount_holds_at_once_and_keeps_what_was_counted() -> None:
    net = LimitNet(1)
    net.settle(1, net.decided(1, TOKENS, 600), 600)
    assert isinstance(net.decided(1, meters(tokens_per_minute=500), 1), Refusal)
    assert isinstance(net.decided(1, meters(tokens_per_minute=700), 100), Grant)


def test_nodes_without_limits_send_nothing_and_hold_nobody_up() -> None:
    net = LimitNet(3)
    net.nodes[3].machine.limiter = None
    net.run(60.0)
    net.sent.clear()
    net.run(10.0)
    assert {source for _, source, *_ in net.sent} == {1, 2}
