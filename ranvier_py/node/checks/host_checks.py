"""What a node needs of its own machine: ports, descriptors, certificates that are good for a while, keys hard to guess.

Nothing is left behind: ports are bound and closed again.
"""

from __future__ import annotations

import string
import time
from collections.abc import Iterator
from math import log2
from pathlib import Path

import trio

from ranvier_py.config.config_endpoints import config_of_worker, gossip_endpoints
from ranvier_py.config.config_model import KEYS, Config
from ranvier_py.core.addresses import host_port, is_loopback, spelled
from ranvier_py.core.errors import ListenError, words_of
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.io.certificates import ends_of, public_context
from ranvier_py.io.descriptors import raise_descriptor_limit
from ranvier_py.io.engine_asker import EngineAsker
from ranvier_py.io.gossip.gossip_port import open_sockets
from ranvier_py.node.parts.request_parts import clients_within, descriptors_for
from ranvier_py.node.parts.tls_parts import CONTROL, PUBLIC, UPSTREAM, ending
from ranvier_py.proxy.transport import listen

KEY_BITS_MIN = 128
ASK_S = 2.0
ALPHABETS = (string.digits, string.ascii_lowercase, string.ascii_uppercase, string.punctuation + " ")
HEX = frozenset(string.hexdigits.lower())


async def check_ports(config: Config) -> list[Finding]:
    """Ports that others have. If a node answers at the control port, it is taken for the one that this is about."""
    busy: list[tuple[str, str]] = []
    workers = [
        config_of_worker(config, index, b"") if config.workers > 1 else config for index in range(config.workers)
    ]
    for name, place in [("listen", config.listen), *(("control", each.control) for each in workers)]:
        try:
            for sock in await listen(*host_port(place)):
                sock.close()
        except OSError as error:
            busy.append((f"{name} {place}", words_of(error)))
    for each in workers:
        if (endpoints := gossip_endpoints(each)) is not None:
            try:
                (await open_sockets(*endpoints.listen, udp=config.gossip_udp)).close()
            except ListenError as error:
                busy.append((f"gossip {spelled(endpoints.listen)}", words_of(error)))
    if busy and await is_served(config):
        words = "a node serves here already, so its ports were not tried"
        return [Finding("port", Severity.NOTICE, words, about=config.control)]
    remedy = "Stop what listens there, or choose another port."
    return [
        Finding(
            "port",
            Severity.DOWN,
            f"{place} can't be listened on: {why}",
            about=place,
            whom="all clients",
            remedy=remedy,
            command=command_for(place),
        )
        for place, why in busy
    ]


def command_for(place: str) -> str:
    return f"ss -lnptu 'sport = :{place.rpartition(':')[2]}'"


async def is_served(config: Config) -> bool:
    scheme = "http" if config.ports.control_tls_certificate_file is None else "https"
    host, port = host_port(config.control)
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    reply = await EngineAsker("", public_context(), ASK_S).ask(f"{scheme}://{spelled((near, port))}", "/healthz")
    return reply.page.status == 200 and reply.page.body == b'{"status":"ok"}'


async def check_descriptors(config: Config) -> list[Finding]:
    allowed = raise_descriptor_limit()
    clients, wanted = clients_within(config, allowed), config.server.connections_max
    if clients >= wanted:
        return []
    needed = descriptors_for(config)
    what = f"this process may have {allowed} files open, so of {wanted} connections {clients} are taken"
    remedy = f"Allow {needed}, or set connections_max = {clients}."
    return [
        Finding(
            "descriptors", Severity.DEGRADED, what, whom="clients beyond", remedy=remedy, command=f"ulimit -n {needed}"
        )
    ]


async def check_control_key(config: Config) -> list[Finding]:
    key = config.control_key.get_secret_value() if config.control_key is not None else ""
    if not key or is_loopback(host_port(config.control)[0]) or (bits := bits_of(key)) >= KEY_BITS_MIN:
        return []
    what = f"the control key has at most {bits:.0f} bits, and others can reach {config.control}"
    remedy = f"Take a random one of {KEY_BITS_MIN} bits or more."
    return [
        Finding("control_key", Severity.DEGRADED, what, whom="the node", remedy=remedy, command="openssl rand -hex 32")
    ]


def bits_of(key: str) -> float:
    """Return how much of chance a key of this alphabet and length may have at most."""
    if HEX.issuperset(key) or HEX.issuperset(key.lower()):
        return 4.0 * len(key)
    alphabet = sum(len(each) for each in ALPHABETS if not set(each).isdisjoint(key))
    return len(key) * log2(max(2, min(alphabet, 2 ** len(set(key)))))


async def check_certificates(config: Config) -> list[Finding]:
    """Certificates of the node's own files that have ended, or end soon."""
    return await trio.to_thread.run_sync(lambda: [*certificates_ending(config, time.time())])


def certificates_ending(config: Config, now: float) -> Iterator[Finding]:
    for name in (*PUBLIC, *CONTROL, *UPSTREAM):
        path: Path | None = KEYS[name].value_in(config)
        if path is not None and not name.endswith("key_file"):
            yield from ending(f"{name} {path}", ends_of([path]).values(), now)
