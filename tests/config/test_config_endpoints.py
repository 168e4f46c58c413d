"""Where a node gossips, as far as it follows from what the operator wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranvier_py.config.config_endpoints import GossipEndpoints, gossip_endpoints, key_of_their_own, of_worker, problems
from ranvier_py.config.config_model import Config
from ranvier_py.core.addresses import parse_host_port, spelled

KEYED = {"cluster_key_file": Path("keys")}
INSECURE = {"insecure_gossip": True}


def found(**values: Any) -> list[tuple[str, str]]:
    return [(keys[0], message) for keys, message in problems(Config(**values))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", ("a", 7946)),
        ("router.example:80", ("router.example", 80)),
        ("10.0.0.1", ("10.0.0.1", 7946)),
        ("::1", ("::1", 7946)),
        ("[::1]", ("::1", 7946)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_a_place_may_leave_out_its_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_host_port(text) == expected
    assert parse_host_port(spelled(expected)) == expected


@pytest.mark.parametrize("text", ["", "a:", "a:x", "a:70000", ":80", "a b", "http://a", "a@b", "x:1:2"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse_host_port(text)


def test_a_node_alone_does_not_gossip() -> None:
    assert gossip_endpoints(Config()) is None
    assert gossip_endpoints(Config(gossip="off", workers=4)) is None
    assert found() == []


def test_whoever_has_peers_elsewhere_listens_everywhere_and_workers_alone_on_loopback() -> None:
    everywhere = GossipEndpoints(("0.0.0.0", 7946), None, ())
    assert gossip_endpoints(Config(**KEYED)) == everywhere
    assert gossip_endpoints(Config(**INSECURE, workers=4)) == everywhere
    assert gossip_endpoints(Config(join=("a",), **KEYED)) == everywhere._replace(join=(("a", 7946),))
    assert gossip_endpoints(Config(workers=2)) == GossipEndpoints(("127.0.0.1", 7946), ("127.0.0.1", 7946), ())


def test_what_is_advertised_is_what_is_listened_on_unless_reported_or_unknown() -> None:
    def advertised(**values: Any) -> object:
        endpoints = gossip_endpoints(Config(**values))
        assert endpoints is not None
        return endpoints.advertise

    assert advertised(gossip="10.0.0.1:9") == ("10.0.0.1", 9)
    assert advertised(gossip="[::]:9") is None
    assert advertised(gossip="host:9") is None
    assert advertised(gossip="0.0.0.0:9", advertise="10.0.0.1") == ("10.0.0.1", 9)
    assert advertised(gossip="0.0.0.0:9", advertise="10.0.0.1:10") == ("10.0.0.1", 10)


def test_each_worker_has_a_port_and_joins_all_others() -> None:
    endpoints = gossip_endpoints(Config(gossip="0.0.0.0:100", advertise="10.0.0.1", join=("a:5",), **KEYED))
    assert endpoints is not None
    second = of_worker(endpoints, 1, 3)
    assert second == GossipEndpoints(
        ("0.0.0.0", 101), ("10.0.0.1", 101), (("a", 5), ("127.0.0.1", 100), ("127.0.0.1", 102))
    )
    assert of_worker(GossipEndpoints(("10.0.0.1", 100), None, ()), 0, 2).join == (("10.0.0.1", 101),)
    assert of_worker(GossipEndpoints(("::", 100), None, ()), 0, 2).join == (("::1", 101),)


def test_only_workers_without_other_peers_have_a_key_of_their_own() -> None:
    """A key that only this parent knows would keep everybody else out."""
    assert key_of_their_own(Config(workers=2))
    assert key_of_their_own(Config(workers=2, gossip="localhost:1"))
    assert not key_of_their_own(Config(workers=1, gossip="127.0.0.1:1"))
    assert not key_of_their_own(Config(workers=2, gossip="10.0.0.1:1"))
    assert not key_of_their_own(Config(workers=2, gossip="127.0.0.1:1", join=("127.0.0.2",)))
    assert not key_of_their_own(Config(workers=2, gossip="127.0.0.1:1", **KEYED))
    assert not key_of_their_own(Config(workers=2, gossip="127.0.0.1:1", **INSECURE))
    assert not key_of_their_own(Config(workers=2, gossip="off"))


@pytest.mark.parametrize(
    ("values", "key", "message"),
    [
        ({"join": ("a",)}, "join", "peers need a cluster_key_file"),
        ({"gossip": "127.0.0.1:1"}, "gossip", "peers need a cluster_key_file"),
        ({"gossip": "10.0.0.1:1", "workers": 2}, "gossip", "peers need a cluster_key_file"),
        ({**INSECURE, **KEYED}, "insecure_gossip", "there is a cluster_key_file"),
        ({"advertise": "10.0.0.1"}, "advertise", "without gossip this has no effect"),
        ({"gossip": "off", "join": ("a",)}, "join", "without gossip this has no effect"),
        ({"gossip": "off", **KEYED}, "cluster_key_file", "without gossip this has no effect"),
        ({**KEYED, "advertise": "0.0.0.0"}, "advertise", "0.0.0.0 is no address that a peer could reach"),
        ({**KEYED, "advertise": "fd00::7"}, "advertise", "fd00::7 can't be reached through 0.0.0.0: gossip on [::]"),
        ({**KEYED, "gossip": "[fd00::7]:1", "advertise": "10.0.0.1"}, "advertise", "10.0.0.1 can't be reached"),
        ({**KEYED, "advertise": "::"}, "advertise", ":: is no address that a peer could reach"),
        ({**KEYED, "gossip": "fe80::1%eth0"}, "gossip", "fe80::1%eth0 is no address that a peer could reach"),
        (
            {**KEYED, "gossip": "::", "advertise": "fe80::1%eth0"},
            "advertise",
            "fe80::1%eth0 is no address that a peer could reach",
        ),
        (
            {**KEYED, "advertise": "127.0.0.1", "join": ("127.0.0.2", "10.0.0.2:5")},
            "advertise",
            "127.0.0.1 can't be reached from 10.0.0.2:5",
        ),
        (
            {**KEYED, "gossip": "127.0.0.1:1", "join": ("10.0.0.2",)},
            "gossip",
            "127.0.0.1 can't be reached from 10.0.0.2:7946",
        ),
        ({"workers": 2, "gossip": "127.0.0.1:0"}, "gossip", "several workers can't share port 0"),
        ({"workers": 2, "gossip": "127.0.0.1:65535"}, "gossip", "the last worker's port is above 65535"),
        ({"workers": 2, "gossip": "127.0.0.1:9", "listen": "0.0.0.0:10"}, "gossip", "takes a port of listen"),
        ({"workers": 4, "gossip": "127.0.0.1:9", "control": "127.0.0.1:12"}, "gossip", "takes a port of control"),
    ],
)
def test_what_can_not_work_is_refused(values: dict[str, Any], key: str, message: str) -> None:
    ((where, reported),) = found(**values)
    assert where == key
    assert reported.startswith(message)


@pytest.mark.parametrize(
    "values",
    [
        {**KEYED, "join": ("router.example", "10.0.0.2"), "advertise": "10.0.0.1"},
        {**KEYED, "gossip": "127.0.0.1:1", "join": ("127.0.0.2", "router.example")},
        {**INSECURE, "join": ("10.0.0.2",)},
        {**KEYED, "gossip": "[::]:1", "advertise": "10.0.0.1"},
        {**KEYED, "gossip": "[::]:1", "advertise": "fd00::7"},
        {**KEYED, "gossip": "node-1.example:1", "advertise": "fd00::7"},
        {"workers": 4, "control": "127.0.0.1:9180", "listen": "0.0.0.0:8080"},
        {**KEYED, "gossip": "127.0.0.2:9", "listen": "127.0.0.1:9"},
        {**KEYED, "gossip": "127.0.0.1:0", "listen": "127.0.0.1:0"},
    ],
)
def test_what_can_work_is_not(values: dict[str, Any]) -> None:
    assert found(**values) == []
