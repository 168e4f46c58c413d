"""The checkers hold a cluster that is right, and catch each way of being wrong that they are there for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.scenario import (
    VERBS,
    Cluster,
    Expect,
    Load,
    Scenario,
    Step,
    check,
    load_scenario,
    quiet_at,
    read_scenario,
    settle,
    write_scenario,
)
from cluster.simulation.sim_host import RESOLVE_S, RESOLVE_SPREAD
from cluster.simulation.sim_node import Bounded, Look, SimNode
from cluster.simulation.sim_router import Birth, Trip
from cluster.simulation.sim_run import Run, simulate
from cluster.simulation.sim_steps import SimSteps
from cluster.simulation.swarm import shrink, swarm
from cluster.simulation.world import Violation, World
from ranvier_py.core.mesh.mesh_values import Address, MemberChange, Plane, Send
from ranvier_py.core.mesh.wire.messages import State
from ranvier_py.core.mesh.wire.seal import Subkeys
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.peers.route_settings import RouteGossipSettings

SUBKEYS = Subkeys(entries_max=4096)
Kind = type[SimNode]


class Altered:
    """A peer with some of its calls replaced."""

    def __init__(self, peer: Any, **calls: Any) -> None:
        self.peer = peer
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        return self.calls[name] if name in self.calls else getattr(self.peer, name)


CALM = Scenario(
    name="calm",
    about="nothing happens",
    for_s=12.0,
    cluster=Cluster(nodes=3, engines=2),
    load=Load(chats_per_s=1.0, turns=2, think_s=0.2),
    expect=Expect(agree_s=4.0, same_routes_s=4.0, learned_s=1.0, false_deaths_max=0),
)


def violation(kind: Kind, scenario: Scenario = CALM) -> Violation | None:
    return simulate(scenario, 1, lambda birth: kind(birth, SUBKEYS)).violation


def maker(birth: Birth) -> SimNode:
    return SimNode(birth, SUBKEYS)


def test_a_cluster_that_is_right_passes_and_is_measured() -> None:
    result = simulate(CALM, 1, maker)
    assert result.violation is None
    measures = result.measures
    assert measures["client_served"] >= 5
    assert 0 < measures["learned_t50_s"] < 0.6
    assert measures["agreed_s"] is not None
    assert measures["bulk_bytes_per_node_s"] > 0
    assert 0 < measures["hit_share"] < 1


def test_one_seed_is_one_trace_and_another_seed_is_another() -> None:
    digests = [simulate(CALM, seed, maker).digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


# --- each way of being wrong ------------------------------------------------------------------------------------------


class Raises(SimNode):
    def __init__(self, birth: Birth, subkeys: Subkeys) -> None:
        super().__init__(birth, subkeys)
        peer = self.peer

        def receive(data: bytes, source: Address, plane: Plane, now: float) -> None:
            if now > 3.0:
                raise KeyError("lost")
            peer.receive(data, source, plane, now)

        self.peer = Altered(peer, receive=receive)  # type: ignore[assignment]


class Inspected(SimNode):
    """Looks as `bend` makes it look."""

    bend: Callable[[Look, float], Look]

    def look(self, now: float) -> Look:
        return type(self).bend(super().look(now), now)


def looking(bend: Callable[[Look, float], Look]) -> Kind:
    return type("Bent", (Inspected,), {"bend": staticmethod(bend)})


def dead_of_itself(look: Look, now: float) -> Look:
    return replace(look, me=look.me._replace(state=State.DEAD)) if now > 5 else look


def younger(look: Look, now: float) -> Look:
    return replace(look, me=look.me._replace(incarnation=0 if now > 5 else 3))


def stranger(look: Look, now: float) -> Look:
    return replace(look, members={**look.members, 99: look.me}) if now > 5 else look


def falling(look: Look, now: float) -> Look:
    return replace(look, members={key: seen._replace(epoch=9 if now < 5 else 8) for key, seen in look.members.items()})


def risen(look: Look, now: float) -> Look:
    state = State.DEAD if 4.5 < now < 6.5 else State.ALIVE
    return replace(look, members={key: seen._replace(state=state) for key, seen in look.members.items()})


def forgetful(look: Look, now: float) -> Look:
    return replace(look, vector={look.me.session: 10 if now < 5 else 9})


def boastful(look: Look, now: float) -> Look:
    others = dict.fromkeys(look.members, 5)
    return replace(look, vector={look.me.session: 1, **others})


def bloated(look: Look, now: float) -> Look:
    return replace(look, tables={"queue": Bounded(11, 10)})


@pytest.mark.parametrize(
    ("bend", "invariant"),
    [
        (dead_of_itself, "S1"),
        (younger, "S1"),
        (falling, "S2"),
        (risen, "S2"),
        (forgetful, "S3"),
        (boastful, "S3"),
        (bloated, "S7"),
        (stranger, "S8"),
    ],
)
def test_a_look_that_breaks_an_invariant_is_caught(bend: Callable[[Look, float], Look], invariant: str) -> None:
    found = violation(looking(bend), replace(CALM, expect=Expect()))
    assert found is not None
    assert found.invariant == invariant


def test_an_exception_is_a_failure_of_the_run_and_not_its_end() -> None:
    found = violation(Raises)
    assert found is not None
    assert (found.invariant, "KeyError" in found.text) == ("S9", True)


class Invents(SimNode):
    def claims(self, fingerprint: int, now: float) -> Sequence[tuple[int, int, int, float]]:
        return [(12345, 0, 1, 1.0)]


class Rejuvenates(SimNode):
    def claims(self, fingerprint: int, now: float) -> Sequence[tuple[int, int, int, float]]:
        return [(name, engine, generation, 0.0) for name, engine, generation, _ in super().claims(fingerprint, now)]


class NeverLearns(SimNode):
    """Takes no route update from others, and none of their tables."""

    def __init__(self, birth: Birth, subkeys: Subkeys) -> None:
        super().__init__(birth, subkeys)
        peer = self.peer

        def receive(data: bytes, source: Address, plane: Plane, now: float) -> None:
            if plane is not Plane.BULK:
                peer.receive(data, source, plane, now)

        self.peer = Altered(peer, receive=receive)  # type: ignore[assignment]

    def sums(self, now: float) -> Sequence[int]:
        return [0]


class Refuses(SimNode):
    def start_attempt(self, end: Boundary, tried: Sequence[int], now: float) -> Trip | None:
        return None


class Mute(SimNode):
    """Does not answer, so nobody gets to know it."""

    def __init__(self, birth: Birth, subkeys: Subkeys) -> None:
        super().__init__(birth, subkeys)
        if birth.number == 1:
            self.peer = Altered(self.peer, take=list)  # type: ignore[assignment]


class Diverges(SimNode):
    """Has what others have not."""

    def sums(self, now: float) -> Sequence[int]:
        return [self.session, *super().sums(now)[1:]]


class Flaps(SimNode):
    """Holds everybody for dead for a moment, long after all was quiet."""

    def living(self, now: float) -> Mapping[int, State]:
        return {} if 9.0 < now < 10.0 else super().living(now)


class Blames(SimNode):
    """Says that a node died that runs well. All agree again before they are asked."""

    def __init__(self, birth: Birth, subkeys: Subkeys) -> None:
        super().__init__(birth, subkeys)
        self.number, self.blamed, self.now = birth.number, False, 0.0
        peer = self.peer
        self.peer = Altered(peer, changes=lambda: [*peer.changes(), *self.blame()])  # type: ignore[assignment]

    def blame(self) -> list[MemberChange]:
        members = self.peer.members.alive()
        if self.number or self.blamed or not members:
            return []
        self.blamed = True
        return [MemberChange("died", members[0].record._replace(state=State.DEAD), "silence")]


class Storms(SimNode):
    def __init__(self, birth: Birth, subkeys: Subkeys) -> None:
        super().__init__(birth, subkeys)
        peer = self.peer
        self.peer = Altered(peer, take=lambda: peer.take() * 40)  # type: ignore[assignment]


class Spins(SimNode):
    def __init__(self, birth: Birth, subkeys: Subkeys) -> None:
        super().__init__(birth, subkeys)
        self.peer = Altered(self.peer, wake_at=0.0, take=list)  # type: ignore[assignment]


class Floods(SimNode):
    """One byte a second more about routes than it may send."""

    sent = 0

    def route_bytes(self) -> int:
        self.sent += RouteGossipSettings().node_bytes_per_s + 1
        return self.sent


class Believes(SimNode):
    """Takes the word of a node of another cluster."""

    def __init__(self, birth: Birth, subkeys: Subkeys) -> None:
        super().__init__(birth._replace(label="any"), subkeys)


CLAIMING = replace(CALM, expect=Expect())
FOREIGN = replace(CALM, steps=(Step(5.0, "foreign", nodes=(2,), label="other"),), expect=Expect())


@pytest.mark.parametrize(
    ("kind", "scenario", "invariant"),
    [
        (Invents, CLAIMING, "S5"),
        (Rejuvenates, CLAIMING, "S5"),
        (Refuses, CLAIMING, "S6"),
        (Spins, CLAIMING, "S7"),
        (Floods, CLAIMING, "S7"),
        (Believes, FOREIGN, "S10"),
        (Mute, CALM, "L1"),
        (Diverges, CALM, "L2"),
        (NeverLearns, replace(CALM, expect=Expect(same_routes_s=4.0)), "L3"),
        (Flaps, CALM, "L5"),
        (Blames, CALM, "L5"),
        (Storms, replace(CALM, expect=Expect(same_routes_s=7.0)), "L6"),
    ],
)
def test_a_wrong_node_is_caught(kind: Kind, scenario: Scenario, invariant: str) -> None:
    found = violation(kind, scenario)
    assert found is not None
    assert found.invariant == invariant


def test_who_never_notices_a_death_is_caught() -> None:
    """L4: a node that holds the dead for alive."""

    class Faithful(SimNode):
        def living(self, now: float) -> Mapping[int, State]:
            return dict.fromkeys(self.look(now).members, State.ALIVE)

    scenario = replace(CALM, steps=(Step(5.0, "kill", nodes=(1,)),), expect=Expect(dead_s=4.0))
    found = violation(Faithful, scenario)
    assert found is not None
    assert found.invariant == "L4"


class Amplifies(SimNode):
    """Answers everybody it does not know, at length."""

    def __init__(self, birth: Birth, subkeys: Subkeys) -> None:
        super().__init__(birth, subkeys)
        answers: list[Send] = []

        def receive(data: bytes, source: Address, plane: Plane, now: float) -> None:
            answers.append(Send(source, plane, data + b"and more"))

        def take() -> list[Send]:
            found = [answer for answer in answers if answer.to[0].startswith("192.")]
            answers.clear()
            return found

        self.peer = Altered(self.peer, receive=receive, take=take)  # type: ignore[assignment]


def test_an_answer_to_a_stranger_that_is_longer_than_the_question_is_caught() -> None:
    steps = (Step(1.0, "attack", nodes=(0, 1, 2), packets_per_s=5.0, for_s=8.0),)
    found = violation(Amplifies, replace(CALM, steps=steps, expect=Expect()))
    assert found is not None
    assert (found.invariant, "stranger" in found.text) == ("S8", True)


# --- faults, swarm, shrinking -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_drawn_schedule_is_a_scenario_that_can_be_kept(seed: int) -> None:
    drawn = swarm(seed, 5, 60.0)
    check(drawn, "swarm")
    assert read_scenario(write_scenario(drawn), "x") == drawn
    assert settle(drawn, 1).steps == settle(drawn, 2).steps, "nothing is left to chance"
    assert swarm(seed, 5, 60.0) == drawn


def test_seeds_draw_different_kinds_of_faults_and_both_endings() -> None:
    drawn = [swarm(seed, 6, 60.0) for seed in range(60)]
    kinds = {step.do for scenario in drawn for step in scenario.steps}
    assert kinds >= {"kill", "restart", "roll", "pause", "slow", "cut", "link", "dns", "disk_full", "attack", "flood"}
    assert len({frozenset(step.do for step in scenario.steps) for scenario in drawn}) > 40
    assert {scenario.about[:6] for scenario in drawn} == {"safety", "livene"}


def test_schedules_whose_nodes_may_know_each_other_by_name_only_last_past_the_next_lookup() -> None:
    drawn = [swarm(seed, 4, 40.0) for seed in range(60)]
    for scenario in drawn:
        assert scenario.expect.agree_s is not None
        if scenario.cluster.dns == "all" and not {"restart", "roll"} & {step.do for step in scenario.steps}:
            continue
        assert RESOLVE_S * (1 + RESOLVE_SPREAD) < scenario.expect.agree_s < scenario.for_s - quiet_at(scenario)
    assert min(scenario.expect.agree_s or 0.0 for scenario in drawn) < 15.0, "who has met needs no name"


def test_shrinking_leaves_what_the_failure_needs() -> None:
    noise = tuple(Step(float(at), "engine_restart", engines=(0,)) for at in range(1, 5))
    cause = Step(5.0, "foreign", nodes=(1, 2), label="other")
    scenario = replace(CALM, steps=(*noise, cause, Step(11.0, "heal")), expect=Expect())
    found, runs = shrink(scenario, "S10", lambda one: violation(Believes, one), lambda: False)
    assert [step.do for step in found.steps] == ["foreign"]
    assert len(found.steps[0].nodes) == 1
    assert runs < 60


def test_every_step_that_a_scenario_can_have_is_carried_out() -> None:
    """A process has descriptors; what is simulated has none, and a scenario that asks for it is refused."""
    methods = {name: f"do_{verb.method or name}" for name, verb in VERBS.items() if "sim" in verb.runs_on}
    assert [name for name, method in methods.items() if not hasattr(SimSteps, method)] == []
    assert load_scenario("descriptors").runs_on == ("processes",)


def test_what_lasts_is_undone() -> None:
    steps = (
        Step(1.0, "pause", nodes=(0,), for_s=2.0),
        Step(1.0, "slow", nodes=(1,), factor=5.0, for_s=2.0),
        Step(1.0, "disk_full", nodes=(1,), for_s=2.0),
        Step(1.0, "cut", nodes=(0,), for_s=2.0),
        Step(1.0, "link", nodes=(0, 1, 2), loss=0.5, for_s=2.0),
        Step(1.0, "dns", dns="empty", for_s=2.0),
        Step(1.0, "engine_stop", engines=(0,), for_s=2.0),
        Step(1.0, "engine_slow", engines=(1,), factor=3.0, for_s=2.0),
        Step(1.0, "load", chats_per_s=9.0, for_s=2.0),
        Step(1.0, "restart", nodes=(2,), down_s=1.0),
    )
    run = Run(replace(CALM, for_s=4.0, steps=steps, expect=Expect()), 1, maker)
    assert run.result().violation is None
    world = run.world
    states = [(host.paused, host.factor, bool(host.disk_full), host.running) for host in world.hosts]
    assert states == [(False, 1.0, False, True)] * 3
    assert world.net.links.rules == []
    assert [engine.running for engine in world.engines] == [True, True]
    assert [engine.factor.value for engine in world.engines] == [1.0, 1.0]
    assert world.engines[0].generation == 2
    assert world.clients.chats_per_s.value == 1.0
    assert {answer.value for answer in world.dns.answers} == {"all"}


def test_of_steps_that_overlap_each_lasts_until_its_own_end() -> None:
    """The first end of a slowdown, of wrong names or of a load once ended the later ones, too."""
    seen: dict[int, list[object]] = {}

    def look(world: World) -> None:
        host, engine = world.hosts[0], world.engines[0]
        rate, answer = world.clients.chats_per_s.value, world.dns.answers[0].value
        seen[round(world.time.now)] = [host.factor, host.paused, answer, engine.factor.value, rate]

    steps = [
        step
        for at_s, factor, word, rate in ((1.5, 5.0, "empty", 0.5), (2.5, 7.0, "self", 2.0))
        for step in (
            Step(at_s, "slow", nodes=(0,), factor=factor, for_s=3.0),
            Step(at_s, "dns", nodes=(0,), dns=word, for_s=3.0),  # type: ignore[arg-type]
            Step(at_s, "engine_slow", engines=(0,), factor=factor, for_s=3.0),
            Step(at_s, "load", chats_per_s=rate, for_s=3.0),
        )
    ]
    run = Run(replace(CALM, for_s=8.0, steps=tuple(steps), expect=Expect()), 1, maker)
    run.sampled = look
    assert run.result().violation is None
    assert [seen[at] for at in (2, 4, 5, 6)] == [
        [5.0, False, "empty", 5.0, 0.5],
        [7.0, False, "self", 7.0, 2.0],
        [7.0, False, "self", 7.0, 2.0],
        [1.0, False, "all", 1.0, 1.0],
    ]


def test_a_pause_ends_with_its_process_and_not_the_pause_of_the_next_one() -> None:
    paused: dict[int, bool] = {}
    steps = (
        Step(1.5, "pause", nodes=(0,), for_s=3.0),
        Step(2.5, "restart", nodes=(0,), down_s=0.5),
        Step(3.5, "pause", nodes=(0,), for_s=3.0),
    )
    run = Run(replace(CALM, for_s=8.0, steps=steps, expect=Expect()), 1, maker)
    run.sampled = lambda world: paused.update({round(world.time.now): world.hosts[0].paused})
    assert run.result().violation is None
    assert [at for at, is_paused in paused.items() if is_paused] == [2, 4, 5, 6]
