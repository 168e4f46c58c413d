"""Nodes that do not have the same backends notice it, and each says how the others' differ."""

from __future__ import annotations

from random import Random

import pytest

from ranvier_py.core.mesh.mesh_values import Outgoing
from ranvier_py.core.routing.backend_state.backend_sets import (
    DIFFERS_S,
    NAMES_MAX,
    REPEAT_S,
    BackendSet,
    BackendSets,
)
from ranvier_py.core.routing.backend_state.facts import BackendFacts
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync
from ranvier_py.core.routing.backends import BackendLimits, Registry
from tests.builders.machine_net import MachineNet

URLS = [f"http://e{number}:8000" for number in range(3)]
SECRET = b"a secret of all nodes"


class SetNode:
    """A node that has these backends and shares nothing but that."""

    def __init__(self, session: int, now: float, urls: list[str]) -> None:
        self.outbox: list[Outgoing] = []
        self.registry = Registry(BackendLimits())
        for url in urls:
            self.registry.add(url)
        rng = Random(session)
        self.backends = RegistrySync(self.registry, BackendFacts([], rng, now), SECRET)
        self.backends.look(now)
        self.registry.names.node_name = "n{}".format
        self.sets = BackendSets(self.backends, self.outbox, rng, now)
        self.machines = (self.sets,)

    def add(self, url: str, now: float) -> None:
        self.registry.add(url)
        self.backends.look(now)
        self.sets.tick(now)  # as the whole node does after each look

    def shown(self) -> dict[str, str]:
        return dict(self.sets.view()["backend_sets"]["differing"])


def net_of(*lists: list[str]) -> MachineNet[SetNode]:
    return MachineNet(lambda session, now: SetNode(session, now, lists[session - 1]), len(lists))


def test_nodes_with_the_same_backends_in_any_order_do_not_differ() -> None:
    net = net_of(URLS, URLS[::-1], URLS)
    net.run(4 * DIFFERS_S)
    assert [node.shown() for node in net.nodes.values()] == [{}, {}, {}]
    assert all(not message.keys and not message.wanted for *_, message, _ in net.sent), "digests are enough"


def test_a_node_that_lacks_a_backend_is_named_with_it_after_half_a_minute_and_no_more_once_it_has_it() -> None:
    net = net_of(URLS, URLS, URLS[:2])
    net.run(DIFFERS_S - 1)
    assert [node.shown() for node in net.nodes.values()] == [{}, {}, {}]
    net.run(2.0)
    lacking = "2 there, 3 here; lacks e2:8000; has 0 that are not here"
    having = "3 there, 2 here; lacks none; has 1 that are not here"
    assert net.nodes[1].shown() == net.nodes[2].shown() == {"n3": lacking}
    assert net.nodes[3].shown() == {"n1": having, "n2": having}
    assert net.nodes[3].sets.counters.differing == 2
    net.nodes[3].add(URLS[2], net.now)
    net.run(0.1)
    assert [node.shown() for node in net.nodes.values()] == [{}, {}, {}]
    assert [node.sets.counters.differing for node in net.nodes.values()] == [0, 0, 0]


def test_a_backend_that_is_added_to_node_after_node_within_half_a_minute_is_no_difference() -> None:
    net = net_of(URLS[:2], URLS[:2], URLS[:2])
    net.run(60.0)
    for node in net.nodes.values():
        node.add(URLS[2], net.now)
        net.run(8.0)
        assert [each.shown() for each in net.nodes.values()] == [{}, {}, {}]
    net.run(2 * DIFFERS_S)
    assert [each.shown() for each in net.nodes.values()] == [{}, {}, {}]


@pytest.mark.parametrize("seed", range(5))
def test_a_difference_is_found_and_ended_although_messages_are_lost(seed: int) -> None:
    net = MachineNet(lambda session, now: SetNode(session, now, URLS[: 1 + session % 2]), 4, seed)
    net.link(loss=0.4, duplicate=0.2, jitter_s=0.3)
    net.run(20 * REPEAT_S)
    assert [sorted(node.shown()) for node in net.nodes.values()] == [["n2", "n4"], ["n1", "n3"]] * 2
    for node in net.nodes.values():
        for url in URLS[len(node.registry) :]:
            node.add(url, net.now)
    net.run(20 * REPEAT_S)
    assert [node.shown() for node in net.nodes.values()] == [{}] * 4


def test_a_node_of_other_settings_is_named_after_half_a_minute_until_they_are_the_same() -> None:
    net = net_of(URLS, URLS[:2], URLS)
    settings = {1: 7, 2: 7, 3: 8}
    for session, node in net.nodes.items():
        node.sets.settings_of = lambda session=session: settings[session]  # type: ignore[misc]
    net.run(DIFFERS_S - 1)
    assert [node.sets.unlike for node in net.nodes.values()] == [frozenset()] * 3
    net.run(2 * REPEAT_S)
    assert [sorted(node.sets.unlike) for node in net.nodes.values()] == [[3], [3], [1, 2]]
    assert "lacks e2:8000" in net.nodes[1].shown()["n2"], "what is known of the peer's set stays known"
    settings[3] = 7
    net.run(2 * REPEAT_S)
    assert [node.sets.unlike for node in net.nodes.values()] == [frozenset()] * 3


def test_a_node_that_shows_no_settings_is_like_all_others() -> None:
    net = net_of(URLS, URLS)
    net.nodes[1].sets.settings_of = lambda: 7
    net.run(4 * DIFFERS_S)
    assert [node.sets.unlike for node in net.nodes.values()] == [frozenset()] * 2


def test_what_many_lacking_backends_are_called_is_bounded() -> None:
    many = [f"http://e{number}:8000" for number in range(40)]
    net = net_of(many, [])
    net.run(2 * DIFFERS_S)
    (text,) = net.nodes[1].shown().values()
    assert text.count(":8000") == NAMES_MAX
    assert f"and {40 - NAMES_MAX} more" in text


def test_keys_are_sent_to_those_that_ask_alone_and_no_url_travels() -> None:
    net = net_of(URLS, URLS, URLS[:2])
    net.run(3 * DIFFERS_S)
    with_keys = [
        (sender, to) for _, sender, to, message, _ in net.sent if isinstance(message, BackendSet) and message.keys
    ]
    assert sorted(with_keys) == [(1, 3), (2, 3), (3, 1), (3, 2)]
    assert not any(b"http" in body or b"8000" in body for body in net.wire)


def test_a_peer_that_is_gone_is_named_no_more() -> None:
    net = net_of(URLS, URLS[:1])
    net.run(2 * DIFFERS_S)
    assert net.nodes[1].shown()
    net.kill(2)
    net.run(1.0)
    assert net.nodes[1].shown() == {}
