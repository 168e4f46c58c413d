"""Judges what a scenario expects, alike for simulator and processes: bounds, agreement, equal route tables."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cluster.scenario import Expect, Step, numbers
from ranvier_py.core.mesh.wire.messages import State

LIVING = (State.ALIVE, State.SUSPECT)


class Bound(NamedTuple):
    """How a field of `Expect` is judged: its invariant, its name on the screen, and whether it is a minimum."""

    invariant: str
    name: str
    at_least: bool = False


BOUNDS: Mapping[str, Bound] = {
    "failed_requests_max": Bound("S6", "failed requests"),
    "agree_s": Bound("L1", "all agree who runs, s"),
    "same_routes_s": Bound("L2", "route tables equal, s"),
    "learned_s": Bound("L3", "learned at others (p99), s"),
    "hit_share_min": Bound("L3", "hit rate, share of before", at_least=True),
    "hits_back_s": Bound("L3", "95 % of the hit rate is back, s"),
    "hit_points_lost_max": Bound("L3", "hits lost to a run without faults, points"),
    "uneven_share_max": Bound("L3", "an engine idle while another's requests wait, share"),
    "dead_s": Bound("L4", "deaths known, s"),
    "false_deaths_max": Bound("L5", "false deaths"),
    "bytes_per_node_s_max": Bound("L6", "gossip sent, bytes/s and node"),
    "wrong_share_max": Bound("L10", "routes that are wrong, share"),
    "unknown_share_max": Bound("L10", "held blocks that are unknown, share"),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one bound. `holds` None: the value could not be measured, which counts as not good."""

    invariant: str
    name: str
    bound: float
    measured: float | None
    holds: bool | None

    def __str__(self) -> str:
        word = {True: "ok", False: "MISSED", None: "NOT MEASURED"}[self.holds]
        return f"{self.name}: {shown(self.measured)} (bound {shown(self.bound)}) {word}"


def judge(expect: Expect, measured: Mapping[str, float | None]) -> list[Verdict]:
    """Judge every bound that the scenario names, if `measured` has its value."""
    found: list[Verdict] = []
    for key, bound in BOUNDS.items():
        most = getattr(expect, key)
        if most is not None and key in measured:
            value = measured[key]
            holds = None if value is None else value >= most if bound.at_least else value <= most
            found.append(Verdict(bound.invariant, bound.name, most, value, holds))
    return found


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


class Knowledge(NamedTuple):
    """What one node knows about membership: its own session, and the state of every session in its member table."""

    session: Hashable
    states: Mapping[Any, State]


class Difference(NamedTuple):
    """Which nodes differ, and how."""

    nodes: tuple[int, ...]
    text: str


def core_of(steps: Iterable[Step]) -> frozenset[int] | None:
    """Return the nodes that alone are judged at the end: those of the last `core` step. None: all are judged."""
    cores = [frozenset(numbers(step.nodes)) for step in steps if step.do == "core"]
    return cores[-1] if cores else None


def groups(nodes: Iterable[int], labels: Mapping[int, str]) -> list[list[int]]:
    """Group nodes by the label of their cluster. Nodes with different labels are judged apart."""
    found: dict[str, list[int]] = {}
    for node in nodes:
        found.setdefault(labels.get(node, ""), []).append(node)
    return list(found.values())


def disagreement(known: Mapping[int, Knowledge | None], *, ghosts: bool = True) -> Difference | None:
    """Return the first node that is wrong about which nodes run; None: all are right. `ghosts`: past sessions count."""
    running = {one.session: node for node, one in known.items() if one is not None}
    for observer, one in known.items():
        if one is None:
            return Difference((observer,), f"node {observer} does not answer")
        for session, node in running.items():
            if session != one.session and one.states.get(session) is not State.ALIVE:
                text = f"node {observer} sees node {node}, which runs, as {name_of(one.states.get(session))}"
                return Difference((observer, node), text)
        for session, state in one.states.items():
            if ghosts and state in LIVING and session not in running:
                return Difference((observer,), f"node {observer} sees a past session {session} as {name_of(state)}")
    return None


def name_of(state: State | None) -> str:
    return "unknown" if state is None else state.name.lower()


def difference(sums: Mapping[int, Sequence[int]]) -> Difference | None:
    """Return the first two nodes of a cluster whose route tables differ, by their bucket sums; None: all are equal."""
    (first, known), *others = sums.items()
    for node, theirs in others:
        count = sum(one != other for one, other in zip(known, theirs, strict=False)) + abs(len(known) - len(theirs))
        if count:
            text = f"the route tables of nodes {first} and {node} differ in {count} of {len(known)} buckets"
            return Difference((first, node), text)
    return None
