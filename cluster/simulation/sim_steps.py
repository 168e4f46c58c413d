"""Carries out a scenario's steps on a simulated world. Each verb is one method, which returns the undo of its step.

Pauses, full disks, cuts, bad links and stops of engines count: of two on one node or engine, both must end. The first
undo of a slowdown, of DNS answers, or of lost or garbage events ends all of these. `heal` ends cuts and bad links.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cluster.network.links import Rule
from cluster.scenario import VERBS, Step, numbers, rule_of, targets
from cluster.simulation.attacker import Attacker
from cluster.simulation.sim_clients import Chat
from cluster.simulation.sim_host import LEAVE_S, SimHost
from cluster.simulation.sim_streams import SimStreams
from cluster.simulation.world import World

Undo = Callable[[], object] | None


class SimSteps:
    """Carries out the steps of its world's scenario."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.time = world.time
        self.core: tuple[int, ...] = ()
        self.attacker: Attacker | None = None

    @property
    def some_stay_broken(self) -> bool:
        """Whether only a core was mended, so that the other nodes may be in any state."""
        return 0 < len(self.core) < len(self.world.hosts)

    def plan(self) -> None:
        """Plan all steps. To be called once, at time 0."""
        cluster = self.world.scenario.cluster
        running = numbers(cluster.running)
        for position, number in enumerate(running):
            self.time.at(cluster.spread_s * position / max(1, len(running)), self.world.start, number)
        if cluster.formed:
            self.time.at(0.0, self.world.form)
        for step in self.world.scenario.steps:
            self.time.at(step.at_s, self.carry_out, step)

    def carry_out(self, step: Step) -> None:
        self.world.trace.add(self.time.now, -1, step.do, *numbers(step.nodes))
        for position, whom in enumerate(targets(step)):
            self.time.after(position * step.every_s, self.begin, step, whom)

    def begin(self, step: Step, whom: Any) -> None:
        verb = VERBS[step.do]
        undo: Undo = getattr(self, f"do_{verb.method or step.do}")(step, whom)
        lasts_s = getattr(step, verb.lasts)
        if undo is not None and (lasts_s > 0 or verb.lasts == "down_s"):
            self.time.after(lasts_s, undo)

    # --- processes --------------------------------------------------------------------------------------------------

    def do_start(self, step: Step, number: int) -> None:
        self.world.start(number, keep_state=step.keep_state)

    def do_stop(self, step: Step, number: int) -> Undo:
        self.world.stop(number)
        return lambda: self.time.after(LEAVE_S, self.do_start, step, number)

    def do_kill(self, step: Step, number: int) -> Undo:
        self.world.crash(number)
        return partial(self.do_start, step, number)

    def do_pause(self, step: Step, number: int) -> Undo:  # noqa: ARG002  # as all verbs
        self.world.hosts[number].pause()
        return self.world.hosts[number].resume

    def do_slow(self, step: Step, number: int) -> Undo:
        host = self.world.hosts[number]
        host.factor = max(1.0, step.factor)
        return partial(setattr, host, "factor", 1.0)

    def do_disk_full(self, step: Step, number: int) -> Undo:  # noqa: ARG002
        host = self.world.hosts[number]
        host.disk_full += 1
        return partial(host.free_disk)

    def do_keys(self, step: Step, number: int) -> None:
        self.world.keys[number] = step.keys
        self.world.hosts[number].run(lambda node, now: node.rekey(step.keys, now))

    def do_foreign(self, step: Step, number: int) -> None:
        """Let a node of another cluster take over the address, as happens with pods."""
        self.world.crash(number)
        self.world.labels[number] = step.label
        self.world.start(number, keep_state=False)

    # --- network ----------------------------------------------------------------------------------------------------

    def do_link(self, step: Step, nodes: tuple[int, ...]) -> Undo:
        links = self.world.net.links
        rule: Rule = links.add(rule_of(step, nodes, self.world.addresses))
        return partial(links.remove, rule)

    do_cut = do_link

    def do_heal(self, step: Step, whom: Any) -> None:  # noqa: ARG002
        self.world.net.links.heal()

    def do_core(self, step: Step, whom: Any) -> None:  # noqa: ARG002
        """Let these nodes run at full speed and reach each other from now on; faults elsewhere stay."""
        self.core = numbers(step.nodes)
        self.world.net.links.protect([self.world.addresses[number] for number in self.core])
        for number in self.core:
            host = self.world.hosts[number]
            while host.paused:
                host.resume()
            host.factor, host.disk_full = 1.0, 0
            self.world.start(number)

    def do_dns(self, step: Step, whom: Any) -> Undo:  # noqa: ARG002
        dns, askers = self.world.dns, numbers(step.nodes)
        dns.set(askers, step.dns)
        return partial(dns.set, askers, self.world.scenario.cluster.dns)

    # --- traffic ----------------------------------------------------------------------------------------------------

    def do_flood(self, step: Step, number: int) -> None:
        self.repeat(step, step.chats_per_s, partial(self.flood, self.world.hosts[number]))

    def flood(self, host: SimHost) -> None:
        if host.running and not host.paused:
            self.world.clients.turn(Chat(self.world.clients.prefix(), 1), host)

    def do_attack(self, step: Step, number: int) -> None:
        assert self.attacker is not None
        self.repeat(step, step.packets_per_s, partial(self.attacker.strike, number))

    def repeat(self, step: Step, per_s: float, call: Callable[[], object]) -> None:
        """Make a call so many times a second while the step lasts."""
        until = self.time.now + step.for_s

        def once() -> None:
            if self.time.now < until:
                call()
                self.time.after(1 / max(per_s, 0.01), once)

        once()

    def do_load(self, step: Step, whom: Any) -> Undo:  # noqa: ARG002
        clients = self.world.clients
        before, clients.chats_per_s = clients.chats_per_s, step.chats_per_s
        return partial(setattr, clients, "chats_per_s", before)

    # --- engines ----------------------------------------------------------------------------------------------------

    def do_engine_stop(self, step: Step, number: int) -> Undo:  # noqa: ARG002
        engine = self.world.engines[number]
        engine.halt(self.time.now)
        return lambda: engine.resume(self.time.now)

    def do_engine_slow(self, step: Step, number: int) -> Undo:
        engine = self.world.engines[number]
        engine.factor = step.factor
        return partial(setattr, engine, "factor", 1.0)

    def do_events_cut(self, step: Step, number: int) -> Undo:  # noqa: ARG002
        self.streams.cut(number)
        return partial(self.streams.mend, number)

    def do_events_loss(self, step: Step, number: int) -> Undo:
        kv = self.streams.kvs[number]
        kv.loss = step.loss
        return partial(setattr, kv, "loss", 0.0)

    def do_events_garbage(self, step: Step, number: int) -> Undo:  # noqa: ARG002
        kv = self.streams.kvs[number]
        kv.garbled = True
        return partial(setattr, kv, "garbled", False)

    def do_events_strange(self, step: Step, number: int) -> Undo:  # noqa: ARG002
        self.restart_engine(number, strange=True)
        return partial(self.restart_engine, number, strange=False)

    def restart_engine(self, number: int, *, strange: bool) -> None:
        self.streams.kvs[number].strange = strange
        self.world.engines[number].restart(self.time.now)

    @property
    def streams(self) -> SimStreams:
        assert self.world.streams is not None, "check refuses such a step without events"
        return self.world.streams
