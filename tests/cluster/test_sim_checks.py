"""The checkers hold a cluster that is right, and catch each way of being wrong that they are there for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

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
    read_scenario,
    settle,
    write_scenario,
)
from cluster.simulation.node_values import Birth, Bounded, Look, Maker, Seen
from cluster.simulation.shrink import shrink
from cluster.simulation.sim_run import Run, simulate
from cluster.simulation.sim_steps import Faults
from cluster.simulation.swarm import swarm
from cluster.simulation.world import Violation
from ranvier_py.core.gossip.gossip_values import Address, MemberChange, Plane, Send
from ranvier_py.core.gossip.replication.route_settings import RouteGossipSettings
from ranvier_py.core.gossip.wire.messages import Record, State
from tests.cluster.fake_gossip import FakeMind, FakeNode

CALM = Scenario(
    name="calm",
    about="nothing happens",
    for_s=12.0,
    cluster=Cluster(nodes=3, engines=2),
    load=Load(chats_per_s=1.0, turns=2, think_s=0.2),
    expect=Expect(agree_s=4.0, same_routes_s=4.0, learned_s=1.0, false_deaths_max=0),
)


def violation(maker: Maker, scenario: Scenario = CALM, seed: int = 1) -> Violation | None:
    return simulate(scenario, seed, maker).violation


def test_a_cluster_that_is_right_passes_and_is_measured() -> None:
    result = simulate(CALM, 1, FakeMind)
    assert result.violation is None
    measures = result.measures
    assert measures["client_served"] >= 5
    assert 0 < measures["learned_t50_s"] < 0.6
    assert measures["agreed_s"] is not None
    assert measures["bulk_bytes_per_node_s"] > 0
    assert 0 < measures["hit_share"] < 1


def test_one_seed_is_one_trace_and_another_seed_is_another() -> None:
    digests = [simulate(CALM, seed, FakeMind).digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("name", ["steady", "kill_half", "partition_heal"])
def test_named_scenarios_pass_on_a_good_network(name: str) -> None:
    scenario = replace(load_scenario(name), load=Load(chats_per_s=0.5))
    assert violation(FakeMind, scenario) is None


# --- each way of being wrong ------------------------------------------------------------------------------------------


class Raises(FakeMind):
    def __init__(self, birth: Birth) -> None:
        super().__init__(birth)
        self.peer = RaisingNode(birth, self.session, birth.rng())


class RaisingNode(FakeNode):
    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> None:
        if now > 3.0:
            raise KeyError("lost")
        super().receive(data, source, plane, now)


class Inspected(FakeMind):
    """Looks as `bend` makes it look."""

    bend: Callable[[Look, float], Look]

    def look(self, now: float) -> Look:
        return type(self).bend(super().look(now), now)


def looking(bend: Callable[[Look, float], Look]) -> Maker:
    return type("Bent", (Inspected,), {"bend": staticmethod(bend), "told": lambda _: 1})


def dead_of_itself(look: Look, now: float) -> Look:
    return replace(look, state=State.DEAD) if now > 5 else look


def younger(look: Look, now: float) -> Look:
    return replace(look, incarnation=0 if now > 5 else 3)


def stranger(look: Look, now: float) -> Look:
    return replace(look, members={**look.members, 99: Seen("x", State.ALIVE, 1, 0)}) if now > 5 else look


def falling(look: Look, now: float) -> Look:
    return replace(look, members={key: seen._replace(epoch=9 if now < 5 else 8) for key, seen in look.members.items()})


def risen(look: Look, now: float) -> Look:
    state = State.DEAD if 4.5 < now < 6.5 else State.ALIVE
    return replace(look, members={key: seen._replace(state=state) for key, seen in look.members.items()})


def forgetful(look: Look, now: float) -> Look:
    return replace(look, vector={look.session: 10 if now < 5 else 9})


def boastful(look: Look, now: float) -> Look:
    others = dict.fromkeys(look.members, 5)
    return replace(look, vector={look.session: 1, **others})


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


class Invents(FakeMind):
    def claims(self, fingerprint: int, now: float) -> Sequence[tuple[int, int, int, float]]:
        return [(12345, 0, 1, 1.0)]


class Rejuvenates(FakeMind):
    def claims(self, fingerprint: int, now: float) -> Sequence[tuple[int, int, int, float]]:
        return [(name, engine, epoch, 0.0) for name, engine, epoch, _ in super().claims(fingerprint, now)]


class Deaf(FakeMind):
    """Never learns from others."""

    def heard(self, path: object, engine: int, at: float) -> None:
        return


class Refuses(FakeMind):
    def start_attempt(self, end: object, tried: Sequence[int], now: float) -> None:
        return None


class Mute(FakeMind):
    """Does not answer, so nobody gets to know it."""

    def __init__(self, birth: Birth) -> None:
        super().__init__(birth)
        if birth.number == 1:
            self.peer.take = list  # type: ignore[method-assign]


class Diverges(FakeMind):
    """Has what others have not."""

    def sums(self, now: float) -> Sequence[int]:
        return [self.session, *super().sums(now)[1:]]


class Flaps(FakeMind):
    """Holds everybody for dead for a moment, long after all was quiet."""

    def living(self, now: float) -> Mapping[int, State]:
        return {} if 9.0 < now < 10.0 else super().living(now)


class Blames(FakeMind):
    """Says that a node died that runs well. All agree again before they are asked."""

    def __init__(self, birth: Birth) -> None:
        super().__init__(birth)
        self.number, self.blamed = birth.number, False
        changes = self.peer.changes
        self.peer.changes = lambda: [*changes(), *self.blame()]  # type: ignore[method-assign]

    def blame(self) -> list[MemberChange]:
        if self.number or self.blamed or not self.peer.members:
            return []
        self.blamed = True
        session, (name, _, _) = next(iter(self.peer.members.items()))
        return [MemberChange("died", Record(name, session, 1, 0, State.DEAD, "10.0.0.1", 1, 1, 1, 0), "silence")]


class Storms(FakeMind):
    def __init__(self, birth: Birth) -> None:
        super().__init__(birth)
        take = self.peer.take
        self.peer.take = lambda: take() * 40  # type: ignore[method-assign]


class Spins(FakeMind):
    def __init__(self, birth: Birth) -> None:
        super().__init__(birth)
        self.peer = Spinning(birth, self.session, birth.rng())


class Spinning(FakeNode):
    @property
    def wake_at(self) -> float:
        return 0.0


class Floods(FakeMind):
    """One byte a second more about routes than it may send."""

    sent = 0

    def route_bytes(self) -> int:
        self.sent += RouteGossipSettings().node_bytes_per_s + 1
        return self.sent


class Believes(FakeMind):
    """Takes the word of a node of another cluster."""

    def __init__(self, birth: Birth) -> None:
        super().__init__(birth._replace(label="any"))


CLAIMING = replace(CALM, expect=Expect())
FOREIGN = replace(CALM, steps=(Step(5.0, "foreign", nodes=(2,), label="other"),), expect=Expect())


@pytest.mark.parametrize(
    ("maker", "scenario", "invariant"),
    [
        (Invents, CLAIMING, "S5"),
        (Rejuvenates, CLAIMING, "S5"),
        (Refuses, CLAIMING, "S6"),
        (Spins, CLAIMING, "S7"),
        (Floods, CLAIMING, "S7"),
        (Believes, FOREIGN, "S10"),
        (Mute, CALM, "L1"),
        (Diverges, CALM, "L2"),
        (Deaf, CALM, "L3"),
        (Flaps, CALM, "L5"),
        (Blames, CALM, "L5"),
        (Storms, replace(CALM, expect=Expect(same_routes_s=7.0)), "L6"),
    ],
)
def test_a_wrong_node_is_caught(maker: Maker, scenario: Scenario, invariant: str) -> None:
    found = violation(maker, scenario)
    assert found is not None
    assert found.invariant == invariant


def test_who_never_notices_a_death_is_caught() -> None:
    """L4: a node that holds the dead for alive."""

    class Faithful(FakeMind):
        def __init__(self, birth: Birth) -> None:
            super().__init__(birth)
            self.peer.lose = lambda *_: None  # type: ignore[method-assign]

    scenario = replace(CALM, steps=(Step(5.0, "kill", nodes=(1,)),), expect=Expect(dead_s=4.0))
    found = violation(Faithful, scenario)
    assert found is not None
    assert found.invariant == "L4"


class Amplifies(FakeMind):
    def __init__(self, birth: Birth) -> None:
        super().__init__(birth)
        self.peer = Answering(birth, self.session, birth.rng())


class Answering(FakeNode):
    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> None:
        if source not in [address for _, address, _ in self.members.values()]:
            self.outbox.append(Send(source, plane, data + b"and more"))


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
    assert [verb for verb in VERBS if not hasattr(Faults, f"do_{verb}")] == ["descriptors"]
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
    run = Run(replace(CALM, for_s=4.0, steps=steps, expect=Expect()), 1, FakeMind)
    assert run.result().violation is None
    world = run.world
    assert [(host.paused, host.factor, host.disk_full, host.running) for host in world.hosts] == [(0, 1.0, 0, True)] * 3
    assert world.net.rules == []
    assert [engine.running for engine in world.engines] == [True, True]
    assert [engine.factor for engine in world.engines] == [1.0, 1.0]
    assert world.engines[0].boots == 2
    assert world.clients.chats_per_s == 1.0
    assert set(world.dns.words.values()) == {"all"}
