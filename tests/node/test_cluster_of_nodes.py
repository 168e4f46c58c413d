"""Several whole nodes in one process, peers over real sockets: one memory, one view of the backends."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from ranvier_py import __version__
from ranvier_py.config.config_endpoints import GossipEndpoints
from ranvier_py.config.config_loader import load
from ranvier_py.control.status_page import cluster_lines
from ranvier_py.core.addresses import host_port
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.mesh.wire.frame import PROTOCOL_VERSION
from ranvier_py.core.mesh.wire.messages import Record, State
from ranvier_py.core.mesh.wire.records import pack_record
from ranvier_py.core.peer.router_peer import RouterPeer
from ranvier_py.core.routing.backend_state import backend_sets
from ranvier_py.io import discovery
from ranvier_py.io.gossip.gossip_port import open_sockets
from ranvier_py.node.cluster_parts import own_address, public_address
from ranvier_py.node.fingerprints import FingerprintScheme
from tests.io.test_discovery import NXDOMAIN, FakeResolver
from tests.node.node_lab import BETWEEN_LOOKS_S, DEADLINE_S, KEY, Node, cluster_lab, states, turn
from tests.node.node_lab import lab as node_lab

OTHER_KEY = "19" * 16 + "c4" * 16
ADMIN_KEY = "an operator's own secret"
START_S = 60
"""Of a process, on a machine that does much else."""

PLANES = ("datagram", "probe", "bulk", "answers")


def peer_loads(answer: dict[str, Any]) -> dict[str, int]:
    """Requests of others in flight, by backend, as one node counts them."""
    return {row["name"]: row["peer_load"] for row in answer["backends"] if row["peer_load"]}


async def received(node: Node, updates: int) -> None:
    await node.until("/admin/cluster", lambda view: view["route_sync"]["received"] >= updates)


async def test_a_chat_finds_its_engine_whichever_node_gets_its_next_turn(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path) as place:
        nodes = await place.cluster(3)
        messages = turn("Where are the atlases? " * 10)
        served = set()
        for number in range(6):
            answer = await nodes[number % 3].chat(messages)
            served.add(answer.headers["x-ranvier-backend"])
            if number:
                assert answer.headers["x-ranvier-reason"] == "affinity"
                assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            reply = answer.json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"And shelf {number}?"}]
            view = await nodes[number % 3].until("/admin/cluster", lambda view: view["route_sync"]["sent"] > 0)
            await received(nodes[(number + 1) % 3], view["route_sync"]["sent"])
        assert len(served) == 1


@pytest.mark.slow
async def test_a_node_that_joins_later_knows_what_was_learned_before(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path) as place:
        first = await place.start()
        messages = turn("Where are the atlases? " * 10)
        backend = (await first.chat(messages)).headers["x-ranvier-backend"]
        await first.until("/admin/cluster", lambda view: view["route_sync"]["sent"] > 0)
        late = await place.start()
        await late.until("/admin/routes", lambda routes: routes["rows"] > 0)
        answer = await late.chat(messages)
        assert (answer.headers["x-ranvier-backend"], answer.headers["x-ranvier-reason"]) == (backend, "affinity")


@pytest.mark.slow
async def test_a_node_that_nobody_gives_routes_to_is_ready_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routing works without: a peer that is slow, or has other fingerprints, must not keep a node out of service."""
    monkeypatch.setattr(RouterPeer, "synced", property(lambda _: False))
    async with cluster_lab(tmp_path) as place:
        node = await place.start()
        while (await place.http.get(f"{node.control}/readyz")).status_code != httpx.codes.OK:  # noqa: ASYNC110  # a page
            await trio.sleep(BETWEEN_LOOKS_S)


async def test_a_node_that_is_gone_is_missed_and_its_routes_are_kept(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path) as place:
        first, second, third = await place.cluster(3)
        messages = turn("Where are the atlases? " * 10)
        backend = (await third.chat(messages)).headers["x-ranvier-backend"]
        await received(first, 1)
        third.scope.cancel()
        for node in (first, second):
            await node.until("/admin/cluster", lambda view: "alive" not in states(view)[1:] or len(states(view)) == 1)
            await node.until("/admin/cluster", lambda view: states(view).count("alive") == 1)
        assert (await first.chat(messages)).headers["x-ranvier-backend"] == backend


@pytest.mark.slow
async def test_a_node_that_is_asked_to_end_leaves_and_is_never_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process of its own, since a signal is for all of one. Each roll would look like deaths, and cost suspicions."""
    caplog.set_level("INFO")
    async with cluster_lab(tmp_path, deadline_s=START_S + DEADLINE_S) as place:
        first = await place.start()
        process = await place.process()
        await first.sees(1)
        process.terminate()
        await first.until("/admin/cluster", lambda view: states(view) == ["left"])
        assert process.poll() is None, "it stays until the news has spread"
        assert await process.wait() == 0
        assert "member.left" in caplog.text
        assert "member.died" not in caplog.text
        assert "member.suspected" not in caplog.text


async def test_requests_in_flight_elsewhere_count_here(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, engines=1) as place:
        first, second = await place.cluster(2)
        await first.fault(place.engines[0], kind="latency", seconds=30)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.chat, turn("Hello"))
            await second.until("/admin/cluster", lambda view: view["facts"]["loads_received"] > 0)
            await second.until_backend(lambda backend: backend["peer_load"] == 1)
            nursery.cancel_scope.cancel()
        await second.until_backend(lambda backend: backend["peer_load"] == 0)


async def test_an_engine_that_another_node_has_filled_is_left_here_too(tmp_path: Path) -> None:
    """What peers have in flight enters the rule of twice the median; else each node fills the holder up to it."""
    async with cluster_lab(tmp_path) as place:
        first, second = await place.start(backend=place.engines[:1]), await place.start()
        await second.sees(1)
        messages = turn("Where are the atlases? " * 10)
        holder = (await first.chat(messages)).headers["x-ranvier-backend"]
        await received(second, 1)
        await first.fault(place.engines[0], kind="latency", seconds=30)
        async with trio.open_nursery() as nursery:
            for _ in range(11):
                nursery.start_soon(first.chat, messages)
            await second.until("/admin/backends", lambda answer: peer_loads(answer) == {holder: 11})
            answer = await second.chat(messages)
            assert answer.headers["x-ranvier-backend"] != holder
            assert answer.headers["x-ranvier-reason"] in ("diverted", "common"), (
                "an own history, or one that chats share"
            )
            nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_an_engine_that_is_ill_to_a_peer_is_probed_here_at_once(tmp_path: Path) -> None:
    """A peer's word is a doubt, and our own probe the second witness; it would come in five minutes else."""
    async with cluster_lab(tmp_path, engines=1) as place:
        first = await place.start(probe_interval_s=0.2)
        second = await place.start(probe_interval_s=300)
        for node in (first, second):
            await node.sees(1)
            await node.until_backend(lambda backend: backend["health"] == "healthy")
        await first.fault(place.engines[0], kind="status", health=True)
        for node in (first, second):
            await node.until_backend(lambda backend: backend["health"] == "unhealthy")


async def test_a_drain_ordered_on_one_node_holds_on_all(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path) as place:
        first, second = await place.cluster(2)
        url = place.engines[0]
        await place.http.post(f"{first.control}/admin/backends/drain", json={"url": url})
        await second.until_backend(lambda backend: backend["draining"])
        await place.http.post(f"{second.control}/admin/backends/drain", json={"url": url, "draining": False})
        await first.until_backend(lambda backend: not backend["draining"])


async def test_a_backend_added_on_one_node_is_added_only_where_the_operator_allows_it(tmp_path: Path) -> None:
    """An address taken from gossip could send prompts anywhere."""
    async with cluster_lab(tmp_path) as place:
        places = place.engines
        first = await place.start(backend=places[:2], gossip_admin_key=ADMIN_KEY)
        second = await place.start(backend=places[:2], gossip_admin_key=ADMIN_KEY)
        careful = await place.start(backend=places[:2])
        for node in (first, second, careful):
            await node.sees(2)
        options = {"weight": 2.0, "hosted": True, "any_model": True}
        await place.http.post(f"{first.control}/admin/backends", json={"url": places[2], **options})
        added = (await second.until("/admin/backends", lambda answer: len(answer["backends"]) == 3))["backends"][2]
        assert {name: added[name] for name in options} == options
        await place.http.delete(f"{second.control}/admin/backends", params={"url": places[0]})
        await first.until("/admin/backends", lambda answer: len(answer["backends"]) == 2)
        assert len(await careful.backends()) == 2
        assert {backend["url"] for backend in await careful.backends()} == set(places[:2])


async def test_nodes_with_another_key_or_of_another_cluster_stay_strangers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And who runs one is warned, for it looks like a cluster of one."""
    async with cluster_lab(tmp_path) as place:
        first = await place.start()
        (tmp_path / "other").write_text(OTHER_KEY)
        stranger = await place.start(cluster_key_file=tmp_path / "other")
        namesake = await place.start(cluster_name="staging")
        await first.until("/admin/cluster", lambda view: view["refused"]["tag"] + view["refused"]["key"] > 2)
        for node in (first, stranger, namesake):
            assert (await node.ask("/admin/cluster"))["members"] == []
        while not (reported := [line for line in caplog.messages if "gossip.wrong_key" in line]):  # noqa: ASYNC110  # a log has none
            await trio.sleep(0.05)  # it is logged with the next look at the traffic
        assert all("from 127.0.0.1:" in line and "another key or cluster_name" in line for line in reported)
        assert len(reported) <= 3, "one for each node, not one for each packet"


async def test_a_node_of_another_protocol_is_named_from_its_first_packet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In log, status and metrics; from outside, each side looks like a cluster of one (consul#19965: one line)."""
    async with cluster_lab(tmp_path) as place:
        node = await place.start()
        host, port = (await node.ask("/admin/cluster"))["address"].split(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            for _ in range(100):
                other.sendto(b"RG\x01" + b"2" * 100, (host, int(port)))
        view = await node.until("/admin/cluster", lambda view: view["other_protocols"])
        assert view["other_protocols"] == {host: 1}
        assert f"{host} speaks gossip protocol 1" in "\n".join(cluster_lines(view))
        while not (lines := [line for line in caplog.messages if "gossip.version" in line]):  # noqa: ASYNC110  # a log has none
            await trio.sleep(BETWEEN_LOOKS_S)
        page = (await place.http.get(f"{node.control}/metrics")).text
        assert "ranvier_gossip_other_protocols 1" in page
        assert (len(lines), f"{host} (1)" in lines[0]) == (1, True)


@pytest.mark.slow
async def test_a_node_that_lacks_a_backend_is_named_by_its_peers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In log, status and metrics, with the backend; it shows which release it is, too."""
    monkeypatch.setattr(backend_sets, "ASK_S", 0.1)
    monkeypatch.setattr(backend_sets, "DIFFERS_S", 0.3)
    caplog.set_level("INFO")
    async with cluster_lab(tmp_path, engines=2) as place:
        node, lacking = await place.start(), await place.start(backend=place.engines[:1])
        (name,) = [member["name"] for member in (await node.until("/admin/cluster", states))["members"]]
        missing = place.engines[1].removeprefix("http://")
        view = await node.until("/admin/cluster", lambda view: missing in str(view["backend_sets"]["differing"]))
        assert f"{name} has other backends: 1 there, 2 here; lacks {missing}" in "\n".join(cluster_lines(view))
        assert [(each["release"], each["protocol"]) for each in view["members"]] == [(__version__, PROTOCOL_VERSION)]
        while f"gossip.backends_differ {name}: 1 there" not in caplog.text:  # noqa: ASYNC110  # a log has no event
            await trio.sleep(BETWEEN_LOOKS_S)
        page = (await place.http.get(f"{node.control}/metrics")).text
        assert "ranvier_gossip_backend_sets_differing 1" in page
        added = await place.http.post(f"{lacking.control}/admin/backends", json={"url": place.engines[1]})
        assert added.is_success, added.text
        await node.until("/admin/cluster", lambda view: not view["backend_sets"]["differing"])
        while f"gossip.backends_agree {name}" not in caplog.text:  # noqa: ASYNC110  # as above
            await trio.sleep(BETWEEN_LOOKS_S)


async def test_a_node_that_makes_other_fingerprints_is_a_member_without_routes_and_that_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rolled change of the tokenizer or the block size: nothing that one half learns means anything to the other."""
    async with cluster_lab(tmp_path) as place:
        first, second = await place.cluster(2)
        other = await place.start(block_size_tokens=32)
        for node in (first, second, other):
            await node.sees(2)
        await first.chat(turn("Where are the atlases? " * 10))
        await received(second, 1)
        view = await other.ask("/admin/cluster")
        assert view["route_sync"]["received"] == view["route_sync"]["rows"] == 0
        assert (await other.ask("/admin/routes"))["rows"] == 0
        assert [member["routes"] for member in view["members"]] == [False, False]
        members = (await first.ask("/admin/cluster"))["members"]
        assert {member["name"]: member["routes"] for member in members}[view["name"]] is False
        assert sum(member["routes"] for member in members) == 1
        assert f"gossip.other_routes {view['name']} " in caplog.text


@pytest.mark.slow
async def test_a_key_is_exchanged_while_nodes_run(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path) as place:
        first, second = await place.cluster(2)
        place.key_file.write_text(f"{OTHER_KEY}\n{KEY}\nfingerprint: {KEY}\n")
        for node in (first, second):
            await node.until("/admin/cluster", lambda view: len(view["opened_by_key"]) == 2)
            await node.until("/admin/cluster", lambda view: all(view["opened_by_key"].values()))
            await node.sees(1)


async def test_metrics_cover_every_part_of_gossip(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path) as place:
        first, _ = await place.cluster(2, gossip_state_file=tmp_path / "peers")
        text = (await place.http.get(f"{first.control}/metrics")).text
        planes = [
            f'port_{what}_total{{plane="{plane}"' for what in ("bytes_sent", "packets_received") for plane in PLANES
        ]
        parts = ("members_alive", "bytes_sent_total", "port_drops_total", "routes_own", "facts_", "lag_seconds_bucket")
        files = (
            "discovery_failures_total",
            "state_file_failures_total",
            "key_file_failures_total",
            "key_file_keys 1.0",
        )
        for part in (*parts, *planes, *files):
            assert f"ranvier_gossip_{part}" in text, part
        for gauge in ("members_relays", "members_strained", "routes_differing_buckets"):
            assert f"# TYPE ranvier_gossip_{gauge} gauge" in text, gauge
        samples = [line.split()[0] for line in text.splitlines() if not line.startswith("#")]
        assert len(samples) == len(set(samples))


async def test_a_node_states_how_much_passes_now_and_how_late_it_receives(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path) as place:
        first, second = await place.cluster(2)
        assert (await first.ask("/admin/cluster"))["lag_ms"] == {"p50": None, "p99": None}
        await second.chat(turn("Where are the atlases? " * 10))
        await received(first, 1)
        view = await first.until("/admin/cluster", lambda view: view["bytes_per_s"]["datagram"]["received"] > 0)
        assert set(view["bytes_per_s"]) == set(PLANES)
        assert 0 < view["lag_ms"]["p50"] <= view["lag_ms"]["p99"]


@pytest.mark.slow
async def test_peers_that_datagrams_do_not_reach_are_peers_and_that_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A firewall that lets only TCP through (consul#19965): probes work, later and dearer, so nobody would notice."""
    async with cluster_lab(tmp_path) as place:
        first = await place.start()
        second = await place.start(gossip_udp=False)
        await first.until("/admin/cluster", lambda view: [one["datagrams"] for one in view["members"]] == [False])
        while "gossip.datagrams_blocked" not in caplog.text:
            await first.sees(1)
            await trio.sleep(BETWEEN_LOOKS_S)
        await second.sees(1)
        assert caplog.text.count("gossip.datagrams_blocked") == 1


async def test_a_node_without_peers_states_so() -> None:
    async with node_lab() as node:
        assert (await node.http.get(f"{node.control}/admin/cluster")).status_code == 404


def test_peers_without_a_key_are_refused_unless_it_is_stated() -> None:
    with pytest.raises(ConfigError) as refused:
        load({"join": ["10.0.0.2"]})
    assert "peers need a cluster_key_file" in str(refused.value)
    assert load({"join": ["10.0.0.2"], "insecure_gossip": True})


async def test_a_node_whose_peers_have_no_record_yet_advertises_what_faces_them_once_they_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It advertised the address of its default route for ever, at which no peer reached it."""
    faces = {"192.0.2.1": "127.0.0.9", "127.0.0.1": "127.0.0.1"}  # who is routed elsewhere is 127.0.0.9
    monkeypatch.setattr(discovery, "facing", lambda host: faces.get(host, ""))
    monkeypatch.setattr(discovery, "is_loopback", lambda _: False)
    names = FakeResolver({"peers.test": NXDOMAIN})
    async with cluster_lab(tmp_path, engines=1) as place:
        first = await place.start()
        port = host_port(place.places[0])[1]
        trio.socket.set_custom_hostname_resolver(names)
        second = await place.start(gossip="0.0.0.0:0", join=[f"peers.test:{port}"])
        guessed = (await second.ask("/admin/cluster"))["address"]
        assert guessed.startswith("127.0.0.9:")
        names.answers["peers.test"] = ["127.0.0.1"]
        await first.sees(1)
        (member,) = (await first.ask("/admin/cluster"))["members"]
        moved = (await second.ask("/admin/cluster"))["address"]
        assert moved == guessed.replace("127.0.0.9", "127.0.0.1") == member["address"] == member["name"]
        assert (await second.chat()).status_code == 200
        await received(first, 1)


async def test_a_node_that_gossips_at_a_name_advertises_the_address_that_it_listens_on() -> None:
    """It advertised the address of its default route, where nobody listened."""
    sockets = await open_sockets("localhost", 0)
    found = await own_address(GossipEndpoints(("localhost", 0), None, ()), sockets)
    assert found == ((sockets.host, sockets.port), False)
    sockets.close()


@pytest.mark.parametrize(
    ("listen", "shown"),
    [
        ("0.0.0.0:8080", "10.0.0.7:8080"),
        ("[::]:8080", "10.0.0.7:8080"),
        ("192.0.2.1:80", "192.0.2.1:80"),
        (f"router-0.{'a' * 60}.svc.cluster.local:80", "10.0.0.7:80"),
    ],
)
def test_peers_get_a_public_address_that_can_be_called(listen: str, shown: str) -> None:
    """And that fits into a record: with a longer name no node would start."""
    public = public_address(listen, "10.0.0.7")
    assert public == shown
    assert pack_record(Record("n1", 1, 1, 0, State.ALIVE, "10.0.0.7", 7946, 0, public))


def test_only_who_makes_equal_fingerprints_has_an_equal_schema() -> None:
    """Routes of another schema are ignored: whatever changes a fingerprint must change it."""
    scheme = FingerprintScheme("tokenizer a, blocks of 16", b"key", texts_match=True)
    others = (
        replace(scheme, identity="tokenizer b, blocks of 16"),
        replace(scheme, key=b"other key"),
        replace(scheme, texts_match=False),
        replace(scheme, identity="tokenizer a, blocks of 16k", key=b"ey"),
    )
    assert scheme.schema == replace(scheme).schema
    assert len({scheme.schema, *(other.schema for other in others)}) == 1 + len(others)
