"""Registry and route table of one node, told to another and learned there."""

from math import inf
from random import Random

from ranvier_py.core.gossip.backend_state.fact_settings import FactSettings
from ranvier_py.core.gossip.backend_state.facts import BackendFacts, Verdict, fact_of
from ranvier_py.core.gossip.gossip_values import Outgoing, Peer
from ranvier_py.core.gossip.peer.coalescing_buffer import COMPANY_S
from ranvier_py.core.gossip.peer.held_updates import HOLD_S
from ranvier_py.core.gossip.peer.registry_sync import SharedBackends
from ranvier_py.core.gossip.peer.route_sync import SharedRoutes
from ranvier_py.core.gossip.replication.route_updates import RouteUpdate, decode, encode
from ranvier_py.core.gossip.wire.messages import Fact, Facts, Loads
from ranvier_py.core.routing.backends import Backend, BackendLimits, Health, Outcome, ProbeResult, Registry
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table import RouteTable, Trust

KEY = b"a cluster secret"
ENGINE, OTHER = "http://127.0.0.1:9001", "http://127.0.0.1:9002"
CHAT: list[PrefixKey] = [(64, 104, 204), (32, 102, 202), (16, 101, 201)]
NEXT_TURN: list[PrefixKey] = [(96, 106, 206), *CHAT]


class Node:
    """What a node shares, without the wire between."""

    def __init__(self, number: int, *urls: str) -> None:
        self.peer = Peer(number, ("127.0.0.1", 7000 + number))
        self.outbox: list[Outgoing] = []
        self.registry = Registry(BackendLimits())
        self.facts = BackendFacts(number, FactSettings(), self.outbox, Random(number), 0.0)
        self.backends = SharedBackends(self.registry, self.facts, KEY)
        self.table = RouteTable(capacity=1000)
        self.table.outgoing.collect()
        self.routes = SharedRoutes(self.table, self.backends)
        for url in urls:
            self.registry.add(url)
        self.backends.look(0.0)

    def engine(self, url: str = ENGINE) -> Backend:
        backend = self.registry.find(url)
        assert backend is not None
        return backend

    def key(self, url: str = ENGINE) -> int:
        key = self.backends.key_of(self.engine(url).id)
        assert key is not None
        return key

    def serve(self, chain: list[PrefixKey], now: float = 10.0, url: str = ENGINE) -> None:
        engine = self.engine(url)
        self.table.learn(chain, engine.id, engine.generation, Trust.LOCAL, now)

    def meet(self, other: "Node", now: float = 0.0) -> None:
        """Each tells the other what it knows of its backends, as peers do at once."""
        for one, two in ((self, other), (other, self)):
            facts = tuple(fact_of(key, known) for key, known in one.facts._known.items())
            two.facts.receive(one.peer, Facts(one.peer.session, 1, facts), now)
            two.backends.follow(now)

    def tell(self, other: "Node", now: float = 10.0) -> None:
        for route_update, at in list(self.routes.route_updates(now)):
            other.routes.hear(route_update, now - at, now)

    def hear(self, other: "Node", now: float, **changes: object) -> None:
        fact = Fact(self.key(), 1, 0.0, 1, False, 0)._replace(**changes)  # type: ignore[arg-type]
        self.facts.receive(other.peer, Facts(other.peer.session, 1, (fact,)), now)
        self.backends.follow(now)

    def holders(self, chain: list[PrefixKey], now: float = 10.0) -> list[tuple[str, int, int]]:
        found = self.table.match(chain, self.registry.pool("", now).generations, now, wanted=9)
        return [(self.registry[holder.backend].url, holder.tokens, holder.trust) for holder in found]


def test_the_next_turn_of_a_chat_finds_its_engine_on_another_node() -> None:
    """That node numbers its engines differently."""
    first, second = Node(1, ENGINE, OTHER), Node(2, OTHER, ENGINE)
    first.meet(second)
    first.serve(CHAT)
    first.tell(second)
    assert second.holders(NEXT_TURN) == [(ENGINE, 64, Trust.REMOTE)]


def test_only_what_is_new_is_told_and_it_hangs_where_it_belongs() -> None:
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.meet(second)
    first.serve(CHAT)
    first.tell(second)
    first.serve(NEXT_TURN, 11.0)
    told = list(first.routes.route_updates(11.0 + COMPANY_S))
    assert len(told) == 1
    second.routes.hear(told[0][0], 0.0, 11.5)
    assert [(view.tokens, view.level) for view in second.table.subtree(0)] == [(16, 0), (32, 1), (64, 2), (96, 3)]


def test_what_was_told_ages_on_its_way() -> None:
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.meet(second)
    first.serve(CHAT, 10.0)
    first.tell(second, 110.0)
    assert second.holders(CHAT, 110.0)
    (view, *_) = second.table.subtree(0)
    assert view.holders[0].age_s == 100.0


def test_a_backend_the_operator_did_not_give_us_is_never_ranked() -> None:
    first, second = Node(1, ENGINE), Node(2, OTHER)
    first.serve(CHAT)
    first.tell(second)
    assert second.holders(CHAT) == []
    assert second.routes.counters.void == 1


def test_bytes_that_are_no_route_update_are_counted_and_change_nothing() -> None:
    node = Node(1, ENGINE)
    assert not node.routes.hear(b"\x01" * 40, 0.0, 10.0)
    assert node.routes.counters.bad == 1
    assert len(node.table) == 0


def test_served_by_a_process_that_is_gone_it_is_not_told() -> None:
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.serve(CHAT)
    first.registry.restart(first.engine(), "test", 11.0)
    first.backends.look(11.0)
    first.tell(second, 11.0)
    assert second.holders(CHAT, 11.0) == []
    assert first.routes.counters.outdated == 1


def test_a_route_update_of_a_later_boot_voids_what_the_earlier_process_held() -> None:
    """It may come before the fact of the restart does."""
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.meet(second)
    second.serve(CHAT)
    first.registry.restart(first.engine(), "test", 11.0)
    first.backends.look(11.0)
    first.serve([(48, 300, 400)], 12.0)
    first.tell(second, 12.0)
    assert second.holders(CHAT, 12.0) == []
    assert second.holders([(48, 300, 400)], 12.0) == [(ENGINE, 48, Trust.REMOTE)]
    assert [change.what for change in second.backends.transitions] == ["generation"]


def test_a_route_update_of_an_earlier_boot_is_dropped_and_counted() -> None:
    node = Node(1, ENGINE)
    node.registry.restart(node.engine(), "test", 11.0)
    node.backends.look(11.0)
    assert not node.routes.hear(encode(RouteUpdate(node.key(), 1, 0, tuple(CHAT))), 0.0, 12.0)
    assert node.routes.counters.void == 1


def test_peers_load_enters_ours_and_leaves_with_them() -> None:
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.facts.receive(second.peer, Loads(1, ((first.key(), 9),), ()), 1.0)
    first.backends.follow(1.0)
    assert first.engine().load == 9
    first.facts.forget(second.peer.session)
    first.backends.follow(1.0)
    assert first.engine().load == 0


def test_a_backend_added_later_starts_with_the_load_peers_already_reported() -> None:
    first, second = Node(1), Node(2, ENGINE)
    first.facts.receive(second.peer, Loads(1, ((second.key(), 9),), ()), 1.0)
    first.backends.follow(1.0)
    first.registry.add(ENGINE)
    first.backends.look(2.0)
    assert first.engine().load == 9


def test_our_own_requests_in_flight_are_told() -> None:
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.facts.peers([second.peer])
    first.registry.dispatched(first.engine().id, 1.0)
    first.backends.look(1.0)
    first.facts.tick(1.0)
    (loads,) = [letter.message for letter in first.outbox if isinstance(letter.message, Loads)]
    assert loads.loads == ((first.key(), 1),)


def test_a_drain_ordered_on_one_node_holds_on_another_until_it_is_taken_back() -> None:
    first, second = Node(1, ENGINE, OTHER), Node(2, ENGINE, OTHER)
    second.hear(first, 1.0, draining=True, drain_clock=1)
    assert second.engine().draining
    assert second.registry.pool("", 1.0).ids == (second.engine(OTHER).id,)
    second.registry.drain(ENGINE, draining=False)
    second.backends.look(2.0)
    second.hear(first, 3.0, draining=True, drain_clock=1)
    assert not second.engine().draining


def test_what_peers_say_of_a_backend_that_was_removed_a_moment_ago_changes_nothing() -> None:
    """The operator took it away between two looks: news of it must neither raise nor bring it back."""
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    key = first.key()
    first.registry.remove(ENGINE)
    said_of_it = Fact(key, 1, 0.0, 1, True, 1), Fact(key, 9, 0.0, 1, False, 2), Fact(key, 9, 0.0, 3, False, 2)
    for now, said in enumerate(said_of_it):
        first.facts.receive(second.peer, Facts(second.peer.session, 1, (said,)), float(now))
        first.backends.follow(float(now))
    assert first.registry.find(ENGINE) is None
    assert not first.backends.doubted


def test_a_doubt_is_probed_at_once_and_two_are_believed() -> None:
    first, second, third = Node(1, ENGINE), Node(2, ENGINE), Node(3, ENGINE)
    first.registry.probed(first.engine().id, ProbeResult(ok=True), 0.5)
    first.hear(second, 1.0, verdict=2)
    assert list(first.backends.doubted) == [first.engine().id]
    assert first.engine().health is Health.HEALTHY
    first.hear(third, 2.0, verdict=2)
    assert first.engine().health is Health.UNHEALTHY


def test_an_illness_that_is_believed_on_others_word_is_not_told_on() -> None:
    """Each would hold the backend for ill because the others do, and go on after all its own probes were good."""
    first, second, third = Node(1, ENGINE), Node(2, ENGINE), Node(3, ENGINE)
    for node in (first, second, third):
        node.registry.probed(node.engine().id, ProbeResult(ok=True), 0.0)
    for peer in (second, third):
        first.hear(peer, 1.0, verdict=2)
    assert first.engine().health is Health.UNHEALTHY
    assert told_verdict(first) is Verdict.UNKNOWN
    first.registry.probed(first.engine().id, ProbeResult(ok=True), 2.0)
    assert first.engine().health is Health.UNHEALTHY
    assert told_verdict(first) is Verdict.UNKNOWN
    first.registry.probed(first.engine().id, ProbeResult(ok=False), 3.0)
    assert told_verdict(first) is Verdict.UNHEALTHY, "we saw it ourselves"


def told_verdict(node: Node) -> Verdict:
    node.backends.look(5.0)
    return node.facts._known[node.key()].verdict


def test_a_turn_is_told_once_its_texts_with_its_tokens() -> None:
    """Told twice it would cost twice the bytes."""
    first = Node(1, ENGINE)
    first.serve(CHAT)
    assert len(list(first.routes.route_updates(10.0))) == 1
    first.serve([(90, 0, 206), *CHAT], 11.0)
    assert not list(first.routes.route_updates(11.0))
    first.serve([(128, 107, 207), (96, 106, 206), *CHAT], 12.0)
    assert len(list(first.routes.route_updates(12.0 + COMPANY_S))) == 1
    assert not list(first.routes.route_updates(12.0 + HOLD_S))
    assert first.routes.counters.spared == 1


def test_a_further_turn_waits_for_company_and_goes_with_it() -> None:
    """A packet costs as much as a route update. Nobody misses it so soon: the turns before lead to the same engine."""
    first, second = Node(1, ENGINE, OTHER), Node(2, ENGINE, OTHER)
    first.meet(second)
    first.serve(CHAT)
    first.tell(second)
    first.serve(NEXT_TURN, 11.0)
    assert not list(first.routes.route_updates(11.02))
    assert first.routes.wake_at == 11.0 + COMPANY_S
    first.serve([(64, 304, 404)], 11.03)
    assert len(list(first.routes.route_updates(11.04))) == 2, "a new chat goes at once, and takes it along"
    assert first.routes.wake_at == inf
    first.serve(NEXT_TURN, 12.0, OTHER)
    assert len(list(first.routes.route_updates(12.0))) == 1, "another engine has it now: that counts"


def test_what_was_held_back_for_its_tokens_takes_company_along() -> None:
    """Else the packet of the one keeps the other waiting for the next one."""
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.meet(second)
    first.serve(CHAT)
    first.tell(second)
    first.serve([(90, 0, 206), *CHAT], 11.0)
    assert not list(first.routes.route_updates(11.0))
    first.serve([(64, 304, 404)], 12.99)
    assert len(list(first.routes.route_updates(12.99))) == 1
    first.serve([(96, 306, 406), (64, 304, 404)], 12.999)
    assert not list(first.routes.route_updates(12.9995))
    assert len(list(first.routes.route_updates(11.0 + HOLD_S))) == 2
    assert first.routes.wake_at == inf


def test_what_waits_together_of_one_chat_is_one_route_update() -> None:
    """The tokens of a prompt are there before those of its answer."""
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.meet(second)
    first.serve(CHAT)
    first.tell(second)
    first.serve(NEXT_TURN, 11.0)
    first.serve([(128, 107, 207), *NEXT_TURN], 11.02)
    assert not list(first.routes.route_updates(11.03))
    first.tell(second, 11.0 + COMPANY_S)
    assert first.routes.counters.told == 2
    assert [view.tokens for view in second.table.subtree(0)] == [16, 32, 64, 96, 128]


def test_what_a_peer_tells_meanwhile_is_not_told_again() -> None:
    """The next turn may reach another node before the news of this one: both would tell of both."""
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.meet(second)
    first.serve(CHAT)
    first.tell(second)
    first.serve(NEXT_TURN, 11.0)
    second.serve([(128, 107, 207), *NEXT_TURN], 11.02)
    assert not list(second.routes.route_updates(11.03))
    first.tell(second, 11.0 + COMPANY_S)
    (told,) = second.routes.route_updates(11.02 + COMPANY_S)
    assert decode(told[0]).chain == ((128, 107, 207),)
    assert decode(told[0]).parent == 106
    assert second.routes.counters.keys_spared == 1


def test_a_turn_whose_tokens_never_come_is_told_by_its_texts() -> None:
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.meet(second)
    first.serve(CHAT)
    first.tell(second)
    first.serve([(90, 0, 206), *CHAT], 11.0)
    first.tell(second, 11.0 + HOLD_S)
    assert second.holders([(90, 0, 206)], 11.0 + HOLD_S) == [(ENGINE, 90, Trust.REMOTE)]


def test_a_new_chat_is_told_at_once_by_its_texts() -> None:
    """A crowd that comes to all nodes at once must find out where the first one went."""
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.meet(second)
    first.serve([(60, 0, 204), (30, 0, 202)])
    first.tell(second)
    assert second.holders([(60, 0, 204)]) == [(ENGINE, 60, Trust.REMOTE)]


def test_one_restart_that_a_peer_told_of_first_is_one_restart() -> None:
    """Counted twice, it would void what was learned of the new process in between."""
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.registry.probed(first.engine().id, ProbeResult(ok=True, started_at=100.0), 0.5)
    first.backends.look(0.5)
    first.hear(second, 1.0, boot=2, started_at=500.0)
    generation = first.engine().generation
    first.serve(CHAT, 2.0)
    first.registry.probed(first.engine().id, ProbeResult(ok=True, started_at=500.2), 3.0)
    first.backends.look(3.0)
    assert (first.engine().generation, first.facts.boot(first.key())) == (generation, 2)
    assert first.holders(CHAT, 3.0)


def test_one_restart_without_start_times_is_one_restart_too() -> None:
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    for now in (0.1, 0.2):
        first.registry.probed(first.engine().id, ProbeResult(ok=True), now)
    first.hear(second, 1.0, boot=2)
    generation = first.engine().generation
    first.registry.probed(first.engine().id, ProbeResult(ok=False, refused=True), 1.5)
    first.registry.probed(first.engine().id, ProbeResult(ok=True), 2.0)
    assert first.engine().generation == generation


def test_a_restart_that_we_saw_first_is_not_repeated_on_a_peers_word() -> None:
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    for started_at in (100.0, 500.0):
        first.registry.probed(first.engine().id, ProbeResult(ok=True, started_at=started_at), 1.0)
        first.backends.look(1.0)
    generation = first.engine().generation
    first.hear(second, 2.0, boot=7, started_at=500.0)
    assert first.engine().generation == generation


def test_claims_of_a_process_that_we_never_met_are_not_given_to_the_next_one() -> None:
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    second.registry.probed(second.engine().id, ProbeResult(ok=True, started_at=100.0), 0.5)
    second.backends.look(0.5)
    first.hear(second, 1.0, started_at=100.0)
    second.serve(CHAT, 1.0)
    second.tell(first, 1.0)
    assert first.holders(CHAT, 1.0)
    first.registry.probed(first.engine().id, ProbeResult(ok=True, started_at=900.0), 2.0)
    first.backends.look(2.0)
    assert not first.holders(CHAT, 2.0)


def test_claims_of_a_process_that_nobody_knows_are_void_when_a_peer_knows_the_next_one() -> None:
    """It served before anything was known of it, and was gone when peers came; all of them count it as the first."""
    first, second, third = Node(1, ENGINE), Node(2, ENGINE), Node(3, ENGINE)
    second.registry.dispatched(second.engine().id, 0.5)
    second.registry.finished(second.engine().id, Outcome.SUCCESS, 0.5)
    second.serve(CHAT, 0.5)
    second.registry.probed(second.engine().id, ProbeResult(ok=False, refused=True), 1.0)
    for node in (first, third):
        node.meet(second, 1.5)
    second.tell(third, 1.5)
    assert third.holders(CHAT, 1.5)
    probe(first, 900.0, 2.0)
    first.backends.look(2.0)
    first.meet(second, 2.1)
    assert not second.holders(CHAT, 2.2)
    assert second.facts.boot(second.key()) == 2
    third.meet(second, 2.2)
    assert not third.holders(CHAT, 2.3), "it had them by the number of the first"
    first.meet(second, 2.3)
    assert first.engine().generation == 1, "it has met one process only"


def test_peers_claims_are_void_when_the_engine_was_refused_to_us_until_we_knew_its_process() -> None:
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.registry.probed(first.engine().id, ProbeResult(ok=False, refused=True), 0.2)
    second.serve(CHAT, 0.5)
    first.meet(second, 1.0)
    second.tell(first, 1.0)
    assert first.holders(CHAT, 1.0)
    probe(first, 900.0, 2.0)
    assert not first.holders(CHAT, 2.0)


def probe(node: Node, started_at: float, now: float) -> None:
    node.registry.probed(node.engine().id, ProbeResult(ok=True, started_at=started_at), now)


def test_a_restart_that_only_the_registry_has_seen_voids_what_peers_still_tell_of_the_old_process() -> None:
    """A probe finds it between two looks: until the next look old claims were taken for the new process's."""
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    for node in (first, second):
        probe(node, 100.0, 0.5)
        node.backends.look(0.5)
    first.meet(second)
    second.serve(CHAT, 1.0)
    probe(first, 900.0, 2.0)
    second.tell(first, 2.0)
    assert not first.holders(CHAT, 2.0)
    first.backends.look(3.0)
    assert not first.holders(CHAT, 3.0)
    assert first.facts.boot(first.key()) == 2


def test_nothing_is_taken_from_peers_before_their_counts_are_known() -> None:
    """A node that has just started calls the new process 1, as the others call the one before."""
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    probe(second, 100.0, 0.5)
    second.backends.look(0.5)
    second.serve(CHAT, 1.0)
    probe(first, 900.0, 1.0)
    first.backends.look(1.0)
    second.tell(first, 2.0)
    assert not first.holders(CHAT, 2.0)
    assert not first.backends.regained()
    first.meet(second, 3.0)
    assert first.facts.boot(first.key()) == second.facts.boot(second.key()) == 2
    assert first.backends.regained(), "what was not taken is to be had by comparing tables"
    assert not first.backends.regained()


def test_a_process_that_peers_count_otherwise_starts_anew_though_we_know_it() -> None:
    """What peers told of the one before, by the number that we gave this one, would pass for its own."""
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.hear(second, 0.5, boot=1, started_at=100.0)
    second.serve(CHAT, 1.0)
    second.tell(first, 1.0)
    assert first.holders(CHAT, 1.0)
    probe(first, 900.0, 2.0)
    first.hear(second, 2.1, boot=2, started_at=900.0)
    assert not first.holders(CHAT, 2.2)


def test_before_the_table_is_shown_everything_in_it_is_told() -> None:
    """Whoever gets it may be the only one who has it when we die, and then no log would bring it to the rest."""
    first = Node(1, ENGINE)
    told: list[bytes] = []
    first.routes.asked = lambda: told.extend(
        route_update for route_update, _ in first.routes.route_updates(11.0, hold_s=0.0)
    )
    first.serve(CHAT)
    list(first.routes.route_updates(10.0))
    first.serve([(90, 0, 206), *CHAT], 11.0)
    assert not list(first.routes.route_updates(11.0))
    next(first.routes.sums(11.0))
    assert len(told) == 1
    first.serve([(95, 0, 207), *CHAT], 11.0)
    first.routes.rows(b"")
    assert len(told) == 2


def test_what_an_earlier_process_held_is_told_again_when_the_next_one_holds_it() -> None:
    """Rows above the known one are not new to us, but to a peer that never took the claim of the earlier process."""
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    first.meet(second)
    first.serve(CHAT, 10.0)
    list(first.routes.route_updates(10.0))  # and second did not hear it
    first.registry.restart(first.engine(), "test", 11.0)
    first.backends.look(11.0)
    first.serve(NEXT_TURN, 12.0)
    first.tell(second, 12.0)
    assert [(view.tokens, view.level) for view in second.table.subtree(0)] == [(16, 0), (32, 1), (64, 2), (96, 3)]
    assert second.holders(CHAT, 12.0) == [(ENGINE, 64, Trust.REMOTE)]


def test_a_restart_seen_here_since_the_last_look_is_the_one_that_a_peer_tells_of() -> None:
    """A probe here and events there see it within one interval, and neither has told the other yet."""
    first, second = Node(1, ENGINE), Node(2, ENGINE)
    probe(first, 100.0, 0.5)
    first.backends.look(0.5)
    before = first.engine().generation
    probe(first, 900.0, 2.0)
    first.backends.before_hearing(2.1)
    first.hear(second, 2.1, boot=2)
    assert first.engine().generation == before + 1
