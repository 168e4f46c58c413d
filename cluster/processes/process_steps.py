"""Carries out the steps of a scenario on real processes: each verb of `cluster.scenario` is one method here.

Steps overlap. A link may be cut by several of them at once: it is open again when the last of these has ended, or at a
`heal`. What cannot be done was refused before the run (`proc_net.refusal`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product

import trio

from cluster.dns.dns_server import DnsFault, FaultKind, Zone
from cluster.processes.chaos_plan import PEERS_NAME, Plan, write_keys
from cluster.processes.fleet import Fleet, Member
from cluster.processes.link_control import Network
from cluster.processes.relay import Condition
from cluster.scenario import Step

LOOK_S = 0.5
"""So often it is looked at whether the machine keeps up with the scenario's time."""

FLAP_S = 1.0
"""How long a flapping name says one thing."""

FLAPS = ("all", "empty", "failing", "subset")
STRANGERS = ("10.77.99.1", "10.77.99.2", "10.77.99.3")
"""Addresses of another cluster: nobody is there."""

Pair = tuple[int, int]


@dataclass(slots=True)
class Faults:
    """What is wrong with the links just now: every step that is in force, in order."""

    network: Network
    active: dict[int, tuple[frozenset[Pair], Condition, bool]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)
    core: frozenset[int] = frozenset()  # between these all is well, whatever steps say

    async def add(self, pairs: Sequence[Pair], condition: Condition, *, refuse: bool) -> int:
        number = next(self.numbers)
        self.active[number] = frozenset(pairs), condition, refuse
        await self.apply(pairs)
        return number

    async def remove(self, number: int) -> None:
        pairs, _, _ = self.active.pop(number, (frozenset[Pair](), Condition(), False))
        await self.apply(sorted(pairs))

    async def clear(self) -> None:
        """Heal everything."""
        touched = sorted({pair for pairs, _, _ in self.active.values() for pair in pairs})
        self.active.clear()
        await self.apply(touched)

    async def protect(self, core: frozenset[int]) -> None:
        """Heal what lies between these nodes, for good."""
        self.core = core
        await self.apply([(one, other) for one, other in product(sorted(core), repeat=2) if one != other])

    async def apply(self, pairs: Sequence[Pair]) -> None:
        for sender, receiver in pairs:
            refuse, whole = False, Condition()
            for some, condition, refused in self.active.values():
                if (sender, receiver) in some and not {sender, receiver} <= self.core:
                    refuse = refuse or refused
                    whole = replace(condition if condition.cut == frozenset() else whole, cut=whole.cut | condition.cut)
            await self.network.apply(sender, receiver, whole, refuse=refuse)


@dataclass(slots=True)
class Steps:
    """One run of a scenario's steps."""

    plan: Plan
    fleet: Fleet
    nodes: Sequence[Member]
    engines: Sequence[Member]
    zone: Zone
    faults: Faults
    beginning: tuple[str, ...]  # addresses of the nodes that ran first
    seed: int
    labels: dict[int, str]
    killing: Callable[[int, float], None] = lambda _node, _at_s: None
    leaving: Callable[[int, float], None] = lambda _node, _at_s: None
    loading: dict[str, float] = field(default_factory=dict)  # processes that are being started, and since when
    late_s: float = 0.0  # so long the scenario's time stood still, because the machine was slow

    async def run(
        self, steps: Sequence[Step], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Each at its time of the run; returns when the last has undone itself."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            for step in steps:
                await self.until(step.at_s)
                nursery.start_soon(self.carry_out, step)

    def time(self) -> float:
        """Of the scenario, in seconds."""
        return self.fleet.clock() - self.late_s

    async def until(self, at_s: float) -> None:
        while (left_s := at_s - self.time()) > 0:  # noqa: ASYNC110  # for a time that stands still now and then
            await trio.sleep(min(left_s, LOOK_S))

    async def carry_out(self, step: Step) -> None:
        method: Callable[[Step], Awaitable[None]] = getattr(self, f"do_{step.do}")
        await method(step)

    async def each(self, step: Step, numbers: Sequence[int], action: Callable[[int], Awaitable[None]]) -> None:
        """The action for every number: at once, or `every_s` apart."""
        async with trio.open_nursery() as nursery:
            for place, number in enumerate(numbers):
                if place and step.every_s:
                    await self.until(self.time() + step.every_s)
                nursery.start_soon(action, number)

    def show_peers(self) -> None:
        """The name says who is wanted to run."""
        up = [place.ip for place, node in zip(self.plan.nodes, self.nodes, strict=True) if node.wanted]
        self.zone.set(PEERS_NAME, up)

    # --- processes --------------------------------------------------------------------------------------------------

    async def start_node(self, number: int, keep_state: bool = True) -> None:
        if not keep_state:
            self.plan.nodes[number].state_file.unlink(missing_ok=True)
        self.nodes[number].wanted = True
        self.show_peers()
        await self.load(self.nodes[number])

    async def load(self, member: Member) -> None:
        """Start a process, and wait until it is ready."""
        self.loading[member.name] = self.fleet.clock()
        try:
            await self.fleet.start(member)
        finally:
            del self.loading[member.name]

    async def kill_node(self, number: int) -> None:
        self.nodes[number].wanted = False
        self.show_peers()
        self.killing(number, self.fleet.clock())
        await self.fleet.kill(self.nodes[number])

    async def stop_node(self, number: int) -> None:
        self.nodes[number].wanted = False
        self.show_peers()
        self.leaving(number, self.fleet.clock())
        await self.fleet.stop(self.nodes[number])

    async def do_start(self, step: Step) -> None:
        await self.each(step, chosen(step.nodes), lambda number: self.start_node(number, step.keep_state))

    async def do_stop(self, step: Step) -> None:
        await self.each(step, chosen(step.nodes), self.stop_node)

    async def do_kill(self, step: Step) -> None:
        await self.each(step, chosen(step.nodes), self.kill_node)

    async def do_restart(self, step: Step) -> None:
        await self.each(step, chosen(step.nodes), lambda number: self.again(step, number, self.kill_node))

    async def do_roll(self, step: Step) -> None:
        """`every_s` apart, and never before the last one is back: as whoever rolls a cluster waits for readiness."""
        if not step.every_s:
            await self.each(step, chosen(step.nodes), lambda number: self.again(step, number, self.stop_node))
            return
        next_s = self.time()
        for number in chosen(step.nodes):
            await self.until(next_s)
            next_s = self.time() + step.every_s
            await self.again(step, number, self.stop_node)

    async def again(self, step: Step, number: int, end: Callable[[int], Awaitable[None]]) -> None:
        await end(number)
        await trio.sleep(step.down_s)
        await self.start_node(number, step.keep_state)

    async def do_pause(self, step: Step) -> None:
        await self.each(step, chosen(step.nodes), lambda number: self.fleet.pause(self.nodes[number], step.for_s))

    async def do_slow(self, step: Step) -> None:
        await self.each(step, chosen(step.nodes), lambda one: self.fleet.slow(self.nodes[one], step.factor, step.for_s))

    async def do_descriptors(self, step: Step) -> None:
        await self.each(step, chosen(step.nodes), lambda number: self.fleet.exhaust(self.nodes[number], step.for_s))

    async def do_disk_full(self, step: Step) -> None:
        async def fill(number: int) -> None:
            self.fleet.note(f"{self.nodes[number].name}: disk full")
            await self.faults.network.disk(number, full=True)
            if step.for_s:
                await trio.sleep(step.for_s)
                await self.faults.network.disk(number, full=False)
                self.fleet.note(f"{self.nodes[number].name}: disk has room again")

        await self.each(step, chosen(step.nodes), fill)

    async def do_keys(self, step: Step) -> None:
        async def change(number: int) -> None:
            write_keys(self.plan.nodes[number], step.keys, self.seed)
            self.fleet.note(f"{self.nodes[number].name}: keys {list(step.keys)}")

        await self.each(step, chosen(step.nodes), change)

    async def do_foreign(self, step: Step) -> None:
        async def move(number: int) -> None:
            self.labels[number] = step.label
            await self.kill_node(number)
            await self.start_node(number, keep_state=False)

        await self.each(step, chosen(step.nodes), move)

    # --- links ------------------------------------------------------------------------------------------------------

    async def do_cut(self, step: Step) -> None:
        condition = Condition(cut=frozenset(step.planes))
        await self.each(step, chosen(step.nodes), lambda number: self.disturb(step, [number], condition))

    async def do_link(self, step: Step) -> None:
        names = ("loss", "duplicate", "reorder", "corrupt", "reorder_s", "delay_s", "jitter_s", "mtu")
        condition = Condition(**{name: getattr(step, name) for name in names})
        await self.disturb(step, chosen(step.nodes), condition)

    async def disturb(self, step: Step, nodes: Sequence[int], condition: Condition) -> None:
        others = chosen(step.others) or nodes  # where there are no others, among themselves
        pairs = [(one, other) for one, other in product(nodes, others) if one != other]
        if not step.one_way:
            pairs += [(other, one) for one, other in pairs]
        self.fleet.note(f"{step.do} {list(nodes)} | {list(others)}{' one way' * step.one_way}")
        number = await self.faults.add(sorted(dict.fromkeys(pairs)), condition, refuse=step.refuse)
        if step.for_s:
            await trio.sleep(step.for_s)
            await self.faults.remove(number)
            self.fleet.note(f"{step.do} {list(nodes)} ended")

    async def do_heal(self, _step: Step) -> None:
        await self.faults.clear()
        self.fleet.note("all links healed")

    async def do_core(self, step: Step) -> None:
        core = chosen(step.nodes)
        await self.faults.protect(frozenset(core))
        self.fleet.note(f"core {list(core)}: well from now on")

        async def mend(number: int) -> None:
            self.fleet.wake(self.nodes[number])
            await self.faults.network.disk(number, full=False)
            await self.start_node(number)

        await self.each(step, core, mend)

    # --- the rest ---------------------------------------------------------------------------------------------------

    async def do_dns(self, step: Step) -> None:
        askers = [self.plan.nodes[number].ip for number in chosen(step.nodes)]
        everybody = len(askers) == len(self.nodes)
        self.fleet.note(f"dns {step.dns} for {list(chosen(step.nodes))}")
        await self.set_dns(step.dns, [""] if everybody else askers, step.for_s)

    async def set_dns(self, word: str, askers: Sequence[str], for_s: float) -> None:
        if word != "flapping":
            self.fault_dns(word, askers)
            if for_s:
                await trio.sleep(for_s)
                self.fault_dns("all", askers)
            return
        with trio.move_on_after(for_s or float("inf")):
            for turn in count():
                self.fault_dns(FLAPS[turn % len(FLAPS)], askers)
                await trio.sleep(FLAP_S)
        self.fault_dns("all", askers)

    def fault_dns(self, word: str, askers: Sequence[str]) -> None:
        fault = dns_fault(word, len(self.nodes), self.beginning)
        for asker in askers:
            self.zone.fault(PEERS_NAME, fault, asker)

    async def do_engine_stop(self, step: Step) -> None:
        async def end(number: int) -> None:
            await self.fleet.kill(self.engines[number])
            if step.for_s:
                await trio.sleep(step.for_s)
                await self.load(self.engines[number])

        await self.each(step, chosen(step.engines), end)

    async def do_engine_restart(self, step: Step) -> None:
        async def again(number: int) -> None:
            await self.fleet.kill(self.engines[number])
            await trio.sleep(step.down_s)
            await self.load(self.engines[number])

        await self.each(step, chosen(step.engines), again)

    async def do_engine_slow(self, step: Step) -> None:
        async def slow(number: int) -> None:
            await self.fleet.slow(self.engines[number], step.factor, step.for_s)

        await self.each(step, chosen(step.engines), slow)

    async def do_load(self, step: Step) -> None:
        """The clients know their rates from the beginning; here is only the line in the diary."""
        self.fleet.note(f"load {step.chats_per_s:g} chats a second")


def dns_fault(word: str, nodes: int, beginning: tuple[str, ...]) -> DnsFault | None:
    """What the word means to the server; None is the truth."""
    return {
        "all": None,
        "subset": DnsFault(FaultKind.SUBSET, count=max(1, nodes // 3)),
        "empty": DnsFault(FaultKind.EMPTY),
        "self": DnsFault(FaultKind.SELF),
        "stale": DnsFault(FaultKind.OTHER, addresses=beginning),
        "foreign": DnsFault(FaultKind.OTHER, addresses=STRANGERS),
        "failing": DnsFault(FaultKind.SERVFAIL),
        "slow": DnsFault(FaultKind.SLOW, delay_s=5.0),
    }[word]


def chosen(selector: tuple[int, ...] | str) -> tuple[int, ...]:
    """The numbers of a selector that `settle` has turned into numbers."""
    assert isinstance(selector, tuple), "settle the scenario first"
    return selector
