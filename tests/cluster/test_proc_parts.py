"""The parts of a chaos run: its log, its clients against stub nodes, its processes, its links, what it refuses."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import trio

from cluster.dns.addresses import free_port
from cluster.dns.dns_server import Zone
from cluster.dns.dns_server import serve as serve_dns
from cluster.engine.engine_faults import UNKNOWN_ERROR
from cluster.expectations import judge
from cluster.load.runner import Target
from cluster.load.workload import Conversation, Turn
from cluster.network.links import CUT, TCP, UDP, Link, Links, Rule
from cluster.processes import chaos
from cluster.processes.chaos_clients import ROUNDS_MAX, Clients, arrivals, conversations, rates_of
from cluster.processes.chaos_plan import CLIENTS_NAME, CLUSTER_NAME, make_plan, node_command, write_keys
from cluster.processes.chaos_run import Run
from cluster.processes.children import Command
from cluster.processes.commands import Engines, engine_command
from cluster.processes.fleet import STALL_FACTOR, Fleet, Member, limit_leaving
from cluster.processes.link_control import PRIVATE_FLAG, CannotDo, LinkMode, can_be_private, choose, private_command
from cluster.processes.process_steps import ProcessSteps, dns_fault
from cluster.processes.request_log import Entry, RequestLog, hit_report, hits_back_s
from cluster.scenario import VERBS, Cluster, Dns, Expect, Load, Scenario, Step, load_scenario, settled
from ranvier_py.cli import make_parser as node_parser
from ranvier_py.core.mesh.mesh_values import Plane
from tests.cluster.test_proc_late import called
from tests.proxy.wire import chunk
from tests.waiting import until

DEADLINE_S = 20
ROOT = Path(chaos.__file__).parents[2]

# --- log ----------------------------------------------------------------------------------------------------------


def entered(log: RequestLog, began_s: float, ended_s: float, **fields: Any) -> Entry:
    entry = log.begin(began_s)
    entry.ended_s = ended_s
    for name, value in fields.items():
        setattr(entry, name, value)
    return entry


@pytest.mark.parametrize(
    ("change", "excused"),
    [
        ({}, True),
        ({"engine": "", "node": "10.0.0.1"}, True),
        ({"first_byte": False}, False),
        ({"engine": "engine-2", "node": "10.0.0.2"}, False),
        ({"engine": "", "node": ""}, False),
        ({"began_s": 6.0, "ended_s": 7.0}, False),
        ({"ended_s": 3.0}, False),
        ({"reason": ""}, False),
    ],
)
def test_only_what_streamed_on_a_killed_process_is_excused(change: dict[str, Any], excused: bool) -> None:
    log = RequestLog()
    log.died(5.0, "10.0.0.1")
    log.died(5.0, "engine-1")
    fields: dict[str, Any] = {"reason": "cut", "first_byte": True, "node": "10.0.0.2", "engine": "engine-1"} | change
    began_s, ended_s = fields.pop("began_s", 4.0), fields.pop("ended_s", 5.1)
    entry = entered(log, began_s, ended_s, **fields)
    assert log.excused(entry) is excused
    assert len(log.failed) == (0 if excused or not entry.reason else 1)


def test_every_request_is_counted_exactly_once() -> None:
    log = RequestLog()
    log.died(1.0, "n")
    entered(log, 0, 1)
    entered(log, 0, 1, retries=["connect: connection refused"] * 2)
    entered(log, 0, 1, reason="HTTP 502")
    entered(log, 0, 1, reason="connection lost in mid-answer", first_byte=True, node="n")
    entered(log, 0, 1, cancelled=True)
    entered(log, 0, 1, poisonous=True, reason="HTTP 500 500", detail=UNKNOWN_ERROR[1])
    log.begin(0)
    counts = log.counts()
    assert counts == {
        "sent": 7,
        "ok": 2,
        "was_streaming_on_a_killed_process": 1,
        "failed": 1,
        "refused_as_poisonous": 1,
        "cancelled": 1,
        "in_flight": 1,
        "ok_after_retry": 1,
        "retries": 2,
    }
    assert [failure["reason"] for failure in log.failures()] == ["HTTP 502"]


def test_hit_rates_come_back_when_a_whole_window_is_good_again() -> None:
    log = RequestLog()
    for second in range(30):
        cached = 20 if 10 <= second < 14 else 80
        entered(log, second + 0.5, second + 0.6, prompt_tokens=100, cached_tokens=cached)
    assert log.hit_rate(0, 10) == 0.8
    assert log.recovered_s(0.8, 10.0, 30.0) == pytest.approx(4.0, abs=0.6)
    assert log.recovered_s(0.9, 10.0, 30.0) is None
    report = hit_report(log, 10.0, 12.0, 30.0)
    assert report["share"] == 1.0
    assert report["recovered_after_last_step_s"] == pytest.approx(2.0, abs=0.6)
    assert hit_report(RequestLog(), 10.0, 12.0, 30.0)["before"] is None


@pytest.mark.parametrize(
    ("back_s", "quiet_s", "holds"), [(4.0, 60.0, True), (6.0, 60.0, False), (None, 60.0, None), (2.0, 97.0, True)]
)
def test_hits_that_do_not_come_back_in_time_are_no_good(
    back_s: float | None, quiet_s: float, holds: bool | None
) -> None:
    expect = Expect(hits_back_s=5.0)
    (verdict,) = judge(expect, hits_back_s({"recovered_after_last_step_s": back_s}, expect, quiet_s, 100.0))
    assert verdict.holds is holds


def test_where_steps_end_with_the_traffic_nobody_can_report_whether_hits_are_back() -> None:
    assert hits_back_s({"recovered_after_last_step_s": None}, Expect(hits_back_s=5.0), 91.0, 100.0) == {}


def test_bounds_are_judged_where_they_are_named_and_what_was_not_measured_does_not_hold() -> None:
    expect = Expect(agree_s=1.0, hit_share_min=0.9, dead_s=5.0)
    measured = {"agree_s": None, "hit_share_min": 0.9, "false_deaths_max": 7}
    verdicts = judge(expect, measured)
    assert [(one.invariant, one.holds) for one in verdicts] == [("L1", None), ("L3", True)]
    assert [judge(expect, {"agree_s": value})[0].holds for value in (1.0, 1.1)] == [True, False]
    assert not judge(expect, {"hit_share_min": 0.89})[0].holds


# --- clients --------------------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-engine: engine-1\r\n\r\n"
EVENT = b'data: {"system_fingerprint":"engine-1","choices":[{"delta":{"content":"hi"}}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":1}}\n\ndata: [DONE]\n\n'


GOOD = HEAD + chunk(EVENT) + chunk(LAST) + b"0\r\n\r\n"


@asynccontextmanager
async def stub_nodes(*answers: bytes | None) -> AsyncIterator[Clients]:
    """Nodes at 127.0.0.2, .3, … that each send this and close, None for one where nobody listens, and a client of the
    name they stand behind."""
    ips = [f"127.0.0.{2 + number}" for number in range(len(answers))]
    port = free_port(ips, Random())

    async def serve(data: bytes, stream: trio.SocketStream) -> None:
        await stream.receive_some(65_536)
        await stream.send_all(data)

    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            server = await nursery.start(serve_dns, Zone({CLIENTS_NAME: ips}), "127.0.0.1", 0)
            for ip, data in zip(ips, answers, strict=True):
                if data is not None:
                    listeners = await trio.open_tcp_listeners(port, host=ip)
                    nursery.start_soon(trio.serve_listeners, partial(serve, data), listeners)
            yield Clients(Target(CLIENTS_NAME, port, model="m"), RequestLog(), server, trio.current_time())
            nursery.cancel_scope.cancel()


async def ask(clients: Clients, turns: int = 1) -> list[Entry]:
    turn = Turn(({"role": "user", "content": "Hello"},))
    await clients.run_open([Conversation("c", (turn,) * turns, start_s=0.0)])
    return clients.requests.entries


async def test_each_turn_goes_to_the_next_node() -> None:
    async with stub_nodes(GOOD, GOOD, GOOD) as clients:
        entries = await ask(clients, 3)
    assert [entry.node for entry in entries] == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    assert all(entry.ok and entry.engine == "engine-1" and entry.prompt_tokens == 10 for entry in entries)


async def test_a_dead_node_and_one_that_breaks_off_early_are_left_for_the_next() -> None:
    async with stub_nodes(None, b"", GOOD) as clients:
        (entry,) = await ask(clients)
    assert entry.ok
    assert entry.node == "127.0.0.4"
    assert entry.retries == ["connect: connection refused", "connection closed before an answer"]


async def test_nobody_there_fails_after_a_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.processes.chaos_clients.ROUND_PAUSE_S", 0.01)
    async with stub_nodes(None, None) as clients:
        (entry,) = await ask(clients)
    assert entry.reason == "connect: connection refused"
    assert not entry.first_byte
    assert len(entry.retries) == 2 * ROUNDS_MAX


@pytest.mark.parametrize("answer", [HEAD + chunk(EVENT), HEAD])
async def test_what_broke_after_its_first_byte_is_not_tried_again(answer: bytes) -> None:
    """The tokens are with the client already: a second answer would be another one."""
    async with stub_nodes(answer, GOOD) as clients:
        (entry,) = await ask(clients)
    assert (entry.first_byte, entry.retries, entry.node) == (True, [], "127.0.0.2")
    assert entry.reason == "connection closed in mid-answer"


async def test_an_error_that_a_node_states_is_a_failure() -> None:
    async with stub_nodes(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\nnone", GOOD) as clients:
        (entry,) = await ask(clients)
    assert (entry.reason, entry.first_byte, entry.retries) == ("HTTP 502", False, [])


# --- load -----------------------------------------------------------------------------------------------------------


def test_the_rate_follows_the_steps_and_comes_back() -> None:
    steps = (Step(2.0, "load", chats_per_s=9.0, for_s=3.0), Step(8.0, "load", chats_per_s=0.0))
    rates = rates_of(Load(chats_per_s=1.0), steps)
    assert rates == [(0.0, 1.0), (2.0, 9.0), (5.0, 1.0), (8.0, 0.0)]
    times = [list(arrivals(rates, 10.0, Random(seed))) for seed in range(200)]
    shares = [sum(from_s <= at_s < to_s for one in times for at_s in one) / 200 for from_s, to_s in ((0, 2), (2, 5))]
    assert shares == [pytest.approx(2, rel=0.15), pytest.approx(27, rel=0.05)]
    assert not [at_s for one in times for at_s in one if at_s >= 8.0]


def test_of_loads_that_overlap_each_lasts_until_its_own_end() -> None:
    steps = (Step(2.0, "load", chats_per_s=9.0, for_s=8.0), Step(5.0, "load", chats_per_s=3.0, for_s=2.0))
    assert rates_of(Load(chats_per_s=1.0), steps) == [(0.0, 1.0), (2.0, 9.0), (5.0, 3.0), (7.0, 9.0), (10.0, 1.0)]


def test_one_seed_gives_one_workload() -> None:
    load = Load(chats_per_s=3.0, turns=2, prefixes=2)
    first, second, other = (list(conversations(load, rates_of(load, ()), 5.0, seed)) for seed in (1, 1, 2))
    assert first == second != other
    assert len({talk.turns[0].messages[0]["content"] for talk in first}) <= 2


# --- plan and refusals ----------------------------------------------------------------------------------------------

DIRECT = LinkMode("direct", "a test")


def test_every_flag_of_a_node_is_one_that_nodes_know(tmp_path: Path) -> None:
    cluster = Cluster(nodes=3, engines=2, budget_bytes_per_s=10_000, route_ttl_s=60.0)
    plan = make_plan(LinkMode("relay", "a test"), cluster, tmp_path, Random(1))
    place = plan.nodes[1]
    command = node_command(plan, place, cluster, gossip=True, label="", prefix=("nice",))
    options, unknown = node_parser("serve").parse_known_args(command.argv[4:])
    assert (command.argv[0], unknown) == ("nice", [])
    assert (options.listen, options.cluster_name) == (f"127.0.0.3:{place.port}", CLUSTER_NAME)
    assert options.gossip == "127.0.0.3:{}".format(options.advertise.removeprefix("127.0.1.3:"))
    assert len(options.backend) == 2
    silent = node_command(plan, place, cluster, gossip=False, label="", prefix=())
    assert not [word for word in silent.argv if "gossip" in word or "cluster" in word or "join" in word]
    engine = engine_command(Engines(), plan.engines[0])
    assert engine.argv[4:6] == ("--listen", f"127.0.0.1:{plan.engines[0].port}")


def test_a_key_ring_is_one_secret_per_line_and_the_same_for_all(tmp_path: Path) -> None:
    plan = make_plan(DIRECT, Cluster(nodes=2), tmp_path, Random(1))
    for place in plan.nodes:
        write_keys(place, [3, 0], seed=7)
    rings = [place.key_file.read_text().split() for place in plan.nodes]
    assert rings[0] == rings[1]
    assert [len(key) for key in rings[0]] == [64, 64]
    write_keys(plan.nodes[0], [0], seed=7)
    assert plan.nodes[0].key_file.read_text().split() == rings[0][1:]


@pytest.mark.parametrize(
    ("path", "step", "word"),
    [
        ("direct", Step(1.0, "cut", nodes=(0,)), "namespaces or the relay"),
        ("relay", Step(1.0, "cut", nodes=(0,)), ""),
        ("relay", Step(1.0, "cut", nodes=(0,), refuse=True), "to refuse"),
        ("namespaces", Step(1.0, "cut", nodes=(0,), refuse=True), ""),
        ("namespaces", Step(1.0, "cut", nodes=(0,), planes=("udp",)), "to cut one plane"),
        ("namespaces", Step(1.0, "link", nodes=(0,), loss=0.1), "needs the relay"),
        ("relay", Step(1.0, "dns", dns="empty"), "needs namespaces"),
        ("relay", Step(1.0, "disk_full", nodes=(0,)), "needs namespaces"),
        ("relay", Step(1.0, "engine_moves", engines=(0,)), "needs namespaces"),
        ("direct", Step(1.0, "flood", nodes=(0,)), "only the simulator"),
        ("direct", Step(1.0, "kill", nodes=(0,)), ""),
    ],
)
def test_what_a_path_cannot_do_is_refused_before_anything_starts(
    path: str, step: Step, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.processes.link_control.can_be_private", lambda: "")
    scenario = Scenario("x", "x", 10.0, steps=(step,))
    if word:
        with pytest.raises(CannotDo, match=word):
            choose(path, scenario)
    else:
        assert choose(path, scenario).name == path


def test_the_path_is_chosen_by_what_the_scenario_needs_and_states_why(monkeypatch: pytest.MonkeyPatch) -> None:
    lossy = Scenario("x", "x", 10.0, steps=(Step(1.0, "link", nodes=(0,), loss=0.1),))
    monkeypatch.setattr("cluster.processes.link_control.can_be_private", lambda: "")
    assert choose("auto", Scenario("x", "x", 10.0)).name == "namespaces"
    assert choose("auto", lossy) == LinkMode("relay", "step at 1 s (link): needs the relay")
    monkeypatch.setattr("cluster.processes.link_control.can_be_private", lambda: "no unshare")
    assert choose("auto", Scenario("x", "x", 10.0)) == LinkMode("relay", "no unshare")
    with pytest.raises(CannotDo, match="no unshare"):
        choose("namespaces", Scenario("x", "x", 10.0))
    with pytest.raises(CannotDo, match=r"disk_full.*no unshare"):
        choose("auto", replace(lossy, steps=(Step(1.0, "disk_full", nodes=(0,)),)))


def test_every_verb_that_is_not_refused_and_every_word_of_dns_is_known_here() -> None:
    """One that nobody carries out would fail in the middle of a run."""
    verbs = {verb.method or name for name, verb in VERBS.items() if "processes" in verb.runs_on}
    assert verbs == {name[3:] for name in dir(ProcessSteps) if name.startswith("do_")}
    for word in get_args(Dns):
        assert word == "flapping" or (dns_fault(word, 6, ("10.0.0.1",)) is None) == (word == "all")


def test_flags_change_the_scenario_and_are_checked() -> None:
    options = chaos.make_parser().parse_args(["--nodes", "4", "--for", "90", "--seed", "3"])
    scenario = settled("rolling_restart", "processes", options.seed, options.nodes, options.engines, options.for_s)
    assert (scenario.cluster.nodes, scenario.for_s) == (4, 90.0)
    assert scenario.steps[0].nodes == (0, 1, 2, 3)
    assert chaos.main(["--scenario", "rolling_restart", "--for", "1"]) == chaos.MISUSED
    assert chaos.main(["--scenario", "no_such_scenario"]) == chaos.MISUSED
    assert chaos.main(["--scenario", "chaos", "--nodes", "99"]) == chaos.MISUSED
    assert chaos.without(["--json", "f", "--seed", "1", "--scenario=x"], "--json", "--scenario") == ["--seed", "1"]
    assert "processes" in load_scenario("chaos").runs_on


# --- links ----------------------------------------------------------------------------------------------------------


def test_a_link_is_open_again_when_the_last_cut_has_ended() -> None:
    links = Links()
    first = links.add(Rule([0], [1], CUT, one_direction=True, planes=UDP))
    second = links.add(Rule([0, 1], [1, 2], CUT, one_direction=True, planes=TCP))
    links.add(Rule([0], [1], Link(loss=0.5), one_direction=True))
    assert links.link(0, 1, Plane.DATAGRAM) == CUT._replace(loss=0.5)
    links.remove(first)
    assert links.link(0, 1, Plane.DATAGRAM) == Link(loss=0.5)
    assert links.link(0, 1, Plane.BULK).cut
    links.protect((1, 2))
    assert not links.link(1, 2, Plane.BULK).cut, "well for good"
    links.add(Rule([1, 2], [2, 0], CUT, one_direction=True))
    assert not links.link(1, 2, Plane.BULK).cut
    assert links.link(2, 0, Plane.BULK).cut
    links.remove(second)
    assert links.link(0, 1, Plane.BULK) == Link(loss=0.5)
    links.heal()
    assert links.link(2, 0, Plane.BULK) == Link()


RECEIVE = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.bind(("10.77.0.3", 5000))
    print("up", flush=True)
    while True:
        sock.sendto(*sock.recvfrom(9))
"""

ANNOUNCE = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.settimeout(0.3)
    try:
        sock.sendto(b"x", ("10.77.0.3", 5000))
        sock.recv(9)
        print("received")
    except TimeoutError:
        print("silence")
    except OSError as error:
        print(error.strerror)
"""

DRIVER = """
import subprocess, sys
from pathlib import Path
import trio
sys.path.insert(0, sys.argv[2])
from cluster.network.links import CUT, Links, Rule
from cluster.processes.link_control import NamespaceControl

async def main(folder):
    states = [folder / "a", folder / "b"]
    for state in states:
        state.mkdir()
    links = Links()
    network = NamespaceControl(links, 2, states, folder / "resolv.conf")
    await network.set_up()
    python = [sys.executable, "-I", "-S", "-c"]
    hearer = subprocess.Popen([*network.prefix(1), *python, HEAR], stdout=subprocess.PIPE)
    hearer.stdout.readline()
    for way, cut, refuse in ((0, 0, 0), (0, 1, 0), (0, 0, 0), (1, 1, 0), (1, 0, 0), (0, 1, 1), (0, 0, 0)):
        links.heal()
        if cut:
            links.add(Rule([way], [1 - way], CUT._replace(refuse=bool(refuse)), one_direction=True))
        await network.apply()
        done = subprocess.run([*network.prefix(0), *python, SAY], capture_output=True, text=True)
        print(done.stdout.strip() or done.stderr)
    hearer.kill()
    await network.disk(0, full=True)
    try:
        (states[0] / "peers").write_bytes(bytes(1000))
    except OSError as error:
        print(error.strerror)
    await network.disk(0, full=False)
    print((states[0] / "peers").write_bytes(bytes(1000)), (states[1] / "peers").write_bytes(b"x"))
    print(Path("/etc/resolv.conf").read_text().strip())

trio.run(main, Path(sys.argv[1]))
"""


def test_in_namespaces_directions_are_cut_silently_or_refused_and_disks_fill(tmp_path: Path) -> None:
    """Nothing of it is seen outside: not the names, not the mounts, not the resolver."""
    if obstacle := can_be_private():
        pytest.skip(obstacle)
    resolver = Path("/etc/resolv.conf").read_text()
    driver = tmp_path / "driver.py"
    driver.write_text(f"HEAR, SAY = {RECEIVE!r}, {ANNOUNCE!r}\n{DRIVER}")
    done = subprocess.run(
        [*private_command(), sys.executable, str(driver), str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "received",
        "silence",
        "received",
        "silence",
        "received",
        "No route to host",
        "received",
        "No space left on device",
        "1000 1",
        "nameserver 10.77.0.1",
    ], done.stderr
    assert Path("/etc/resolv.conf").read_text() == resolver
    assert not (tmp_path / "a" / "peers").exists()


# --- processes ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def fleet_of_one(tmp_path: Path) -> AsyncIterator[tuple[Fleet, Member]]:
    port = free_port(["127.0.0.1"], Random())
    argv = (sys.executable, "-m", "http.server", str(port), "--bind=127.0.0.1", f"--directory={tmp_path}")
    command = Command("child", argv, "127.0.0.1", port, "/")
    log = RequestLog()
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            fleet = Fleet(log, tmp_path, trio.current_time, nursery)
            member = Member("child", "127.0.0.9", lambda: command)
            await fleet.start(member)
            try:
                yield fleet, member
            finally:
                await fleet.end()
            nursery.cancel_scope.cancel()
    assert not member.running


def state_of(member: Member) -> str:
    """One letter, as ps shows it: T is stopped."""
    return Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_killed_process_is_a_death_in_the_log_and_can_come_back(tmp_path: Path) -> None:
    async with fleet_of_one(tmp_path) as (fleet, member):
        first = member.pid
        await fleet.kill(member)
        assert [death.who for death in fleet.log.deaths] == ["127.0.0.9"]
        await fleet.start(member)
        assert member.pid not in (0, first)
    assert [child.log.name for child in fleet.children] == ["child.log", "child-2.log"]
    assert fleet.log.crashes == []


async def test_a_process_that_ends_by_itself_is_a_crash(tmp_path: Path) -> None:
    async with fleet_of_one(tmp_path) as (fleet, member):
        assert member.child is not None
        member.child.process.send_signal(signal.SIGABRT)
        await until(lambda: bool(fleet.log.crashes))
    assert "ended by itself with code -6" in fleet.log.crashes[0]
    assert fleet.log.deaths == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's process table")
async def test_a_paused_process_stands_still_and_goes_on(tmp_path: Path) -> None:
    async with fleet_of_one(tmp_path) as (fleet, member):
        undo = fleet.pause(member)
        await until(lambda: state_of(member) == "T")
        await called(undo)
        await until(lambda: state_of(member) != "T")


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's process table")
async def test_a_slowed_process_stands_still_most_of_the_time_until_it_is_killed(tmp_path: Path) -> None:
    async with fleet_of_one(tmp_path) as (fleet, member):
        fleet.slow(member, 20.0)
        await until(lambda: state_of(member) == "T")
        await fleet.kill(member)  # ends the slowing too, or the nursery would not close


async def test_a_process_that_is_paused_and_slowed_stands_still_until_its_pause_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    """Each slice of the slowing once let it go on in mid-pause."""
    sent: list[signal.Signals] = []
    monkeypatch.setattr(Member, "running", True)
    monkeypatch.setattr(Member, "signal", lambda _, number: sent.append(number))
    async with trio.open_nursery() as nursery:
        fleet = Fleet(RequestLog(), tmp_path, trio.current_time, nursery)
        member = Member("child", "127.0.0.9", lambda: pytest.fail("it runs"))
        slowing = fleet.slow(member, 2.0)
        for end in (fleet.pause(member), fleet.slow(member, STALL_FACTOR)):
            sent.clear()
            await trio.sleep(1.0)
            assert set(sent) == {signal.SIGSTOP}
            await called(end)
        await trio.sleep(1.0)
        assert set(sent) == {signal.SIGSTOP, signal.SIGCONT}
        await called(slowing)
    assert sent[-1] == signal.SIGCONT


async def test_a_process_that_is_paused_beyond_the_run_is_woken_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process gets no SIGTERM: the run once waited for it in vain, and called that a crash."""
    monkeypatch.setattr("cluster.processes.fleet.DRAIN_S", 2.0)
    async with fleet_of_one(tmp_path) as (fleet, member):
        fleet.pause(member)
        run: Any = SimpleNamespace(nodes=[member], engines=[])
        await Run.end(run, fleet)
        assert not [crash for crash in fleet.log.crashes if "did not stop" in crash]


async def test_a_process_starts_without_the_faults_of_the_one_before(tmp_path: Path) -> None:
    async with fleet_of_one(tmp_path) as (fleet, member):
        undo = fleet.pause(member)
        await fleet.kill(member)
        await fleet.start(member)
        assert not member.pauses
        await called(undo)
        assert [event.text for event in fleet.log.diary if "goes on" in event.text] == []


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
async def test_an_exhausted_process_gets_its_descriptors_back(tmp_path: Path) -> None:
    async with fleet_of_one(tmp_path) as (fleet, member):
        before = resource.prlimit(member.pid, resource.RLIMIT_NOFILE)
        first, second = fleet.exhaust(member), fleet.exhaust(member)
        assert (limit_leaving(2, {0, 1, 4}), limit_leaving(0, {0}), limit_leaving(3, set())) == (4, 0, 3)
        await called(first)
        assert resource.prlimit(member.pid, resource.RLIMIT_NOFILE)[0] < 64
        await called(second)
        assert resource.prlimit(member.pid, resource.RLIMIT_NOFILE) == before


def test_the_flag_for_inside_is_no_word_for_people() -> None:
    assert PRIVATE_FLAG not in chaos.make_parser().format_help()
