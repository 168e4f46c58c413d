"""A node that an operator asks knows within a moment what each peer has, and in what that differs."""

from __future__ import annotations

from random import Random

import pytest

from ranvier_py.core.mesh.mesh_values import Outgoing
from ranvier_py.core.routing.backend_state import backend_lists as b
from ranvier_py.core.routing.backend_state.facts import BackendFacts
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync
from ranvier_py.core.routing.backends import BackendLimits, Registry
from tests.builders.machine_net import MachineNet

SECRET = b"a secret of all nodes"


class ListNode:
    """A node that has so many backends and shares nothing but their list."""

    def __init__(self, session: int, now: float, count: int) -> None:
        self.outbox: list[Outgoing] = []
        self.registry = Registry(BackendLimits())
        for number in range(count):
            self.registry.add(f"http://e{number}:8000", name=f"e{number}")
        self.backends = RegistrySync(self.registry, BackendFacts([], Random(session), now), SECRET)
        self.backends.look(now)
        self.lists = b.BackendLists(self.backends, self.outbox)
        self.machines = (self.lists,)


def net_of(*counts: int) -> MachineNet[ListNode]:
    return MachineNet(lambda session, now: ListNode(session, now, counts[session - 1]), len(counts))


@pytest.mark.parametrize("count", [0, 1, b.PORTION, 3 * b.PORTION + 1])
def test_all_of_a_list_comes_in_portions(count: int) -> None:
    net = net_of(2, count)
    asked = net.nodes[1].lists.ask()
    assert asked.waits
    net.run(2.0)
    assert asked.list_of(2) is not None
    assert {row.name for row in (asked.list_of(2) or {}).values()} == {f"e{number}" for number in range(count)}
    assert not asked.waits
    assert net.nodes[2].lists.wake_at == float("inf")


def test_each_difference_is_named() -> None:
    rows = [b.ListedBackend(key, 1.0, False, 1, 0, 7, f"e{key}") for key in range(6)]
    theirs = [
        rows[0]._replace(in_flight=9, name="its own name"),
        rows[1]._replace(weight=2.5, draining=True),
        rows[2]._replace(health=2),
        rows[3]._replace(options=8),
        rows[5]._replace(key=9, name="more"),
    ]
    found = dict(b.differences(*({row.key: row for row in each} for each in (rows[:5], theirs))))
    assert found == {
        "e1": "has weight 2.5, here 1; is drained, here not",
        "e2": "is unhealthy, here healthy",
        "e3": "has other options",
        "e4": "is not there",
        "more": "is not here",
    }


def test_questions_beyond_the_bound_cost_the_oldest_their_answer() -> None:
    net = net_of(0, 2 * b.PORTION)
    asked = [net.nodes[1].lists.ask() for _ in range(b.DUE_MAX + 9)]
    net.run(2.0)
    assert net.nodes[2].lists.counters.asked == len(asked)
    assert [each.waits for each in asked] == [True] * (len(asked) - b.ASKED_MAX) + [False] * b.ASKED_MAX
