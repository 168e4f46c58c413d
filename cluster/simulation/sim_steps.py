"""Carries out a scenario's steps on a simulated world. Each verb is one method, which returns the undo of its step.

Steps overlap, and each ends by itself (`FaultedValue`). `heal` ends all cuts and bad links, `core` what makes its nodes
slow or stops them, and the end of a process its pauses.
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
        host = self.world.hosts[number]
        return host.pauses.begin(True) if host.running else None

    def do_slow(self, step: Step, number: int) -> Undo:
        return self.world.hosts[number].slowdowns.begin(max(1.0, step.factor))

    def do_disk_full(self, step: Step, number: int) -> Undo:  # noqa: ARG002
        return self.world.hosts[number].disk_full.begin(True)

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
            for faults in (host.pauses, host.slowdowns, host.disk_full):
                faults.clear()
            self.world.start(number)

    def do_dns(self, step: Step, whom: Any) -> Undo:  # noqa: ARG002
        ends = [self.world.dns.answers[asker].begin(step.dns) for asker in numbers(step.nodes)]
        return lambda: [end() for end in ends]

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
        return self.world.clients.chats_per_s.begin(step.chats_per_s)

    # --- engines ----------------------------------------------------------------------------------------------------

    def do_engine_stop(self, step: Step, number: int) -> Undo:  # noqa: ARG002
        engine = self.world.engines[number]
        engine.halt(self.time.now)
        return lambda: engine.resume(self.time.now)

    def do_engine_slow(self, step: Step, number: int) -> Undo:
        return self.world.engines[number].factor.begin(step.factor)

    def do_events_cut(self, step: Step, number: int) -> Undo:  # noqa: ARG002
        self.streams.cut(number)
        return partial(self.streams.mend, number)

    def do_events_loss(self, step: Step, number: int) -> Undo:
        return self.streams.kvs[number].loss.begin(step.loss)

    def do_events_garbage(self, step: Step, number: int) -> Undo:  # noqa: ARG002
        return self.streams.kvs[number].garbled.begin(True)

    def do_events_strange(self, step: Step, number: int) -> Undo:  # noqa: ARG002
        end, engine = self.streams.kvs[number].strange.begin(True), self.world.engines[number]
        engine.restart(self.time.now)

        def undo() -> None:
            end()
            engine.restart(self.time.now)

        return undo

    @property
    def streams(self) -> SimStreams:
        assert self.world.streams is not None, "check refuses such a step without events"
        return self.world.streams
