"""Signed commands of the operator."""

from random import Random

import pytest

from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.mesh.wire.frame import SPOKEN, BadFrame
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.routing.backend import NAME_CHARS_MAX
from ranvier_py.core.routing.backend_state import signed_commands as c
from tests.builders.machine_net import alike

KEY = b"k" * 32
URL = "http://10.0.0.1:8000"
PEER = Peer(7, ("127.0.0.1", 7946))
NOON_MS = 1_795_262_400_000


def node(key: bytes = KEY, wall_ms: int = NOON_MS, **more: dict[int, int]) -> tuple[c.SignedCommands, list[Outgoing]]:
    outbox: list[Outgoing] = []
    return c.SignedCommands(key, outbox, Random(1), 0.0, wall_ms=wall_ms, **more), outbox


def command(
    clock: int, verb: str = "add", *, key: bytes = KEY, url: str = URL, signed_ms: int = NOON_MS, weight: float = 1.0
) -> c.Command:
    unsigned = c.Command(clock, signed_ms, verb, url, weight, "e", b"")
    return unsigned._replace(signature=c.signature_of(key, unsigned))


def commands(outbox: list[Outgoing]) -> list[c.Command]:
    """All that was sent, each message short enough for the wire."""
    messages = [outgoing.message for outgoing in outbox if isinstance(outgoing.message, c.Commands)]
    for message in messages:
        CODEC.encode(message)
    outbox.clear()
    return [each for message in messages for each in message.commands]


def verbs(taker: c.SignedCommands) -> list[str]:
    return [new.verb for new in taker.new]


def test_a_command_given_on_one_node_is_followed_by_another() -> None:
    giver, outbox = node()
    taker, _ = node()
    giver.met(alike([PEER]), 0.0)
    assert giver.give("add", URL, 2.0, "engine-1", 0.0)
    giver.tick(0.0)
    message = outbox[-1].message
    assert isinstance(message, c.Commands)
    taker.receive(PEER, message, 0.0)
    assert [(new.verb, new.url, new.weight, new.name) for new in taker.new] == [("add", URL, 2.0, "engine-1")]


OPTIONS = c.CommandOptions(2, True, "engine.internal", "/team-a")


def test_the_options_of_a_backend_are_followed_and_passed_on_beside_commands_without() -> None:
    giver, outbox = node()
    taker, passed = node()
    giver.give("add", "http://10.0.0.2:1", 1.0, "", 0.0)
    giver.give("add", URL, 1.0, "", 0.0, OPTIONS)
    giver.met(alike([PEER]), 0.0)
    taker.receive(PEER, CODEC.decode(*CODEC.encode(outbox[-1].message)), 0.0)
    assert [new.options for new in taker.take_new()] == [c.NO_OPTIONS, OPTIONS]
    taker.met(alike([PEER]), 0.0)
    assert passed[-1].message == outbox[-1].message
    assert len(commands(outbox)) == 2


@pytest.mark.parametrize(
    "options",
    [
        (),
        (c.NO_OPTIONS,),
        (OPTIONS._replace(any_model=False),),
        (OPTIONS._replace(tls_name="evil"),),
        (OPTIONS._replace(base_path="/evil"),),
    ],
)
def test_a_command_is_refused_without_its_options_or_with_others(options: tuple[c.CommandOptions, ...]) -> None:
    giver, outbox = node()
    taker, _ = node()
    giver.give("add", URL, 1.0, "", 0.0, OPTIONS)
    giver.met(alike([PEER]), 0.0)
    message = outbox[-1].message
    assert isinstance(message, c.Commands)
    taker.receive(PEER, message._replace(options=options), 0.0)
    assert (taker.new, taker.counters.refused["signature"]) == ([], 1)


def test_the_previous_version_takes_commands_without_options_as_ever_and_refuses_others() -> None:
    giver, outbox = node()
    taker, _ = node()
    giver.give("add", "http://10.0.0.2:1", 1.0, "", 0.0)
    giver.give("add", URL, 1.0, "", 0.0, OPTIONS)
    giver.met(alike([PEER]), 0.0)
    previous = SPOKEN[0]
    taker.receive(PEER, CODEC.decode(*CODEC.encode(outbox[-1].message, previous), previous), 0.0)
    assert [new.url for new in taker.new] == ["http://10.0.0.2:1"]
    assert taker.counters.refused["signature"] == 1


@pytest.mark.parametrize(
    "change", [{"url": "http://evil:1"}, {"verb": "remove"}, {"weight": 9.0}, {"clock": 5}, {"signed_ms": NOON_MS + 1}]
)
def test_a_command_changed_on_its_path_is_refused(change: dict[str, object]) -> None:
    taker, _ = node()
    taker.receive(PEER, c.Commands((command(1)._replace(**change),)), 0.0)  # type: ignore[arg-type]
    assert not taker.new
    assert taker.counters.refused["signature"] == 1


def test_without_the_admin_key_nothing_is_given_taken_or_passed_on() -> None:
    taker, outbox = node(b"")
    taker.met(alike([PEER]), 0.0)
    taker.receive(PEER, c.Commands((command(1, key=b""),)), 0.0)
    taker.tick(100.0)
    assert not taker.give("add", URL, 1.0, "", 0.0)
    assert not taker.new
    assert not outbox


def test_the_same_command_twice_is_followed_and_passed_on_once() -> None:
    taker, outbox = node()
    taker.met(alike([PEER]), 0.0)
    for _ in range(2):
        taker.receive(PEER, c.Commands((command(1),)), 0.0)
        taker.tick(0.0)
    assert len(taker.new) == 1
    assert len(outbox) == 1


def test_a_clock_near_its_end_can_not_be_forced_on_us() -> None:
    taker, _ = node()
    taker.receive(PEER, c.Commands((command(1), command(NOON_MS + c.CLOCK_AHEAD_MS + 1, "remove"))), 0.0)
    assert verbs(taker) == ["add"]
    assert taker.counters.refused["time"] == 1


def test_a_newcomer_is_sent_all_commands_in_messages_that_the_wire_takes() -> None:
    giver, outbox = node()
    for port in range(300):
        giver.give("add", f"http://10.0.0.1:{port + 1}", 1.0, "", 0.0)
    giver.met(alike([PEER]), 0.0)
    assert len(commands(outbox)) == 300


def test_a_name_as_long_as_the_registry_takes_is_shared() -> None:
    giver, outbox = node()
    assert giver.give("add", URL, 1.0, "e" * NAME_CHARS_MAX, 0.0)
    giver.met(alike([PEER]), 0.0)
    assert [len(each.name) for each in commands(outbox)] == [NAME_CHARS_MAX]


@pytest.mark.parametrize(
    ("url", "weight", "name"),
    [(f"http://{'a' * 600}:1", 1.0, "e"), (URL, 1.0, "e" * 129), (URL, 1.0, "\n")],
)
def test_a_command_that_the_wire_does_not_take_is_refused_and_keeps_no_other_from_travelling(
    url: str, weight: float, name: str
) -> None:
    giver, outbox = node()
    assert not giver.give("add", url, weight, name, 0.0)
    assert giver.counters.refused["wire"] == 1
    assert giver.give("add", "http://10.0.0.2:1", 1.0, "", 0.0)
    giver.met(alike([PEER]), 0.0)
    assert [each.url for each in commands(outbox)] == ["http://10.0.0.2:1"]


def test_commands_are_shared_however_many_backends_there_were_in_the_life_of_the_cluster() -> None:
    """After 4096 URLs nothing that the operator said reached another node, and nobody was told."""
    giver, outbox = node()
    taker, _ = node()
    giver.met(alike([PEER]), 0.0)
    for port in range(c.COMMANDS_MAX + 100):
        url = f"http://10.0.0.1:{port + 1}"
        assert giver.give("add", url, 1.0, "", port)
        assert giver.give("remove", url, 1.0, "", port)
        giver.tick(0.0)
        sent = commands(outbox)
        taker.receive(PEER, c.Commands(tuple(sent)), port)
        assert [(new.verb, new.url) for new in taker.new] == [("remove", url)], "the last one of each URL"
        taker.new.clear()
    assert len(giver) == len(taker) == c.COMMANDS_MAX
    assert taker.counters.refused["full"] == 0


def test_a_node_without_peers_keeps_the_last_command_of_each_url_alone() -> None:
    """Until the first peer came it kept all that the operator ever said, and sent it then."""
    giver, outbox = node()
    for at in range(100):
        assert giver.give("remove" if at % 2 else "add", URL, 1.0, "", at)
        giver.tick(at)
    giver.met(alike([PEER]), 100.0)
    giver.tick(100.0)
    assert [each.verb for each in commands(outbox)] == ["remove"]


def test_an_addition_whose_removal_gave_its_place_away_can_not_be_brought_back() -> None:
    taker, _ = node()
    added, removed = command(1), command(2, "remove")
    many = [command(3 + port, url=f"http://10.0.0.2:{port + 1}") for port in range(c.COMMANDS_MAX)]
    taker.receive(PEER, c.Commands((added, removed, *many)), 0.0)
    assert (len(taker), taker.counters.refused["full"]) == (c.COMMANDS_MAX, 0)
    taker.receive(PEER, c.Commands((added, removed)), 0.0)
    assert taker.counters.refused["old"] == 2
    assert len(taker.new) == 2 + c.COMMANDS_MAX


def test_one_more_addition_than_there_can_be_backends_is_refused_and_counted() -> None:
    giver, _ = node()
    taker, _ = node()
    for port in range(c.COMMANDS_MAX):
        assert giver.give("add", f"http://10.0.0.2:{port + 1}", 1.0, "", 0.0)
    assert not giver.give("add", URL, 1.0, "", 1.0)
    assert giver.counters.refused["full"] == 1
    many = [command(3 + port, url=f"http://10.0.0.2:{port + 1}") for port in range(c.COMMANDS_MAX)]
    taker.receive(PEER, c.Commands((*many, command(9000))), 0.0)
    assert taker.counters.refused["full"] == 1


def test_commands_are_followed_in_the_order_in_which_the_operator_gave_them() -> None:
    """A node that was cut off got the new backend of a name before the removal of the old one, and refused it."""
    giver, outbox = node()
    taker, _ = node()
    steps = [("add", 2, "a"), ("remove", 2, ""), ("add", 1, "a"), ("remove", 1, ""), ("add", 2, "a")]
    for at, (verb, port, name) in enumerate(steps):
        giver.give(verb, f"http://10.0.0.1:{port}", 1.0, name, at)
    giver.met(alike([PEER]), 9.0)
    taker.receive(PEER, c.Commands(tuple(commands(outbox))), 9.0)
    assert [(new.verb, new.url[-1]) for new in taker.take_new()] == [("remove", "1"), ("add", "2")]
    assert not taker.take_new()


def test_a_command_that_could_not_be_followed_is_tried_after_the_next_one() -> None:
    taker, _ = node()
    taker.receive(PEER, c.Commands((command(2),)), 0.0)
    (failed,) = taker.take_new()
    taker.followed(failed, "no room")
    assert not taker.take_new()
    taker.receive(PEER, c.Commands((command(1, "remove", url="http://10.0.0.9:1"),)), 1.0)
    assert [new.clock for new in taker.take_new()] == [1, 2]
    taker.receive(PEER, c.Commands((command(3, "remove", url="http://10.0.0.9:1"),)), 1.0)
    assert [new.clock for new in taker.take_new()] == [3], "it did not fail again"


def test_a_command_that_could_not_be_followed_is_tried_now_and_then_until_a_later_one_comes() -> None:
    taker, _ = node()
    taker.receive(PEER, c.Commands((command(1), command(2, url="http://10.0.0.9:1"))), 0.0)
    for failed in taker.take_new():
        taker.followed(failed, "no room")
    tries = 0
    while (now := taker.wake_at) < 3600.0:
        taker.tick(now)
        for failed in taker.take_new():
            tries += 1
            taker.followed(failed, "no room")
    assert 2 * 10 <= tries <= 2 * 13
    taker.receive(PEER, c.Commands((command(5, "remove"),)), 3600.0)
    assert [(new.clock, new.verb) for new in taker.take_new()] == [(2, "add"), (5, "remove")]


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age_s", "is_taken"),
    [(0, True), (c.VALID_S, True), (c.VALID_S + c.SKEW_S + 1, False), (-c.SKEW_S, True), (-c.SKEW_S - 1, False)],
)
def test_a_command_is_taken_for_an_hour_from_its_signature(age_s: float, is_taken: bool) -> None:
    taker, _ = node()
    taker.receive(PEER, c.Commands((command(1, signed_ms=NOON_MS - round(1000 * age_s)),)), 0.0)
    assert (len(taker.new), taker.counters.refused["time"]) == ((1, 0) if is_taken else (0, 1))


def test_a_recorded_addition_can_not_be_brought_back_when_all_nodes_have_forgotten_it() -> None:
    """All restarted, without state files: nobody knows of the removal that followed."""
    giver, outbox = node()
    giver.met(alike([PEER]), 0.0)
    giver.give("add", URL, 1.0, "", 0.0)
    giver.tick(0.0)
    (recorded,) = commands(outbox)
    giver.give("remove", URL, 1.0, "", 60.0)
    later, _ = node(wall_ms=NOON_MS + round(1000 * (c.VALID_S + c.SKEW_S + 1)))
    later.receive(PEER, c.Commands((recorded,)), 0.0)
    assert not later.new


def test_a_recorded_addition_can_not_be_brought_back_even_at_once_where_there_is_a_state_file() -> None:
    before, _ = node()
    added = command(1)
    before.receive(PEER, c.Commands((added, command(2, "remove"))), 0.0)
    after, _ = node(floors=before.floors)
    after.receive(PEER, c.Commands((added,)), 0.0)
    assert not after.new
    assert after.counters.refused["old"] == 1
    after.receive(PEER, c.Commands((command(2, "remove"),)), 0.0)
    assert verbs(after) == ["remove"]


def test_what_the_operator_commands_after_a_restart_beats_what_he_did_before() -> None:
    """Also on nodes that remember where the giver does not."""
    before, outbox = node()
    before.met(alike([PEER]), 0.0)
    for verb in ("add", "remove", "add", "remove"):
        before.give(verb, URL, 1.0, "", 0.0)
    after, outbox = node(wall_ms=NOON_MS + 1000)
    after.met(alike([PEER]), 0.0)
    after.give("add", URL, 1.0, "", 0.0)
    after.tick(0.0)
    other, _ = node(wall_ms=NOON_MS + 1000, floors=before.floors)
    other.receive(PEER, c.Commands(tuple(commands(outbox))), 0.0)
    assert verbs(other) == ["add"]


def test_a_command_is_signed_again_for_as_long_as_a_node_follows_it() -> None:
    """Hours after the operator gave it on a node that is gone, one more node joins."""
    follower, outbox = node()
    follower.receive(PEER, c.Commands((command(1),)), 0.0)
    now = 0.0
    while now < 3 * c.VALID_S:
        now = follower.wake_at
        follower.tick(now)
    follower.met(alike([PEER]), now)
    newcomer, _ = node(wall_ms=NOON_MS + round(1000 * now))
    newcomer.receive(PEER, c.Commands(tuple(commands(outbox))), 0.0)
    assert verbs(newcomer) == ["add"]
    assert len(follower.new) == 1


def test_a_command_that_was_signed_again_is_not_followed_again_and_not_passed_on() -> None:
    taker, outbox = node()
    taker.met(alike([PEER]), 0.0)
    taker.receive(PEER, c.Commands((command(1),)), 0.0)
    taker.tick(0.0)
    outbox.clear()
    taker.receive(PEER, c.Commands((command(1, signed_ms=NOON_MS + 60_000),)), 60.0)
    assert len(taker.new) == 1
    assert taker.wake_at > 0.0


def test_who_signs_first_spares_the_others() -> None:
    nodes = [node() for _ in range(4)]
    for each, outbox in nodes:
        each.met(alike([PEER]), 0.0)
        each.receive(PEER, c.Commands((command(1),)), 0.0)
        each.tick(0.0)
        outbox.clear()
    now, signed = 0.0, set[int]()
    while now < c.RENEW_S + 5 * c.REPAIR_INTERVAL_S:
        each, outbox = min(nodes, key=lambda each: each[0].wake_at)
        now = each.wake_at
        each.tick(now)
        sent = commands(outbox)
        signed.update(new.signed_ms for new in sent)
        for other, _ in nodes:
            other.receive(PEER, c.Commands(tuple(sent)), now)
    assert len(signed - {NOON_MS}) == 1


def test_a_wrong_clock_costs_only_as_long_as_it_is_wrong() -> None:
    taker, _ = node(wall_ms=0)
    taker.receive(PEER, c.Commands((command(1),)), 0.0)
    assert (len(taker.new), taker.counters.refused["time"]) == (0, 1)
    taker.set_wall_clock(NOON_MS, 1.0)
    taker.receive(PEER, c.Commands((command(1),)), 1.0)
    assert len(taker.new) == 1


def test_commands_that_a_node_held_outlive_its_restart_until_they_expire_and_under_their_key_alone() -> None:
    before, outbox = node()
    before.met(alike([PEER]), 0.0)
    before.give("add", URL, 2.0, "e", 0.0, OPTIONS)
    before.give("remove", "http://10.0.0.2:1", 1.0, "", 0.0)
    after, sent = node(wall_ms=NOON_MS + 1000)
    after.restore(before.stored(), 0.0)
    after.met(alike([PEER]), 0.0)
    assert [(new.verb, new.options) for new in after.take_new()] == [("add", OPTIONS), ("remove", c.NO_OPTIONS)]
    before.tick(0.0)
    assert commands(sent) == commands(outbox)
    for changed in (node(b"j" * 32), node(wall_ms=NOON_MS + round(1000 * (c.VALID_S + c.SKEW_S + 1)))):
        changed[0].restore(before.stored(), 0.0)
        assert not changed[0].new
    with pytest.raises(BadFrame):
        after.restore(["00ff"], 0.0)


def test_what_is_kept_across_a_restart_is_bounded_and_the_latest() -> None:
    taker, _ = node()
    many = [command(clock + 1, url=f"http://10.0.0.1:{clock + 1}") for clock in range(c.FLOORS_MAX + 100)]
    taker.receive(PEER, c.Commands(tuple(many)), 0.0)
    assert sorted(taker.floors.values()) == list(range(101, c.FLOORS_MAX + 101))
