"""Derives from the configuration where a node gossips, and the configuration of each of several workers.

Rule: hosts and ports stay unresolved; literal addresses are checked here, names once they are resolved
(`io/discovery`). The address given to peers belongs to this machine; it is never 0.0.0.0 or ::, nor loopback if peers
are elsewhere. A node that can be reached from elsewhere needs a key or `insecure_gossip`. Worker i listens on the port
+ i and joins its siblings over loopback; nothing else distinguishes workers from other nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from ranvier_py.config.config_model import Config
from ranvier_py.core.addresses import (
    GOSSIP_PORT,
    OFF,
    HostPort,
    host_port,
    is_address,
    is_loopback,
    is_wildcard,
    parse_host_port,
    spelled,
)

Problem = tuple[tuple[str, ...], str]  # (keys involved, what is wrong)


class GossipEndpoints(NamedTuple):
    """Where one node gossips. `advertise` None: the socket or the route to peers shows it. Port 0: any."""

    listen: HostPort
    advertise: HostPort | None
    join: tuple[HostPort, ...]


def gossip_endpoints(config: Config) -> GossipEndpoints | None:
    """Return where this node gossips; None if it does not. It does if one of `gossip`, `join`, `cluster_key_file` or
    `insecure_gossip` is set, and between workers; `gossip = "off"` turns off even that."""
    if config.gossip == OFF:
        return None
    if config.gossip:
        listen = parse_host_port(config.gossip)
    elif config.join or config.cluster_key_file or config.insecure_gossip:
        listen = ("0.0.0.0", GOSSIP_PORT)  # noqa: S104  # peers are elsewhere
    elif config.workers > 1:
        listen = ("127.0.0.1", GOSSIP_PORT)
    else:
        return None
    advertise = parse_host_port(config.advertise, listen[1]) if config.advertise else None
    if advertise is None and not is_wildcard(listen[0]) and is_address(listen[0]):
        advertise = listen
    return GossipEndpoints(listen, advertise, tuple(parse_host_port(entry) for entry in config.join))


def of_worker(endpoints: GossipEndpoints, index: int, workers: int) -> GossipEndpoints:
    """Return the endpoints of one of several workers: ports of its own, and its siblings among the peers to join."""
    host, port = endpoints.listen
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    siblings = tuple((near, port + other) for other in range(workers) if other != index)
    advertise = endpoints.advertise and (endpoints.advertise[0], endpoints.advertise[1] + index)
    return GossipEndpoints((host, port + index), advertise, endpoints.join + siblings)


def config_of_worker(config: Config, index: int, key: bytes) -> Config:
    """Return the configuration of worker `index`: its own ports, its siblings as peers.

    `key` is 32 random bytes that the workers inherit from their parent; it is used if their only peers are each other.
    `workers` stays, because it means that they share the public port.
    """
    host, port = host_port(config.control)
    changes: dict[str, Any] = {"control": spelled((host, port + index if port else 0))}
    places = gossip_endpoints(config)
    if places is not None:
        places = of_worker(places, index, config.workers)
        changes["gossip"] = spelled(places.listen)
        changes["advertise"] = spelled(places.advertise) if places.advertise else None
        changes["join"] = tuple(spelled(where) for where in places.join)
        changes["node_name"] = config.node_name and f"{config.node_name}-{index}"
        changes["gossip_state_file"] = numbered(config.gossip_state_file, index)
    changes["record_file"] = numbered(config.record_file, index)
    changes["limit_state_file"] = numbered(config.limit_state_file, index)
    changes["worker_key"] = key if key_of_their_own(config) else None
    changes["worker_index"] = index
    changes["siblings_key"] = blake2b(key, person=b"orders").digest() if config.workers > 1 else None
    return replace(config, **changes)


def numbered(file: Path | None, worker: int) -> Path | None:
    """Return the worker's own file, for a name that all workers are given."""
    return file and file.with_name(f"{file.name}.{worker}")


def key_of_their_own(config: Config) -> bool:
    """Whether the only peers are workers of one parent, and no key is given; then a random key is used."""
    endpoints = gossip_endpoints(config)
    if endpoints is None or config.cluster_key_file or config.insecure_gossip:
        return False
    return config.workers > 1 and not endpoints.join and is_loopback(endpoints.listen[0])


def problems(config: Config) -> Iterator[Problem]:
    """Yield what is wrong between values that are each good alone. Each must have been checked before."""
    endpoints = gossip_endpoints(config)
    if endpoints is None:
        asked = [name for name in ("join", "cluster_key_file", "advertise") if getattr(config, name)]
        if asked:
            yield (*asked, "gossip"), "without gossip this has no effect"
        return
    if config.cluster_key_file and config.insecure_gossip:
        yield ("insecure_gossip", "cluster_key_file"), "there is a cluster_key_file: remove one of the two"
    if not config.cluster_key_file and not config.insecure_gossip and not key_of_their_own(config):
        key = "gossip" if config.gossip else "join"
        yield (key, "cluster_key_file"), "peers need a cluster_key_file; insecure_gossip goes without, for trials"
    yield from address_problems(endpoints)
    yield from port_problems(config, endpoints)


def address_problems(endpoints: GossipEndpoints) -> Iterator[Problem]:
    if endpoints.advertise is None:
        return
    host = endpoints.advertise[0]
    key = "gossip" if endpoints.advertise == endpoints.listen and not is_wildcard(host) else "advertise"
    if is_wildcard(host) or "%" in host:  # an interface of this machine is another one elsewhere
        yield (key,), f"{host} is no address that a peer could reach"
    elif not same_family(endpoints.listen[0], host):
        yield ("advertise", "gossip"), f"{host} can't be reached through {endpoints.listen[0]}: gossip on [::] has both"
    remote = [where for where in endpoints.join if is_address(where[0]) and not is_loopback(where[0])]
    if is_loopback(host) and remote:
        yield (key, "join"), f"{host} can't be reached from {spelled(remote[0])}"


def same_family(listen: str, host: str) -> bool:
    """Whether a socket that listens there receives what is sent to address `host`; :: and names take either family."""
    if listen == "::" or not is_address(listen):
        return True
    return ip_address(listen).version == ip_address(host).version


def port_problems(config: Config, endpoints: GossipEndpoints) -> Iterator[Problem]:
    port = endpoints.listen[1]
    if config.workers > 1 and port == 0:
        yield ("gossip", "workers"), "several workers can't share port 0"
        return
    if max(port, endpoints.advertise[1] if endpoints.advertise else 0) + config.workers - 1 > 65535:
        yield ("gossip", "workers"), "the last worker's port is above 65535"
    for other, where, count in (("listen", config.listen, 1), ("control", config.control, config.workers)):
        if ports_meet(endpoints.listen, config.workers, host_port(where), count):
            yield ("gossip", other, "workers"), f"takes a port of {other}"


def ports_meet(one: HostPort, count: int, other: HostPort, others: int) -> bool:
    """Whether `count` ports from `one` on and `others` from `other` on overlap, on addresses that could conflict."""
    (host, port), (other_host, other_port) = one, other
    meet = port and other_port and port < other_port + others and other_port < port + count
    return bool(meet) and (host == other_host or is_wildcard(host) or is_wildcard(other_host))
