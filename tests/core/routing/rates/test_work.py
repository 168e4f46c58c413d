"""Work at a backend: first tokens that can't be seen, and what decodes there over time."""

from __future__ import annotations

from math import inf

from ranvier_py.core.routing.rates.work import UNREPORTED_S, InFlight, Load, Unseen, Work


def test_a_request_whose_first_token_cannot_be_seen_waits_until_it_is_expected_and_decodes_then() -> None:
    work, unseen, request = Work(), Unseen(), InFlight(tokens=500, context=900, seen=False)
    work.begin(request, 1.0)
    unseen.add(work, request, 3.0)
    assert unseen.due_at == 3.0
    unseen.settle(2.9)
    assert (work.waiting, work.decoding, work.pending_tokens) == (1, 0, 500)
    unseen.settle(3.5)
    assert (work.waiting, work.decoding, work.pending_tokens, work.own.contexts) == (0, 1, 0, 900)
    assert work.progress_at == 3.0, "when it was expected, not when somebody looked"
    work.end(request, 4.0)
    assert (work.own.inflight, work.decoding, work.own.contexts, unseen.due_at) == (0, 0, 0, inf)


def test_an_unseen_request_that_ended_early_is_never_counted_as_decoding() -> None:
    work, unseen, request = Work(), Unseen(), InFlight(tokens=500, seen=False)
    work.begin(request, 1.0)
    unseen.add(work, request, 3.0)
    work.end(request, 2.0)
    unseen.settle(9.0)
    assert (work.own.inflight, work.waiting, work.decoding, work.pending_tokens) == (0, 0, 0, 0)


def test_unseen_first_tokens_come_in_the_order_in_which_they_are_expected() -> None:
    work, unseen = Work(), Unseen()
    late, early = InFlight(tokens=1, seen=False), InFlight(tokens=2, seen=False)
    for request, expected_at in ((late, 8.0), (early, 4.0)):
        work.begin(request, 0.0)
        unseen.add(work, request, expected_at)
    unseen.settle(5.0)
    assert (early.decoding, late.decoding, unseen.due_at) == (True, False, 8.0)


def test_the_contexts_that_decode_are_summed_over_time() -> None:
    work, one, other = Work(), InFlight(context=1000), InFlight(context=3000)
    work.begin(one, 0.0)
    work.begin(other, 0.0)
    work.prefilled(one, 1.0)
    work.prefilled(other, 2.0)
    assert (one.area, other.area) == (0.0, 1000.0)
    work.end(one, 4.0)
    assert work.own.area_until(5.0) == 1000 * 3 + 3000 * 3


def test_memory_is_taken_from_the_sending_until_the_end() -> None:
    work, request = Work(), InFlight(memory=700)
    work.begin(request, 0.0)
    assert work.own.memory == 700
    work.end(request, 1.0)
    assert work.own.memory == 0


def test_in_a_burst_each_peer_is_taken_to_send_as_much_until_it_has_reported() -> None:
    """Sixteen nodes that send their ten requests at once to the one idle engine would else all believe it idle."""
    work, unseen = Work(), Unseen()
    unseen.peers = 15
    for _ in range(3):
        work.begin(InFlight(tokens=100), 1.0)
        unseen.sent(work, 100, 1.0)
    assert (work.waiting, work.pending_tokens) == (3 + 2 * 15, 300 + 2 * 15 * 100)
    work.set_peers(Load(30, 30, 3000), 1.05)
    unseen.settle(1.0 + UNREPORTED_S)
    assert (work.waiting, work.pending_tokens, unseen.due_at) == (33, 3300, inf), "what they reported counts once"


def test_requests_that_come_one_by_one_and_a_node_without_peers_guess_nothing() -> None:
    work, unseen = Work(), Unseen()
    unseen.peers = 15
    for number in range(5):
        work.begin(InFlight(tokens=100), 2 * number * UNREPORTED_S)
        unseen.sent(work, 100, 2 * number * UNREPORTED_S)
    unseen.peers = 0
    for _ in range(5):
        work.begin(InFlight(tokens=100), 9.0)
        unseen.sent(work, 100, 9.0)
    assert (work.waiting, unseen.due_at) == (10, inf)
