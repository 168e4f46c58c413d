"""Carries out a scenario's steps on real processes. Each verb is one method, which returns the undo of its step.

Steps overlap, and each ends by itself, as in the simulator: what two of them stop is well when both have ended.
Steps that cannot be carried out were refused before the run (`link_control.refusal`).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import trio

from cluster.dns.dns_server import DnsFault, DnsFaultKind, Zone
from cluster.engine.engine_faults import Fault
from cluster.faulted_value import FaultedValue
from cluster.load.http_client import fetch
from cluster.network.links import Links
from cluster.processes.chaos_plan import PEERS_NAME, Plan, write_keys
from cluster.processes.commands import EnginePlace
from cluster.processes.engine_watch import EngineWatch
from cluster.processes.fleet import STALL_FACTOR, Fleet, Member
from cluster.processes.link_control import SECOND_IP, LinkControl
from cluster.processes.peer_watch import Watch
from cluster.scenario import VERBS, Step, numbers, rule_of, targets

OK = 200
LOOK_S = 0.5
"""How often it is checked whether the machine keeps up with the scenario's time."""

FLAPS = ("all", "empty", "failing", "subset")
"""What a flapping name resolves to, by turns."""

FOREIGN = ("10.77.99.1", "10.77.99.2", "10.77.99.3")
"""Addresses of another cluster, at which there is no node."""

Undo = Callable[[], Awaitable[None]] | None


@dataclass(slots=True)
class ProcessSteps:
    """One run of a scenario's steps."""

    plan: Plan
    fleet: Fleet
    nodes: Sequence[Member]
    engines: list[Member]
    engine: Callable[[EnginePlace], Member]
    zone: Zone
    links: Links
    control: LinkControl
    beginning: tuple[str, ...]  # addresses of the nodes that ran first
    dns: str  # what their name resolves to without faults
    seed: int
    watch: Watch
    engine_watch: EngineWatch
    loading: dict[str, float] = field(default_factory=dict)  # processes that are being started, and since when
    names: list[FaultedValue[str]] = field(init=False)  # what `peers.lab` resolves to, by asking node
    full_disks: list[FaultedValue[bool]] = field(init=False)  # by node
    stops: list[FaultedValue[bool]] = field(init=False)  # by engine
    late_s: float = 0.0  # how long the scenario's time stood still because the machine was slow

    def __post_init__(self) -> None:
        places = self.plan.nodes
        self.names = [FaultedValue(self.dns, partial(self.resolve_as, place.ip)) for place in places]
        self.full_disks = [FaultedValue(False) for _ in self.nodes]
        self.stops = [FaultedValue(False) for _ in self.engines]
        for place in places:
            self.resolve_as(place.ip, self.dns)

    async def run(self, steps: Sequence[Step]) -> None:
        """Carry out each step at its time. Returns when the last one is undone."""
        async with trio.open_nursery() as nursery:
            for step in steps:
                await self.until(step.at_s)
                nursery.start_soon(self.carry_out, step)

    def time(self) -> float:
        """Return the scenario's time in seconds."""
        return self.fleet.clock() - self.late_s

    async def until(self, at_s: float) -> None:
        while (left_s := at_s - self.time()) > 0:  # noqa: ASYNC110  # for a time that stands still now and then
            await trio.sleep(min(left_s, LOOK_S))

    async def carry_out(self, step: Step) -> None:
        """Perform a step for its targets, at once or `every_s` apart. A roll waits until the last node is back."""
        async with trio.open_nursery() as nursery:
            next_s = self.time()
            for whom in targets(step):
                await self.until(next_s)
                next_s = self.time() + step.every_s
                if step.do == "roll" and step.every_s:
                    await self.perform(step, whom)
                else:
                    nursery.start_soon(self.perform, step, whom)

    async def perform(self, step: Step, whom: Any) -> None:
        verb = VERBS[step.do]
        method: Callable[[Step, Any], Awaitable[Undo]] = getattr(self, f"do_{verb.method or step.do}")
        undo = await method(step, whom)
        lasts_s = getattr(step, verb.lasts)
        if undo is not None and (lasts_s > 0 or verb.lasts == "down_s"):
            await trio.sleep(lasts_s)
            await undo()

    # --- processes --------------------------------------------------------------------------------------------------

    def show_peers(self) -> None:
        """Let the name resolve to the nodes that should run."""
        up = [place.ip for place, node in zip(self.plan.nodes, self.nodes, strict=True) if node.wanted]
        self.zone.set(PEERS_NAME, up)

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

    async def do_start(self, step: Step, number: int) -> None:
        await self.start_node(number, step.keep_state)

    async def do_kill(self, step: Step, number: int) -> Undo:
        return await self.take_down(step, number, self.watch.census.killed, self.fleet.kill)

    async def do_stop(self, step: Step, number: int) -> Undo:
        return await self.take_down(step, number, self.watch.census.leaving, self.fleet.stop)

    async def take_down(
        self, step: Step, number: int, tell: Callable[[int, float], None], end: Callable[[Member], Awaitable[None]]
    ) -> Undo:
        self.nodes[number].wanted = False
        self.show_peers()
        tell(number, self.fleet.clock())
        await end(self.nodes[number])
        return partial(self.do_start, step, number)

    async def do_pause(self, _step: Step, number: int) -> Undo:
        return self.fleet.pause(self.nodes[number])

    async def do_slow(self, step: Step, number: int) -> Undo:
        return self.fleet.slow(self.nodes[number], step.factor)

    async def do_descriptors(self, _step: Step, number: int) -> Undo:
        return self.fleet.exhaust(self.nodes[number])

    async def do_disk_full(self, _step: Step, number: int) -> Undo:
        end = self.full_disks[number].begin(True)
        await self.fill_disk(number, full=True)

        async def undo() -> None:
            if end() and not self.full_disks[number]:
                await self.fill_disk(number, full=False)

        return undo

    async def fill_disk(self, number: int, *, full: bool) -> None:
        await self.control.disk(number, full=full)
        self.fleet.note(f"{self.nodes[number].name}: disk {'full' if full else 'has room again'}")

    async def do_keys(self, step: Step, number: int) -> None:
        write_keys(self.plan.nodes[number], step.keys, self.seed)
        self.fleet.note(f"{self.nodes[number].name}: keys {list(step.keys)}")

    async def do_foreign(self, step: Step, number: int) -> None:
        self.watch.labels[number] = step.label
        await self.do_kill(step, number)
        await self.start_node(number, keep_state=False)

    # --- links ------------------------------------------------------------------------------------------------------

    async def do_link(self, step: Step, nodes: Sequence[int]) -> Undo:
        rule = self.links.add(rule_of(step, nodes, range(len(self.nodes))))
        sides = f"{list(nodes)} | {list(rule.targets)}{' one path' * step.one_direction}"
        self.fleet.note(f"{step.do} {sides}")
        await self.control.apply()

        async def undo() -> None:
            self.links.remove(rule)
            await self.control.apply()
            self.fleet.note(f"{step.do} {sides} ended")

        return undo

    do_cut = do_link

    async def do_heal(self, _step: Step, _whom: Any) -> None:
        self.links.heal()
        await self.control.apply()
        self.fleet.note("all links healed")

    async def do_core(self, step: Step, _whom: Any) -> None:
        core = numbers(step.nodes)
        self.links.protect(core)
        await self.control.apply()
        self.fleet.note(f"core {list(core)}: well from now on")
        async with trio.open_nursery() as nursery:
            for number in core:
                self.fleet.wake(self.nodes[number])
                self.full_disks[number].clear()
                await self.control.disk(number, full=False)
                nursery.start_soon(self.start_node, number)

    # --- the rest ---------------------------------------------------------------------------------------------------

    async def do_dns(self, step: Step, _whom: Any) -> Undo:
        self.fleet.note(f"dns {step.dns} for {list(numbers(step.nodes))}")
        ends = [self.names[number].begin(step.dns) for number in numbers(step.nodes)]

        async def undo() -> None:
            for end in ends:
                end()

        return undo

    def resolve_as(self, asker: str, word: str) -> None:
        words = FLAPS if word == "flapping" else (word,)
        faults = [dns_fault(each, len(self.nodes), self.beginning) for each in words]
        self.zone.fault(PEERS_NAME, *faults, asker=asker)

    async def do_engine_stop(self, _step: Step, number: int) -> Undo:
        end = self.stops[number].begin(True)
        well = self.engine_watch.odd(self.engines[number].name)
        await self.fleet.kill(self.engines[number])

        async def undo() -> None:
            if end() and not self.stops[number]:
                await self.load(self.engines[number])
            well()

        return undo

    async def do_engine_slow(self, step: Step, number: int) -> Undo:
        wake = self.fleet.slow(self.engines[number], step.factor)
        well = self.engine_watch.odd(self.engines[number].name, serves=step.factor < STALL_FACTOR)

        async def undo() -> None:
            if wake is not None:
                await wake()
            well()

        return undo

    async def do_engine_fault(self, step: Step, number: int) -> Undo:
        fault = Fault.read(json.loads(step.fault))
        assert fault is not None, "that is the undo"
        well = self.engine_watch.odd(self.engines[number].name, serves=fault.serves, caches=fault.caches)
        await self.set_fault(number, step.fault)

        async def undo() -> None:
            await self.set_fault(number, '{"kind": "none"}')
            well()

        return undo

    async def set_fault(self, number: int, fault: str) -> None:
        name, body = self.engines[number].name, fault.encode()
        address = self.engines[number].command()
        status, answer = await fetch(address.ready_host, address.ready_port, "/admin/faults", method="POST", body=body)
        if status != OK:
            raise ValueError(f"{name}: {fault}: {answer.decode(errors='replace')}")
        self.fleet.note(f"{name}: fault {fault}")

    async def do_engine_moves(self, _step: Step, number: int) -> Undo:
        """Let the engine's name lead to a new process; the old one can still be reached by who kept connections."""
        place, old = self.plan.engines[number], self.engines[number]
        self.engines[number] = new = self.engine(replace(place, name=f"{place.name}-moved", ip=SECOND_IP))
        unknown = self.engine_watch.odd(new.name)
        await self.load(new)
        self.zone.set(place.host, [SECOND_IP])
        self.engine_watch.odd(old.name)
        unknown()
        self.fleet.note(f"{place.host} is {new.name}")

        async def undo() -> None:
            await self.engine_watch.take(old)
            await self.fleet.stop(old)

        return undo

    async def do_load(self, step: Step, _whom: Any) -> None:
        """Note the step in the diary only; the clients know their rates from the beginning."""
        self.fleet.note(f"load {step.chats_per_s:g} chats a second")

    async def do_poison(self, step: Step, _whom: Any) -> None:
        """Note the step in the diary only; the clients send these requests as they send all others."""
        self.fleet.note(f"poison {step.chats_per_s:g} requests a second")


def dns_fault(word: str, nodes: int, beginning: tuple[str, ...]) -> DnsFault | None:
    """Return the fault of the DNS server for a word; None for the right answer."""
    return {
        "all": None,
        "subset": DnsFault(DnsFaultKind.SUBSET, count=max(1, nodes // 3)),
        "empty": DnsFault(DnsFaultKind.EMPTY),
        "self": DnsFault(DnsFaultKind.SELF),
        "stale": DnsFault(DnsFaultKind.OTHER, addresses=beginning),
        "foreign": DnsFault(DnsFaultKind.OTHER, addresses=FOREIGN),
        "failing": DnsFault(DnsFaultKind.SERVFAIL),
        "slow": DnsFault(DnsFaultKind.SLOW, delay_s=5.0),
    }[word]
