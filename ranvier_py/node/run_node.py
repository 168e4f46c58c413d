"""The composition root: makes one node, opens the one nursery, starts the parts in order, and stops them at the end."""

from __future__ import annotations

import ctypes
import logging
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import trio

from ranvier_py.config.config_endpoints import gossip_endpoints
from ranvier_py.config.config_model import Config
from ranvier_py.core.log_events import event
from ranvier_py.core.routing.wanted.found_backend import STATIC
from ranvier_py.io.descriptors import raise_descriptor_limit
from ranvier_py.io.logs import announce, name_lines
from ranvier_py.io.resolver import Resolver
from ranvier_py.io.service_manager import notify_ready
from ranvier_py.io.tokenizer_process import TokenizerProcess
from ranvier_py.node.config_source import ConfigSource
from ranvier_py.node.fingerprints import fingerprint_key, load_keys, tokenizer_process
from ranvier_py.node.garbage import collected_in_waits, exempt_once_made

if TYPE_CHECKING:
    from ranvier_py.node.part import Node, Part
    from ranvier_py.node.parts.request_parts import PublicPort

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.00005
"""The event loop gives up the interpreter lock at each system call, and gets it back from another thread after this
time at the latest. CPython's default would be added to a request's time several times over."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
KEEP_BYTES = 256 * 1024 * 1024  # four bodies of the largest size at once
MAP_BYTES_MIN = 32 * 1024 * 1024  # glibc's own upper limit (DEFAULT_MMAP_THRESHOLD_MAX)
"""From this size on each buffer has a mapping of its own."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a running node listens: (host, port) pairs of the public port, URL of the control port."""

    public: Sequence[tuple[str, int]]
    control: str

    def __str__(self) -> str:
        public = " ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.public)
        return f"{public} control {self.control}"


async def run(
    config: Config,
    control: Callable[[], Callable[[Node], Part]],
    *,
    tokenizer_of: Callable[[Config, bytes], TokenizerProcess] = tokenizer_process,
    source: ConfigSource | None = None,
    task_status: trio.TaskStatus[Addresses] = trio.TASK_STATUS_IGNORED,
) -> signal.Signals | None:
    """Run one node until a signal ends it. Returns the second one that cut its drain short, if one did. Raises
    ConfigError or ListenError at the start.

    `control` imports and returns what makes its control port (`control.control_port`), which is above the node and
    knows all of it.
    `source` reloads the configuration, and adapts it for this node; without it the node keeps `config`.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    loaded, descriptors = config, raise_descriptor_limit()
    config = config if source is None else source.own(config)
    keys, key_file = await load_keys(config) if gossip_endpoints(config) is not None else (None, None)
    key = fingerprint_key(config, keys.fingerprint_secret if keys is not None else None)
    tokenizer = tokenizer_of(config, key)
    try:
        await tokenizer.begin()
        with exempt_once_made():  # the parts and the control port load while the tokenizer process does
            from ranvier_py.node.cluster_parts import open_cluster  # noqa: PLC0415
            from ranvier_py.node.node import make_node, parts_of  # noqa: PLC0415
            from ranvier_py.node.parts.request_parts import PublicPort, within_descriptors  # noqa: PLC0415
            from ranvier_py.node.reload import Reloads  # noqa: PLC0415

            control_port = control()
        await tokenizer.start()
        config = within_descriptors(config, descriptors)
        facts = tokenizer.facts
        log.log(
            logging.INFO if facts.incremental else logging.WARNING, event("node.tokenizer", report=facts.probe_report)
        )
        node, inbox = make_node(config, tokenizer, Random(secrets.randbits(64)), key)  # noqa: S311  # no secrets
        resolver = Resolver(node.faults)
        with resolver.installed():
            cluster = await open_cluster(config, keys, key_file, node) if keys is not None else None
            name_lines(
                cluster.peer.me.name if cluster is not None else config.node_name or config.listen, config.worker_index
            )
            reloads = Reloads(node, loaded, source, descriptors)
            *parts, public_port = parts_of(node, tokenizer, inbox, cluster, resolver)
            node.assemble([*parts, control_port(node), reloads, public_port])
            port = node.part(PublicPort)
            with collected_in_waits():
                await run_parts(node, port, task_status)
    finally:
        await tokenizer.close()
    log.info(event("node.stopped"))
    return port.cut_by


async def run_parts(node: Node, port: PublicPort, task_status: trio.TaskStatus[Addresses]) -> None:
    """Start the parts in order, serve until drained, and stop them.

    A fault in one part never ends the others: the part is restarted here, or restarts its own loops if it has several.
    """
    async with trio.open_nursery() as nursery:
        reported = await node.start(nursery)
        addresses = Addresses(reported[port.name], reported["control"])
        if not node.config.backend and node.sources.reconciler.sources.keys() <= {STATIC}:  # nor will any be found
            log.warning(event("node.no_backends"))
        if not port.draining:  # by a signal that came meanwhile
            log.info(event("node.ready", addresses=str(addresses)))
            announce(f"ranvier listening on {addresses}")
            notify_ready()
        task_status.started(addresses)
        await port.drained.wait()
        for part in reversed(node.parts):
            part.stop()
        nursery.cancel_scope.cancel()


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory. Returns False if that is not possible.

    By default glibc returns what is freed at the top of its heap, so every large body is received into pages that the
    kernel must first find and clear. After a peak, a process keeps up to `KEEP_BYTES`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAP_BYTES_MIN)) and bool(mallopt(M_TRIM_THRESHOLD, KEEP_BYTES))
