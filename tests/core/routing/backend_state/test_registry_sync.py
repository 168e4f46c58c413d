"""The registry of one node and what peers say of its backends."""

from __future__ import annotations

from ranvier_py.core.routing.backend_state.facts import HELD_S, REPAIR_INTERVAL_S, Fact, Facts, Verdict
from ranvier_py.core.routing.backend_state.loads import Loads
from ranvier_py.core.routing.backends import Health, Outcome, ProbeResult
from ranvier_py.core.routing.processes.engine_marks import EngineMarks
from ranvier_py.core.routing.rates.work import InFlight
from ranvier_py.core.routing.route_table import Trust
from tests.builders.machine_net import alike
from tests.core.routing.peers.route_net import CHAT, ENGINE, NEXT_TURN, OTHER, RouteNode


def test_served_by_a_process_that_is_gone_it_is_not_reported() -> None:
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    first.serve(CHAT)
    first.restart(11.0)
    first.send(second, now=11.0)
    assert second.holders(CHAT, 11.0) == []
    assert first.sync.counters.outdated == len(CHAT)


def test_a_route_update_of_a_later_generation_voids_what_the_earlier_process_held() -> None:
    """It may come before the fact of the restart does."""
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    first.meet(second)
    second.serve(CHAT)
    first.restart(11.0)
    first.serve([(48, 300, 400)], 12.0)
    first.send(second, now=12.0)
    assert second.holders(CHAT, 12.0) == []
    assert second.holders([(48, 300, 400)], 12.0) == [(ENGINE, 48, Trust.REMOTE)]
    assert [change.what for change in second.backends.transitions] == ["generation"]


def test_peers_load_enters_ours_and_leaves_with_them() -> None:
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    first.facts.receive(second.peer, Loads(1, ((first.key(), 9, 0, 0),)), 1.0)
    first.backends.follow(1.0)
    assert first.engine().load == 9
    first.facts.forgotten(second.session, 0.0)
    first.backends.follow(1.0)
    assert first.engine().load == 0


def test_a_backend_added_later_starts_with_the_load_peers_already_reported() -> None:
    first, second = RouteNode(1, []), RouteNode(2, [ENGINE])
    first.facts.receive(second.peer, Loads(1, ((second.key(), 9, 0, 0),)), 1.0)
    first.backends.follow(1.0)
    first.registry.add(ENGINE)
    first.backends.look(2.0)
    assert first.engine().load == 9


def test_our_own_requests_in_flight_are_reported() -> None:
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    first.facts.met(alike([second.peer]), 0.0)
    first.registry.dispatched(first.engine(), 1.0)
    first.backends.look(1.0)
    first.facts.tick(1.0)
    (loads,) = [outgoing.message for outgoing in first.outbox if isinstance(outgoing.message, Loads)]
    assert loads.loads == ((first.key(), 1, 1, 0),)


def test_a_whole_answer_is_not_reported_as_waiting_once_its_first_token_was_expected() -> None:
    """No further request comes meanwhile: peers would take its engine for one with a queue."""
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    first.facts.met(alike([second.peer]), 0.0)
    first.registry.dispatched(first.engine(), 1.0, InFlight(tokens=500, seen=False), 1.2)
    first.backends.look(2.0)
    first.facts.tick(2.0)
    (loads,) = [outgoing.message for outgoing in first.outbox if isinstance(outgoing.message, Loads)]
    assert loads.loads == ((first.key(), 1, 0, 0),)


def test_a_drain_ordered_on_one_node_holds_on_another_until_it_is_taken_back() -> None:
    first, second = RouteNode(1, [ENGINE, OTHER]), RouteNode(2, [ENGINE, OTHER])
    second.receive(first, 1.0, draining=True, drain_clock=1)
    assert second.engine().draining
    assert second.registry.pools.pool("", 1.0).ids == (second.engine(OTHER).id,)
    second.registry.drain(ENGINE, draining=False)
    second.backends.look(2.0)
    second.receive(first, 3.0, draining=True, drain_clock=1)
    assert not second.engine().draining


def drained(*urls: str) -> tuple[RouteNode, RouteNode]:
    """Two nodes, of which the first alone has ENGINE, and drains it."""
    first, second = RouteNode(1, [ENGINE, OTHER]), RouteNode(2, urls)
    first.registry.drain(ENGINE)
    first.backends.look(1.0)
    first.meet(second, 1.0)
    return first, second


def test_a_backend_that_is_added_after_its_drain_drains_there_too() -> None:
    first, second = drained(OTHER)
    second.registry.add(ENGINE)
    second.backends.look(2.0)
    assert second.engine().draining
    second.registry.drain(ENGINE, draining=False)
    second.backends.look(3.0)
    second.meet(first, 3.0)
    assert not first.engine().draining


def test_a_backend_that_one_node_removes_and_adds_again_drains_as_it_does_on_the_others() -> None:
    _, second = drained(ENGINE, OTHER)
    assert second.engine().draining
    for pause_s in (0.0, 1.0):
        second.registry.remove(ENGINE)
        second.backends.look(2.0 + pause_s / 2)
        second.engines[ENGINE] = second.registry.add(ENGINE)
        second.backends.look(2.0 + pause_s)
        assert second.engine().draining


def test_a_drain_ends_when_all_nodes_have_removed_the_backend() -> None:
    """An engine is drained, removed, started anew and added: it is to serve, on nodes that join later as well."""
    first, second = drained(ENGINE, OTHER)
    for node in (first, second):
        node.registry.remove(ENGINE)
        node.backends.look(2.0)
    later = 2.0 + HELD_S + 1.0
    for node in (first, second):
        first.meet(second, later)
        node.engines[ENGINE] = node.registry.add(ENGINE)
        node.backends.look(later)
        first.meet(second, later)
    third = RouteNode(3, [ENGINE])
    third.meet(first, later)
    assert not any(node.engine().draining for node in (first, second, third))


def test_a_node_knows_of_a_drain_as_long_as_any_peer_has_the_backend() -> None:
    first, second = drained(OTHER)
    first.facts.met(alike([second.peer]), 1.0)
    for step in range(1, 30):
        now = 1.0 + step * REPAIR_INTERVAL_S
        first.facts.tick(now)
        for each in first.outbox:
            second.facts.receive(first.peer, each.message, now)
        first.outbox.clear()
    second.registry.add(ENGINE)
    second.backends.look(now)
    assert second.engine().draining


def test_what_peers_report_of_a_backend_that_was_removed_a_moment_ago_changes_nothing() -> None:
    """The operator took it away between two looks: news of it must neither raise nor bring it back."""
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    key = first.key()
    first.registry.remove(ENGINE)
    reports_of_it = Fact(key, 1, 0.0, 1, True, 1), Fact(key, 9, 0.0, 1, False, 2), Fact(key, 9, 0.0, 3, False, 2)
    for now, sent in enumerate(reports_of_it):
        first.facts.receive(second.peer, Facts((sent,)), float(now))
        first.backends.follow(float(now))
    assert first.registry.ids.find(ENGINE) is None
    assert not first.backends.doubted


def test_a_doubt_is_probed_at_once_and_two_are_believed() -> None:
    first, second, third = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE]), RouteNode(3, [ENGINE])
    first.registry.changes.probed(first.engine().id, ProbeResult(ok=True), 0.5)
    first.receive(second, 1.0, verdict=2)
    assert list(first.backends.doubted) == [first.engine().id]
    assert first.engine().health is Health.HEALTHY
    first.receive(third, 2.0, verdict=2)
    assert first.engine().health is Health.UNHEALTHY


def test_an_illness_that_is_believed_on_others_word_is_not_reported_on() -> None:
    """Each would hold the backend for ill because the others do, and go on after all its own probes were good."""
    first, second, third = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE]), RouteNode(3, [ENGINE])
    for node in (first, second, third):
        node.registry.changes.probed(node.engine().id, ProbeResult(ok=True), 0.0)
    for peer in (second, third):
        first.receive(peer, 1.0, verdict=2)
    assert first.engine().health is Health.UNHEALTHY
    assert reported_verdict(first) is Verdict.UNKNOWN
    first.registry.changes.probed(first.engine().id, ProbeResult(ok=True), 2.0)
    assert first.engine().health is Health.UNHEALTHY
    assert reported_verdict(first) is Verdict.UNKNOWN
    first.registry.changes.probed(first.engine().id, ProbeResult(ok=False), 3.0)
    assert reported_verdict(first) is Verdict.UNHEALTHY, "we saw it ourselves"


def reported_verdict(node: RouteNode) -> Verdict:
    node.backends.look(5.0)
    return next(Verdict(fact.verdict) for fact in node.facts.known(5.0))


def test_one_restart_that_a_peer_reported_first_is_one_restart() -> None:
    """Counted twice, it would void what was learned of the new process in between."""
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    first.probe(0.5, 100.0)
    first.backends.look(0.5)
    first.receive(second, 1.0, generation=2, started_at=500.0)
    generation = first.engine().generation
    first.serve(CHAT, 2.0)
    first.probe(3.0, 500.2)
    first.backends.look(3.0)
    assert (first.engine().generation, first.facts.of(first.key()).generation) == (generation, 2)
    assert first.holders(CHAT, 3.0)


def test_one_restart_without_start_times_is_one_restart_too() -> None:
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    for now in (0.1, 0.2):
        first.registry.changes.probed(first.engine().id, ProbeResult(ok=True), now)
    first.receive(second, 1.0, generation=2)
    generation = first.engine().generation
    first.registry.changes.probed(first.engine().id, ProbeResult(ok=False, refused=True), 1.5)
    first.registry.changes.probed(first.engine().id, ProbeResult(ok=True), 2.0)
    assert first.engine().generation == generation


def test_a_restart_that_we_saw_first_is_not_repeated_on_a_peers_word() -> None:
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    for started_at in (100.0, 500.0):
        first.registry.changes.probed(first.engine().id, ProbeResult(ok=True, started_at=started_at), 1.0)
        first.backends.look(1.0)
    generation = first.engine().generation
    first.receive(second, 2.0, generation=7, started_at=500.0)
    assert first.engine().generation == generation


def test_claims_of_a_process_that_we_never_met_are_not_given_to_the_next_one() -> None:
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    second.probe(0.5, 100.0)
    second.backends.look(0.5)
    first.receive(second, 1.0, started_at=100.0)
    second.serve(CHAT, 1.0)
    second.send(first, now=1.0)
    assert first.holders(CHAT, 1.0)
    first.probe(2.0, 900.0)
    first.backends.look(2.0)
    assert not first.holders(CHAT, 2.0)


def test_claims_of_a_process_that_nobody_knows_are_void_when_a_peer_knows_the_next_one() -> None:
    """It served before anything was known of it, and was gone when peers came; all of them count it as the first."""
    first, second, third = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE]), RouteNode(3, [ENGINE])
    second.registry.dispatched(second.engine(), 0.5)
    second.registry.finished(second.engine(), Outcome.SUCCESS, 0.5)
    second.serve(CHAT, 0.5)
    second.registry.changes.probed(second.engine().id, ProbeResult(ok=False, refused=True), 1.0)
    for node in (first, third):
        node.meet(second, 1.5)
    second.send(third, now=1.5)
    assert third.holders(CHAT, 1.5)
    first.probe(2.0, 900.0)
    first.backends.look(2.0)
    first.meet(second, 2.1)
    assert not second.holders(CHAT, 2.2)
    assert second.facts.of(second.key()).generation == 2
    third.meet(second, 2.2)
    assert not third.holders(CHAT, 2.3), "it had them by the number of the first"
    first.meet(second, 2.3)
    assert first.engine().generation == 1, "it has met one process only"


def test_peers_claims_are_void_when_the_engine_was_refused_to_us_until_we_knew_its_process() -> None:
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    first.registry.changes.probed(first.engine().id, ProbeResult(ok=False, refused=True), 0.2)
    second.serve(CHAT, 0.5)
    first.meet(second, 1.0)
    second.send(first, now=1.0)
    assert first.holders(CHAT, 1.0)
    first.probe(2.0, 900.0)
    assert not first.holders(CHAT, 2.0)


def test_a_restart_that_only_the_registry_has_seen_voids_what_peers_still_report_of_the_old_process() -> None:
    """A probe finds it between two looks: until the next look old claims were taken for the new process's."""
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    for node in (first, second):
        node.probe(0.5, 100.0)
        node.backends.look(0.5)
    first.meet(second)
    second.serve(CHAT, 1.0)
    first.probe(2.0, 900.0)
    second.send(first, now=2.0)
    assert not first.holders(CHAT, 2.0)
    first.backends.look(3.0)
    assert not first.holders(CHAT, 3.0)
    assert first.facts.of(first.key()).generation == 2


def test_nothing_is_taken_from_peers_before_their_counts_are_known() -> None:
    """A node that has just started calls the new process 1, as the others call the one before."""
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    second.probe(0.5, 100.0)
    second.backends.look(0.5)
    second.serve(CHAT, 1.0)
    first.probe(1.0, 900.0)
    first.backends.look(1.0)
    second.send(first, now=2.0)
    assert not first.holders(CHAT, 2.0)
    assert not first.backends.regained()
    first.meet(second, 3.0)
    assert first.facts.of(first.key()).generation == second.facts.of(second.key()).generation == 2
    assert first.backends.regained(), "what was not taken is to be had by comparing tables"
    assert not first.backends.regained()


def test_routes_of_a_backend_that_is_added_later_are_to_be_had_by_comparing_tables() -> None:
    """What peers sent of it before was not taken; they would come with the next comparison, in minutes."""
    first, second = RouteNode(1, [ENGINE, OTHER]), RouteNode(2, [OTHER])
    first.meet(second, 1.0)
    assert not second.backends.regained()
    for url in (ENGINE, OTHER):
        first.serve(CHAT, 2.0, url)
    first.send(second, now=2.0)
    second.registry.add(ENGINE)
    second.backends.look(3.0)
    assert second.backends.regained()
    assert not second.backends.regained()


def test_a_node_that_starts_does_not_compare_tables_for_backends_that_it_starts_with() -> None:
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    first.meet(second, 1.0)
    assert not first.backends.regained()


def test_a_process_that_peers_count_otherwise_starts_anew_though_we_know_it() -> None:
    """What peers told of the one before, by the number that we gave this one, would pass for its own."""
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    first.receive(second, 0.5, generation=1, started_at=100.0)
    second.serve(CHAT, 1.0)
    second.send(first, now=1.0)
    assert first.holders(CHAT, 1.0)
    first.probe(2.0, 900.0)
    first.receive(second, 2.1, generation=2, started_at=900.0)
    assert not first.holders(CHAT, 2.2)


def test_what_an_earlier_process_held_is_reported_again_when_the_next_one_holds_it() -> None:
    """Rows above the known one are not new to us, but to a peer that never took the claim of the earlier process."""
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    first.meet(second)
    first.serve(CHAT, 10.0)
    first.updates(10.0)  # and second did not hear it
    first.restart(11.0)
    first.serve(NEXT_TURN, 12.0)
    first.send(second, now=12.0)
    assert [(view.tokens, view.level) for view in second.table.subtree(0)] == [(16, 0), (32, 1), (64, 2), (96, 3)]
    assert second.holders(CHAT, 12.0) == [(ENGINE, 64, Trust.REMOTE)]


def test_a_restart_seen_here_since_the_last_look_is_the_one_that_a_peer_reports() -> None:
    """A probe here and events there see it within one interval, and neither has told the other yet."""
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    first.probe(0.5, 100.0)
    first.backends.look(0.5)
    before = first.engine().generation
    first.probe(2.0, 900.0)
    first.backends.count_restarts(2.1)
    first.receive(second, 2.1, generation=2)
    assert first.engine().generation == before + 1


def test_of_a_url_that_leads_a_peer_to_another_engine_no_routes_loads_restarts_or_doubts_are_taken() -> None:
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [ENGINE])
    first.meet(second)
    for now in (1.0, 20.0, 40.0):
        for node, identity in ((first, 1), (second, 2)):
            found = ProbeResult(ok=True, started_at=1000.0, marks=EngineMarks(identity, 0, is_exact=True))
            node.registry.changes.probed(node.engine().id, found, now)
            node.backends.look(now)
        first.meet(second, now + 5.0)
    assert list(first.engine().behind.names.strangers) == ["node 0000000000000002"]
    first.serve(CHAT, 50.0)
    first.send(second, now=50.0)
    assert second.holders(CHAT, 50.0) == []
    second.facts.receive(first.peer, Loads(1, ((second.key(), 9, 0, 0),)), 50.0)
    second.backends.follow(50.0)
    assert second.engine().load == 0
    second.receive(first, 51.0, generation=7, started_at=9000.0, verdict=Verdict.UNHEALTHY, identity=1)
    assert second.engine().generation == 1
    assert second.backends.doubted == {}
    second.receive(first, 52.0, generation=7, draining=True, drain_clock=9, identity=1)
    assert second.engine().draining, "an order is about the name"


def test_what_peers_read_of_a_backend_that_has_just_come_is_not_taken_for_another_ones() -> None:
    first, second = RouteNode(1, [ENGINE]), RouteNode(2, [])
    found = ProbeResult(ok=True, marks=EngineMarks(1, 0, is_exact=True))
    first.registry.changes.probed(first.engine().id, found, 1.0)
    first.backends.look(1.0)
    added = second.registry.add(ENGINE)
    second.registry.changes.probed(added.id, found, 1.0)
    second.facts.receive(first.peer, Facts(tuple(first.facts.known(1.0))), 1.0)
    second.backends.follow(1.0)
    second.registry.changes.probed(added.id, found, 2.0)
    assert list(added.behind.names.twins) == []
