"""Whatever is delivered, lost, doubled or reordered, and whoever restarts: what holds at every step, and in the end.

S1  a node never takes itself for dead, and its own (epoch, incarnation) never falls
S2  (epoch, incarnation) held for a session never falls; from DEAD to life only with a higher one
and the tables of each node agree with each other; after the faults all agree.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.mesh.wire.messages import Push, State, Update
from tests.core.mesh.membership.small_cluster import Cluster, Host
from tests.examples import examples

HOSTS = st.integers(0, 3)


class Recorder(Cluster):
    """A cluster whose sends wait until they are picked: any of them, in any order, also twice."""

    def __init__(self) -> None:
        super().__init__(1)
        self.waiting: list[tuple[Peer, Outgoing]] = []
        self.held = False

    def carry(self, host: Host, out: Outgoing) -> None:
        if self.held:
            self.waiting = [*self.waiting[-200:], (Peer(host.session, host.address), out)]
        else:
            super().carry(host, out)


class AnyDelivery(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = Recorder()
        self.hosts = self.cluster.grow(4, settle_s=4.0)
        self.cluster.held = True
        self.own: dict[int, tuple[int, int]] = {}
        self.held: dict[tuple[int, int], tuple[int, int, State]] = {}

    @rule(index=st.integers(0, 200), again=st.booleans())
    def deliver(self, index: int, again: bool) -> None:
        if self.cluster.waiting:
            index %= len(self.cluster.waiting)
            out = self.cluster.waiting[index] if again else self.cluster.waiting.pop(index)
            if there := self.cluster.at.get(out[1].to):
                self.cluster.take(*out)(there)

    @rule(index=st.integers(0, 200))
    def lose(self, index: int) -> None:
        if self.cluster.waiting:
            self.cluster.waiting.pop(index % len(self.cluster.waiting))

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.cluster.run(seconds)

    @rule(which=HOSTS, seconds=st.sampled_from([0.3, 2.0, 20.0]))
    def pause(self, which: int, seconds: float) -> None:
        if self.cluster.now >= self.hosts[which].paused_until:
            self.cluster.pause(self.hosts[which], seconds)

    @rule(which=HOSTS, epoch=st.integers(0, 4))
    def restart(self, which: int, epoch: int) -> None:
        self.hosts[which] = self.cluster.restart(self.hosts[which], epoch=epoch)

    @rule(which=HOSTS, other=HOSTS)
    def greet(self, which: int, other: int) -> None:
        if which != other:
            self.cluster.greet(self.hosts[which], self.hosts[other].address)

    @rule(which=HOSTS, about=HOSTS, state=st.sampled_from(State), ahead=st.integers(-1, 2))
    def lie(self, which: int, about: int, state: State, ahead: int) -> None:
        """Somebody says anything about anybody."""
        teller = self.hosts[(which + 1) % 4]
        record = self.hosts[about].members.me
        record = record._replace(state=state, incarnation=max(0, record.incarnation + ahead))
        lie = Push((Update(record),))
        self.hosts[which].members.receive(Peer(teller.session, teller.address), lie, self.cluster.now)
        self.cluster.after_call(self.hosts[which])

    @invariant()
    def nobody_takes_itself_for_dead_or_falls_back(self) -> None:
        for host in self.hosts:
            me = host.members.me
            pair = (me.epoch, me.incarnation)
            assert me.state is State.ALIVE
            assert pair >= self.own.get(host.session, pair)
            self.own[host.session] = pair
            assert host.members.member(host.session) is None

    @invariant()
    def what_is_held_of_a_session_never_falls(self) -> None:
        for host in self.hosts:
            for shown in host.members.everybody():
                key = (host.session, shown.session)
                now = (shown.record.epoch, shown.record.incarnation, shown.state)
                before = self.held.get(key, now)
                assert now[:2] >= before[:2]
                if before[2] is State.DEAD and now[2] is not State.DEAD and now[2] is not State.LEFT:
                    assert now[:2] > before[:2]
                self.held[key] = now

    @invariant()
    def the_tables_agree(self) -> None:
        for host in self.hosts:
            members, statistics = host.members, host.members.statistics()
            view = list(members.everybody())
            live = [shown for shown in view if shown.state <= State.SUSPECT]
            assert [member.session for member in members.alive()] == [shown.session for shown in live]
            assert statistics.alive == len(live) == members.size() - 1
            assert statistics.suspects == sum(shown.state is State.SUSPECT for shown in live)
            assert statistics.dead == len(view) - len(live)
            assert len({shown.record.name for shown in view}) == len(view)
            assert host.members.me.name not in {shown.record.name for shown in view}
            assert members.wake_at < self.cluster.now + 60.0, "some timer is always armed"
            assert statistics.queued <= 64
            assert statistics.relays <= 1024

    def teardown(self) -> None:
        """Without faults all agree within seconds."""
        self.cluster.held = False
        self.cluster.waiting.clear()
        self.cluster.run(25.0)  # the longest pause
        for host in self.hosts[1:]:
            self.cluster.greet(host, self.hosts[0].address)
        self.cluster.until(lambda: self.cluster.agree(self.hosts), 40.0)


TestAnyDelivery = AnyDelivery.TestCase
TestAnyDelivery.settings = settings(
    max_examples=examples(25), stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)
