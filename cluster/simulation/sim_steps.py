"""The steps of a scenario, done to a simulated world. Each verb is one method; what lasts is undone after `for_s`.

Undoing counts: two faults of one kind on one node end when both have ended. `heal` ends cuts and bad links at once;
their own undoing then finds nothing to do. Cost: nothing between the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cluster.scenario import Step
from cluster.simulation.attacker import Attacker
from cluster.simulation.sim_clients import Chat
from cluster.simulation.sim_host import SimHost
from cluster.simulation.sim_net import NEUTRAL, Link, Rule
from cluster.simulation.sim_streams import SimStreams
from cluster.simulation.world import World


class Faults:
    """Does the steps of its world's scenario."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.heap = world.heap
        self.core: tuple[int, ...] = ()
        self.attacker: Attacker | None = None

    @property
    def some_stay_broken(self) -> bool:
        """Whether only a core was mended, so that the others may be in any state."""
        return 0 < len(self.core) < len(self.world.hosts)

    def plan(self) -> None:
        """Plan all steps. To be called once, at time 0."""
        cluster = self.world.scenario.cluster
        running = numbers(cluster.running)
        for position, number in enumerate(running):
            self.heap.at(cluster.spread_s * position / max(1, len(running)), self.world.start, number)
        if cluster.formed:
            self.heap.at(0.0, self.world.form)
        for step in self.world.scenario.steps:
            self.heap.at(step.at_s, self.do, step)

    def do(self, step: Step) -> None:
        self.world.trace.add(self.heap.now, -1, step.do, *numbers(step.nodes))
        getattr(self, f"do_{step.do}")(step)

    def each(self, step: Step, call: Callable[[int], object]) -> None:
        """One node after the other, `every_s` apart."""
        for position, number in enumerate(numbers(step.nodes)):
            self.heap.after(position * step.every_s, call, number)

    def later(self, step: Step, call: Callable[[], object]) -> None:
        if step.for_s > 0:
            self.heap.after(step.for_s, call)

    # --- processes --------------------------------------------------------------------------------------------------

    def do_start(self, step: Step) -> None:
        self.each(step, lambda number: self.world.start(number, keep_state=step.keep_state))

    def do_stop(self, step: Step) -> None:
        self.each(step, self.world.stop)

    def do_kill(self, step: Step) -> None:
        self.each(step, self.world.crash)

    def do_restart(self, step: Step) -> None:
        def restart(number: int) -> None:
            self.world.crash(number)
            self.heap.after(step.down_s, lambda: self.world.start(number, keep_state=step.keep_state))

        self.each(step, restart)

    def do_roll(self, step: Step) -> None:
        def start(number: int) -> None:
            self.heap.after(step.down_s, lambda: self.world.start(number, keep_state=step.keep_state))

        self.each(step, lambda number: self.world.stop(number, lambda: start(number)))

    def do_pause(self, step: Step) -> None:
        def pause(number: int) -> None:
            self.world.hosts[number].pause()
            self.later(step, self.world.hosts[number].resume)

        self.each(step, pause)

    def do_slow(self, step: Step) -> None:
        for host in self.hosts(step):
            host.factor = max(1.0, step.factor)
            self.later(step, lambda one=host: setattr(one, "factor", 1.0))  # type: ignore[misc]

    def do_disk_full(self, step: Step) -> None:
        for host in self.hosts(step):
            host.disk_full += 1
            self.later(step, lambda one=host: setattr(one, "disk_full", max(0, one.disk_full - 1)))  # type: ignore[misc]

    def do_keys(self, step: Step) -> None:
        def rekey(number: int) -> None:
            self.world.keys[number] = step.keys
            self.world.hosts[number].run(lambda node, now: node.rekey(step.keys, now))

        self.each(step, rekey)

    def do_foreign(self, step: Step) -> None:
        """Another cluster's nodes get these addresses, as pods do."""
        for number in numbers(step.nodes):
            self.world.crash(number)
            self.world.labels[number] = step.label
            self.world.start(number, keep_state=False)

    # --- network ----------------------------------------------------------------------------------------------------

    def do_cut(self, step: Step) -> None:
        link = NEUTRAL._replace(cut=True, refuse=step.refuse)
        if step.every_s <= 0:
            self.rule(step, numbers(step.nodes), link)
        else:
            self.each(step, lambda number: self.rule(step, (number,), link))

    def do_link(self, step: Step) -> None:
        link = NEUTRAL._replace(
            loss=step.loss,
            delay_s=step.delay_s,
            jitter_s=step.jitter_s,
            duplicate=step.duplicate,
            reorder=step.reorder,
            reorder_s=step.reorder_s,
            corrupt=step.corrupt,
            mtu=step.mtu or NEUTRAL.mtu,
        )
        self.rule(step, numbers(step.nodes), link)

    def rule(self, step: Step, nodes: tuple[int, ...], link: Link) -> None:
        """From these to the others of the step; where there are no others, among themselves."""
        net = self.world.net
        others = numbers(step.others) or nodes
        udp, tcp = "udp" in step.planes, "tcp" in step.planes
        rule = Rule(net.mask(nodes), net.mask(others), step.one_way, udp, tcp, link)
        net.add(rule)
        self.later(step, lambda: net.remove(rule))

    def do_heal(self, step: Step) -> None:  # noqa: ARG002  # as all verbs
        self.world.net.heal()

    def do_core(self, step: Step) -> None:
        """These run, at full speed, and hear each other from now on; what is wrong elsewhere stays wrong."""
        self.core = numbers(step.nodes)
        self.world.net.protect(self.world.net.mask(self.core))
        for host in self.hosts(step):
            while host.paused:
                host.resume()
            host.factor, host.disk_full = 1.0, 0
            self.world.start(host.index)

    def do_dns(self, step: Step) -> None:
        dns, askers = self.world.dns, numbers(step.nodes)
        dns.say(askers, step.dns)
        self.later(step, lambda: dns.say(askers, self.world.scenario.cluster.dns))

    # --- traffic ----------------------------------------------------------------------------------------------------

    def do_flood(self, step: Step) -> None:
        until = self.heap.now + step.for_s

        def one(host: SimHost) -> None:
            if self.heap.now < until:
                if host.running and not host.paused:
                    clients = self.world.clients
                    clients.turn(Chat(clients.prefix(), 1), host)
                self.heap.after(1 / max(step.updates_per_s, 0.01), one, host)

        for host in self.hosts(step):
            one(host)

    def do_attack(self, step: Step) -> None:
        until, attacker = self.heap.now + step.for_s, self.attacker

        def strike(number: int) -> None:
            if self.heap.now < until and attacker is not None:
                attacker.strike(number)
                self.heap.after(1 / max(step.packets_per_s, 0.01), strike, number)

        for number in numbers(step.nodes):
            strike(number)

    def do_load(self, step: Step) -> None:
        clients = self.world.clients
        before, clients.chats_per_s = clients.chats_per_s, step.chats_per_s
        self.later(step, lambda: setattr(clients, "chats_per_s", before))

    # --- engines ----------------------------------------------------------------------------------------------------

    def do_engine_stop(self, step: Step) -> None:
        for number in numbers(step.engines):
            engine = self.world.engines[number]
            engine.halt(self.heap.now)
            self.later(step, lambda one=engine: self.engine_back(one.number))  # type: ignore[misc]

    def do_engine_restart(self, step: Step) -> None:
        for number in numbers(step.engines):
            self.world.engines[number].halt(self.heap.now)
            self.heap.after(step.down_s, self.engine_back, number)

    def engine_back(self, number: int) -> None:
        engine = self.world.engines[number]
        engine.down -= 1
        if engine.running:
            engine.restart(self.heap.now)

    def do_events_cut(self, step: Step) -> None:
        for number in numbers(step.engines):
            streams = self.streams()
            streams.cut(number)
            self.later(step, lambda one=number, wires=streams: wires.mend(one))  # type: ignore[misc]

    def do_events_loss(self, step: Step) -> None:
        for number in numbers(step.engines):
            kv = self.streams().kvs[number]
            kv.loss = step.loss
            self.later(step, lambda one=kv: setattr(one, "loss", 0.0))  # type: ignore[misc]

    def do_events_garbage(self, step: Step) -> None:
        for number in numbers(step.engines):
            kv = self.streams().kvs[number]
            kv.garbled += 1
            self.later(step, lambda one=kv: setattr(one, "garbled", one.garbled - 1))  # type: ignore[misc]

    def do_events_strange(self, step: Step) -> None:
        def begin(number: int, *, strange: bool) -> None:
            self.streams().kvs[number].strange = strange
            self.world.engines[number].restart(self.heap.now)

        for number in numbers(step.engines):
            begin(number, strange=True)
            self.later(step, partial(begin, number, strange=False))

    def streams(self) -> SimStreams:
        assert self.world.streams is not None, "check refuses such a step without events"
        return self.world.streams

    def do_engine_slow(self, step: Step) -> None:
        for number in numbers(step.engines):
            engine = self.world.engines[number]
            engine.factor = step.factor
            self.later(step, lambda one=engine: setattr(one, "factor", 1.0))  # type: ignore[misc]

    def hosts(self, step: Step) -> list[SimHost]:
        return [self.world.hosts[number] for number in numbers(step.nodes)]


def numbers(selector: tuple[int, ...] | str) -> tuple[int, ...]:
    """Of a settled selector."""
    assert isinstance(selector, tuple), "the scenario is not settled"
    return selector
