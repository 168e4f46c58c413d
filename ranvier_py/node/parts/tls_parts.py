"""TLS of both sides of a node: how its public port proves itself, and how engines and the node prove themselves.

Rule: files that are replaced are noticed without a signal, once they have been the same for two looks; what can't be
used is logged, and changes nothing. Connections that were made before with other files serve no further request.
Invariant: no file ends a node that runs (test_engine_tls.py).
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import trio

from ranvier_py.config.config_model import KEYS, Config
from ranvier_py.core.errors import ConfigError, words_of
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.log_events import event
from ranvier_py.io.certificates import digests, ends_of, engine_context, worker_certificate
from ranvier_py.node.part import Node, Part

log = logging.getLogger(__name__)

OPENSSL = "openssl x509 -enddate -noout -in FILE"
LOOK_S = 2.0  # between two looks at the files
ENDS_SOON_S = 14 * 86_400.0
"""Before its end a certificate is named: who renews them by program does so thirty days before."""

UPSTREAM = ("upstream_ca_file", "upstream_certificate_file", "upstream_key_file")
PUBLIC = ("tls_certificate_file", "tls_key_file", "tls_client_ca_file")
CONTROL = ("control_tls_certificate_file", "control_tls_key_file", "control_client_ca_file")
"""Of each port: certificate, key, and the authorities of clients."""


class EngineTls(Part):
    """Gives everything that connects to engines its TLS context. `users` take one; None is that of the system."""

    name = "engine_tls"
    keys = UPSTREAM

    def __init__(self, node: Node, users: Sequence[Callable[[ssl.SSLContext | None], object]]) -> None:
        self._users, self._made = users, engine_context_of(node.config)
        self.reload(node.config, node.config)

    def check(self, before: Config, after: Config) -> bool:
        self._made = engine_context_of(after)
        return self._made is not None

    def reload(self, before: Config, after: Config) -> None:
        for use in self._users:
            use(self._made)


class TlsFiles(Part):
    """Has the parts of the node take files of TLS that were replaced."""

    name = "tls_files"

    def __init__(self, node: Node) -> None:
        self._node = node
        self._used = self._seen = digests(paths := paths_of(node.config))
        self._ends = ends_of(paths) if paths else {}  # of certificates, in seconds of the wall clock

    async def loop(self) -> None:
        while True:
            await trio.sleep(LOOK_S)
            paths = paths_of(self._node.config)
            found = await trio.to_thread.run_sync(digests, paths) if paths else {}
            if found == self._seen != self._used:
                before, self._used = self._used, found
                self._ends = await trio.to_thread.run_sync(ends_of, paths)
                self._renew([path for path, digest in found.items() if digest != before.get(path)])
            self._seen = found

    def findings(self, now: float) -> Iterator[Finding]:
        """Yield which certificates end soon, or have ended."""
        for path, end in self._ends.items():
            yield from ending(str(path), (end,), time.time())

    def _renew(self, paths: Sequence[Path]) -> None:
        config = self._node.config
        concerned = {name for name in (*UPSTREAM, *PUBLIC, *CONTROL) if KEYS[name].value_in(config) in paths}
        for part in self._node.parts:
            if concerned.isdisjoint(part.keys):
                continue
            try:
                if part.check(config, config):
                    part.reload(config, config)
                    log.info(event("tls.renewed", part=part.name, files=[*map(str, paths)]))
            except ConfigError as error:  # what the other parts have is taken all the same
                log.error(event("tls.refused", problems=error.problems))


def paths_of(config: Config) -> tuple[Path, ...]:
    found: Sequence[Path | None] = [KEYS[name].value_in(config) for name in (*UPSTREAM, *PUBLIC, *CONTROL)]
    return tuple(path for path in found if path is not None)


def engine_context_of(config: Config) -> ssl.SSLContext | None:
    """Make the TLS context for https engines, if it has files. Raises ConfigError if these can't be used."""
    files: list[Any] = [getattr(config, name) for name in UPSTREAM]
    if not any(files):
        return None
    try:
        return engine_context(*files)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError([f"{', '.join(UPSTREAM)}: can't be used: {words_of(error)}"]) from error


def tls_context(config: Config, names: Sequence[str] = PUBLIC) -> ssl.SSLContext | None:
    """Make the TLS context of a port, if it has files. Raises ConfigError if these can't be used."""
    certificate, key, authorities = (KEYS[name].value_in(config) for name in names)
    if certificate is None or key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    used = names[:2]
    try:
        context.load_cert_chain(certificate, key, password="")  # asks nobody
        if authorities is not None:
            used = names[2:]
            context.load_verify_locations(authorities)
            context.verify_mode = ssl.CERT_REQUIRED
            if names is CONTROL and config.siblings_key is not None:  # the other workers ask for this one's metrics
                context.load_verify_locations(cadata=worker_certificate(config.siblings_key)[0])
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError([f"{', '.join(used)}: can't be used: {words_of(error)}"]) from error
    return context


def ending(about: str, ends: Iterable[float], now: float) -> Iterator[Finding]:
    """Yield what is to be said of certificates that end at these times."""
    if (soonest := min(ends, default=now + 2 * ENDS_SOON_S)) < now + ENDS_SOON_S:
        day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(soonest))
        is_over = soonest <= now
        what = f"{about}: a certificate {'has ended' if is_over else 'ends'} at {day}"
        severity = Severity.DOWN if is_over else Severity.DEGRADED
        remedy = "Renew it; a node that runs takes new files by itself."
        yield Finding("certificate_ends", severity, what, about=about, whom="TLS", remedy=remedy, command=OPENSSL)
