"""Reports of subscribers reach everybody, in any order, and only their own report counts."""

from __future__ import annotations

from random import Random

import pytest

from ranvier_py.core.engine_cache.peers import reader_claims
from ranvier_py.core.engine_cache.peers.reader_claims import (
    REPAIR_INTERVAL_S,
    REPORT_INTERVAL_S,
    ReaderClaim,
    ReaderClaims,
    ReaderClaimTable,
)
from tests.builders.machine_net import peer_of
from tests.core.engine_cache.peers.stream_net import StreamNet


def state_in(table: ReaderClaimTable, member: int, backend: int) -> int:
    known = table.known.get((member, backend))
    return known.state if known is not None else 0


def states(net: StreamNet, member: int, backend: int) -> list[int]:
    return [state_in(node.gossip.claims, member, backend) for node in net.nodes.values()]


@pytest.mark.parametrize(("count", "mesh"), [(3, True), (40, True), (40, False)])
def test_what_a_node_reports_is_known_to_all_within_seconds(count: int, mesh: bool) -> None:
    net = StreamNet(count, mesh=mesh)
    net.nodes[2].gossip.claims.report(11, 5)
    net.run(REPORT_INTERVAL_S * 25)
    assert states(net, 2, 11) == [5] * count


def test_only_the_latest_report_of_the_member_itself_counts() -> None:
    table = ReaderClaimTable(1, [], Random(1), 0.0, lambda _: None)
    table.receive(peer_of(2), ReaderClaims((ReaderClaim(11, 2, 7, 5),)), 0.0)
    table.receive(peer_of(2), ReaderClaims((ReaderClaim(11, 2, 6, 2), ReaderClaim(11, 2, 7, 3))), 0.0)
    assert state_in(table, 2, 11) == 5
    assert [claim.clock for claim in table.new] == [7]
    table.report(11, 2)
    table.receive(peer_of(2), ReaderClaims((ReaderClaim(11, 1, 900, 5),)), 0.0)
    assert state_in(table, 1, 11) == 2


def test_levels_that_change_all_the_time_are_reported_four_times_a_second() -> None:
    net = StreamNet(2)
    for step in range(200):
        net.nodes[1].gossip.claims.report(11, 2 + step % 4)
        net.run(0.01)
    assert len(net.sent) <= 2.0 / REPORT_INTERVAL_S + 3


def test_the_reports_of_a_member_that_is_gone_go_with_it() -> None:
    net = StreamNet(3)
    net.nodes[2].gossip.claims.report(11, 5)
    net.run(1.0)
    net.kill(2, forgotten=True)
    assert states(net, 2, 11) == [0, 0]


def test_what_a_node_has_forgotten_does_not_come_back_from_one_that_forgets_it_later() -> None:
    """Else the reports of all sessions that ever were fill the table, and none of a new one is taken."""
    net = StreamNet(4)
    net.nodes[2].gossip.claims.report(11, 5)
    net.run(1.0)
    net.nodes[1].gossip.claims.forgotten(2, net.now)
    net.kill(2)
    net.start(5)
    net.run(5 * REPAIR_INTERVAL_S)
    assert [state_in(net.nodes[session].gossip.claims, 2, 11) for session in (1, 5)] == [0, 0]


def test_the_number_of_reports_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_claims, "CLAIMS_MAX", 3)
    table = StreamNet(2).nodes[1].gossip.claims
    table.receive(peer_of(2), ReaderClaims(tuple(ReaderClaim(backend, 2, 1, 5) for backend in range(1, 6))), 0.0)
    table.report(99, 5)
    assert (len(table.known), table.dropped) == (3, 3)


def test_a_report_of_a_new_engine_takes_the_place_of_one_that_somebody_reads_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines that come with a new address each time filled the table with those that were gone, for ever."""
    monkeypatch.setattr(reader_claims, "CLAIMS_MAX", 4)
    net = StreamNet(2)
    one, two = (node.gossip.claims for node in net.nodes.values())
    for backend in range(20):
        for table in (one, two):
            table.report(backend, 5)
        net.run(1.0)
        assert states(net, 1, backend) == states(net, 2, backend) == [5, 5]
        for table in (one, two):
            table.report(backend, 0)
        net.run(1.0)
    assert len(one.known) == len(two.known) == 4
    one.report(3, 4)
    net.run(1.0)
    assert state_in(two, 1, 3) == 4, "it is later than all reports of it so far"


def test_a_report_that_ended_is_known_before_an_older_one_comes() -> None:
    table = StreamNet(2).nodes[1].gossip.claims
    table.receive(peer_of(2), ReaderClaims((ReaderClaim(11, 2, 7, 0), ReaderClaim(11, 2, 6, 5))), 0.0)
    assert state_in(table, 2, 11) == 0


def test_a_member_outbids_what_goes_about_in_its_name() -> None:
    """Else nobody took its own reports any more, or all waited for a reader that there is not."""
    net = StreamNet(3)
    net.nodes[2].gossip.claims.report(11, 5)
    net.run(1.0)
    forged = ReaderClaims((ReaderClaim(11, 2, 900, 1), ReaderClaim(12, 2, 7, 5), ReaderClaim(13, 2, 2**32 - 1, 5)))
    net.nodes[1].gossip.claims.receive(peer_of(2), forged, net.now)
    net.run(5 * REPAIR_INTERVAL_S)
    assert states(net, 2, 11) == [5, 5, 5]
    assert states(net, 2, 12) == [0, 0, 0]
    for backend in (11, 12, 13):
        net.nodes[2].gossip.claims.report(backend, 4)
        net.run(1.0)
        assert states(net, 2, backend) == [4, 4, 4]


def test_nothing_is_reported_of_streams_that_were_never_read() -> None:
    net = StreamNet(2)
    net.nodes[1].gossip.claims.report(11, 0)
    net.run(1.0)
    assert len(net.sent) == 0
