"""The laws of tables whose rows merge by a join, for each in use. Tests of its own are about what its rows mean."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import permutations
from random import Random
from typing import Any, NamedTuple

import pytest

from ranvier_py.core.access.limit_values import Budget, CalendarWindow, Limits
from ranvier_py.core.access.limits.limit_gossip import LimitCounts, LimitGossip
from ranvier_py.core.access.limits.limiter import Grant
from ranvier_py.core.access.limits.meter_groups import MeterGroup
from ranvier_py.core.access.limits.meters import Amounts, meters_of
from ranvier_py.core.access.revocations import Revocations
from ranvier_py.core.clients.body_mender import OFF, PROVED, TrialResult
from ranvier_py.core.clients.rule_verdicts import RuleVerdicts, VerdictGossip
from ranvier_py.core.engine_cache.peers.reader_claims import ReaderClaimTable
from ranvier_py.core.mesh.mesh_values import Outgoing
from ranvier_py.core.response_cache.invalidations import VoidScope
from ranvier_py.core.response_cache.peers.answer_values import PeerAnswerSettings
from ranvier_py.core.response_cache.peers.invalidation_gossip import Voided
from ranvier_py.core.response_cache.peers.peer_answers import DIGEST_INTERVAL_S, AnswerSecrets, PeerAnswers
from ranvier_py.core.routing.backend_state.facts import BackendFacts, Facts, Verdict
from ranvier_py.core.routing.backend_state.signed_commands import SignedCommands
from tests.builders.machine_net import LoneMachine, MachineNet, peer_of
from tests.core.clients.test_rule_verdicts import RULES, mender


class Table(NamedTuple):
    """How a table is made, changed at random on one node, and compared among the `live` sessions."""

    make: Callable[[int, list[Outgoing], Random, float], Any]
    change: Callable[[Any, Random, float], object]
    rows: Callable[[Any, Collection[int]], Any]
    repeat_s: float
    message: type[Any]


def made(session: int, now: float, *, kind: Table) -> LoneMachine[Any]:
    return LoneMachine(partial(kind.make, session), Random(session), now)


def commands(_: int, outbox: list[Outgoing], rng: Random, now: float) -> SignedCommands:
    return SignedCommands(b"k" * 32, outbox, rng, now, wall_ms=1_795_262_400_000 + round(1000 * now))


def give(table: SignedCommands, rng: Random, now: float) -> None:
    table.give(rng.choice(("add", "remove")), f"http://e{rng.randrange(2)}", rng.random(), "e", now)


def see(table: BackendFacts, rng: Random, _: float) -> None:
    backend = rng.randrange(2)
    table.observe(backend, Verdict.HEALTHY, 0.0)
    if rng.random() < 0.5:
        table.restarted(backend, 0.0)
    else:
        table.drain(backend, draining=rng.random() < 0.5)


def answers(_: int, outbox: list[Outgoing], rng: Random, now: float) -> PeerAnswers:
    return PeerAnswers(PeerAnswerSettings(ttl_s=1e6), AnswerSecrets(b"a cluster secret"), outbox, rng, now)


def with_rules(session: int, outbox: list[Outgoing], rng: Random, now: float) -> VerdictGossip:
    table = VerdictGossip(f"n{session}", outbox, rng, now)
    table.mender = mender(*RULES)
    return table


def judge(table: VerdictGossip, rng: Random, now: float) -> None:
    assert table.mender is not None
    verdict = TrialResult("tools-by-name", rng.choice("ab"), rng.choice("mn"), rng.choice((PROVED, OFF)), "", "n1")
    table.receive(peer_of(9), RuleVerdicts(table.mender.rules, (verdict,)), now)


def limited(session: int, outbox: list[Outgoing], rng: Random, now: float) -> LimitGossip:
    table = LimitGossip(session, outbox, rng, now)
    table.begin()
    table.counts.wall_offset_s = 1_795_262_400.0
    return table


def spend(table: LimitGossip, rng: Random, now: float) -> None:
    meters = tuple(meters_of("tenant a", Limits(budget=(Budget(1e9, CalendarWindow.MONTH),)), "a"))
    grant = table.begin().reserve(MeterGroup(meters), Amounts(1.0 + rng.randrange(99)), now)
    assert isinstance(grant, Grant)
    if rng.random() < 0.7:
        table.begin().settle(Amounts(1.0 + rng.randrange(99)), grant)


NOON_MS = 1_795_262_400_000


def revocations(_: int, outbox: list[Outgoing], rng: Random, now: float) -> Revocations:
    return Revocations(b"k" * 32, outbox, rng, now, wall_ms=NOON_MS + round(1000 * now))


TABLES = {
    "revocations": Table(
        revocations,
        lambda table, rng, now: table.give(rng.choice("ab"), NOON_MS + 10**9 if rng.random() < 0.8 else 0, now),
        lambda table, _: table.stored(),
        Revocations.REPEAT_S,
        object,
    ),
    "commands": Table(commands, give, lambda table, _: table.floors, SignedCommands.REPEAT_S, object),
    "readers": Table(
        lambda *given: ReaderClaimTable(*given, lambda _: None),
        lambda table, rng, _: table.report(rng.randrange(2), rng.randrange(6)),
        lambda table, live: {at: one.state for at, one in table.known.items() if one.state and one.member in live},
        ReaderClaimTable.REPEAT_S,
        object,
    ),
    "facts": Table(
        lambda _, *more: BackendFacts(*more),
        see,
        lambda table, _: {one.backend: (one.generation, one.draining, one.drain_clock) for one in table.known(0.0)},
        BackendFacts.REPEAT_S,
        Facts,
    ),
    "invalidations": Table(
        answers,
        lambda table, rng, now: table.invalidations.give(VoidScope(rng.choice("abc")), now, now),
        lambda table, _: sorted((one.number, one.scope) for one in table.invalidations.known),
        DIGEST_INTERVAL_S,
        Voided,
    ),
    "limits": Table(
        limited,
        spend,
        lambda table, _: sorted(
            (row.origin, row.window, row.reserved, row.settled, row.used) for row in table.counts.all_rows()
        ),
        LimitGossip.REPEAT_S,
        LimitCounts,
    ),
    "verdicts": Table(
        with_rules, judge, lambda table, _: sorted(one[:4] for one in table.mender.verdicts()), VerdictGossip.REPEAT_S,
        RuleVerdicts,
    ),
}  # fmt: skip
tables = pytest.mark.parametrize("kind", TABLES.values(), ids=TABLES)


def all_rows(net: MachineNet[LoneMachine[Any]], kind: Table) -> list[Any]:
    return [kind.rows(node.machine, net.nodes) for node in net.nodes.values()]


@tables
@pytest.mark.parametrize("seed", range(6))
def test_all_nodes_end_with_the_same_rows_whatever_is_lost_doubled_late_cut_and_restarted(
    kind: Table, seed: int
) -> None:
    net, rng = MachineNet(partial(made, kind=kind), 4, seed), Random(seed)
    net.link(loss=0.3, duplicate=0.2, jitter_s=0.35)
    for _ in range(40):
        fault = rng.random()
        if fault < 0.1:
            net.part(*rng.sample(sorted(net.nodes), 2))
        elif fault < 0.2:
            net.network.links.heal()
            net.cut(*((one,) for one in rng.sample(sorted(net.nodes), 2)))  # nobody notices
        elif fault < 0.4:
            net.heal()
        elif fault < 0.5:
            last = max(net.nodes)
            net.kill(rng.choice(sorted(net.nodes)), forgotten=True)
            net.start(last + 1)
        kind.change(rng.choice(list(net.nodes.values())).machine, rng, net.now)
        net.run(rng.random())
    net.link(loss=0.0, duplicate=0.0, jitter_s=0.0)
    net.heal()
    net.run(8 * kind.repeat_s)
    first, *others = all_rows(net, kind)
    assert first
    assert others == [first] * 3


@tables
def test_a_change_is_everywhere_at_once_and_a_newcomer_gets_all_rows_without_waiting_for_repetition(
    kind: Table,
) -> None:
    net, rng = MachineNet(partial(made, kind=kind), 3), Random(1)
    for node in (*net.nodes.values(), *net.nodes.values()):
        kind.change(node.machine, rng, net.now)
    net.run(1.0)
    net.start(4)
    net.run(0.2)
    first, *others = all_rows(net, kind)
    assert first
    assert others == [first] * 3


@tables
def test_the_same_messages_in_any_order_and_twice_give_the_same_rows(kind: Table) -> None:
    net, rng = MachineNet(partial(made, kind=kind), 2), Random(2)
    for _ in range(4):
        kind.change(net.nodes[1].machine, rng, net.now)
        net.run(0.5)
    messages = [message for _, sender, _, message, _ in net.sent if sender == 1 and isinstance(message, kind.message)][
        :4
    ]
    assert len(messages) > 2
    ends = []
    for order in permutations(messages):
        node = made(2, net.now, kind=kind)
        for message in (*order, *order):
            node.machine.receive(peer_of(1), message, net.now)
        ends.append(kind.rows(node.machine, net.nodes))
    assert all(end == ends[0] for end in ends)
