"""Asks the other workers of this node for what is theirs alone, at their control ports, with a key that was given here.

Bound: ANSWER_S, and the length of an answer (`io/engine_asker.py`); without an answer it is empty.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.core.addresses import host_port, is_wildcard, spelled
from ranvier_py.io.certificates import prove_worker
from ranvier_py.io.engine_asker import EngineAsker

ANSWER_S = 3.0  # less than the least interval of scrapes in use
OWN = "own"  # in the query: asks for what is the worker's own


def siblings_of(config: Config) -> Mapping[int, str]:
    """Return the URLs of the other workers' control ports, by index; none if their ports are not known."""
    host, port = host_port(config.control)
    if config.workers < 2 or not port:
        return {}
    if is_wildcard(host):
        host = "::1" if ":" in host else "127.0.0.1"
    scheme = "https" if config.ports.control_tls_certificate_file is not None else "http"
    first = port - config.worker_index
    others = (index for index in range(config.workers) if index != config.worker_index)
    return {index: f"{scheme}://{spelled((host, first + index))}" for index in others}


def trust_of(config: Config) -> ssl.SSLContext | None:
    """Return what a sibling's certificate must prove: that it is this worker's own. A port that asks its clients for a
    certificate gets one that only workers of this node can make: its authorities need not know the port's own."""
    certificate = config.ports.control_tls_certificate_file
    if certificate is None:
        return None
    context = ssl.create_default_context(cafile=str(certificate))
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    if config.ports.control_client_ca_file is not None and config.siblings_key is not None:
        prove_worker(context, config.siblings_key)
    return context


async def answers_of(
    config: Config, path: str, key: str, *, accept: str = "", timeout_s: float = ANSWER_S
) -> Mapping[int, bytes]:
    """Return what each of the other workers answers, by index; b"" for one that does not, or refuses."""
    found: dict[int, bytes] = {}
    asker = EngineAsker(key, trust_of(config), timeout_s, accept=accept or "*/*")

    async def ask(index: int, url: str) -> None:
        page = (await asker.ask(url, path)).page
        found[index] = page.body if page.status == 200 and not page.is_cut else b""

    async with trio.open_nursery() as nursery:
        for index, url in siblings_of(config).items():
            nursery.start_soon(ask, index, url)
    return found
