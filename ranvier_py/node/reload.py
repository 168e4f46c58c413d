"""Reloads the configuration while a node runs: at SIGHUP, or by POST /admin/reload.

Changes that need no restart are applied at once, in one synchronous call: requests in flight go on, with new limits
from their next wait on. Others are named, each time again. A key that no part takes (`Part.keys`) needs a restart;
NEEDS_RESTART lists those, so that each key's place is deliberate. Backends that an operator or a peer added stay.
Invariant: a reload is applied whole or not at all, interrupts no request, and logs no secret (test_reload.py,
test_reload_reports.py). Rules: a configuration without any backend is refused while there are some.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from ranvier_py.config.config_loader import Loaded, contradictions
from ranvier_py.config.config_model import KEYS, SECRETS, Config, with_values
from ranvier_py.config.config_reference import toml_value
from ranvier_py.config.config_values import BackendSpec, shown
from ranvier_py.core.errors import ConfigError, NotFound
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import Sample, counter, samples
from ranvier_py.io.certificates import described, digest_of
from ranvier_py.io.logs import change_logs
from ranvier_py.node.asked import Asked, Route
from ranvier_py.node.config_source import ConfigSource
from ranvier_py.node.part import Handler, Node, Part
from ranvier_py.node.parts.request_parts import within_descriptors

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ReloadCounters:
    """Reloads since the start."""

    reloads: dict[str, int] = counter("Times that the configuration was read again, by result.", label="result")


NEEDS_RESTART = frozenset(
    """
    listen control workers
    kv_events state_folder
    tokenizer chat_template block_size_tokens
    route_capacity route_eviction tenant_isolation cluster_secret cluster_secret_file
    response_cache_backend response_cache_redis_url response_cache_redis_url_file response_cache_redis_prefix
    response_cache_redis_connections_max response_cache_redis_timeout_s response_cache_redis_connect_timeout_s
    response_cache_redis_bytes_max response_cache_redis_retry_s response_cache_fallback_to_memory
    response_cache_fallback_capacity response_cache_fallback_ttl_s
    kv_index_backend kv_redis_url kv_redis_url_file kv_redis_prefix kv_redis_timeout_s kv_redis_connect_timeout_s
    gossip advertise join cluster_key_file insecure_gossip cluster_name node_name gossip_profile gossip_udp
    gossip_bytes_per_s_max gossip_state_file limit_state_file gossip_admin_key gossip_admin_key_file
    record_file record_bytes_max record_files_max
    otel_endpoint otel_headers_file otel_ca_file otel_certificate_file otel_key_file otel_timeout_s
    """.split()  # noqa: SIM905  # by section
)
"""They concern open sockets, processes and files, how fingerprints and routes are made, or what peers were given."""


KEYS_SHOWN = 5  # of those that wait for a restart


class Reloads(Part):
    """Reloads the configuration of one node. `source`: None if there is none to read again.

    Args:
        config: as loaded; the node's own has a worker's ports, and fewer connections if there are few descriptors.
        descriptors: how many this process may have.
    """

    name = "reload"
    keys = ("log_level", "log_format")

    def __init__(self, node: Node, config: Config, source: ConfigSource | None, descriptors: int) -> None:
        self.counters = ReloadCounters()
        self._node, self._source, self._descriptors = node, source, descriptors
        self._config, self._contents = config, contents(config)
        self._refused = ""  # the first problem of the last reload
        self._waiting: Sequence[str] = ()  # keys that wait for a restart
        self._limiter = trio.CapacityLimiter(1)  # one at a time, in the order of the requests

    async def loop(self) -> None:
        """Reload at each SIGHUP. Only for the main thread, which gets the signals."""
        if self._source is None or signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # which ends a process
            return
        with trio.open_signal_receiver(signal.SIGHUP) as hang_ups:
            if self._source.is_newer:
                with suppress(ConfigError):  # logged
                    await self.read(self._source, "the start of a worker")
            async for _ in hang_ups:
                with suppress(ConfigError):
                    await self.read(self._source, "SIGHUP")

    def findings(self, now: float) -> Iterator[Finding]:
        cut, wanted = self._node.config.server.connections_max, self._config.server.connections_max
        if cut < wanted:
            what = f"this process may have {self._descriptors} files open: connections_max is {cut} instead of {wanted}"
            remedy = "Raise the limit of files (LimitNOFILE, ulimit -n) and start it again, or lower connections_max."
            yield Finding(
                "descriptors", Severity.NOTICE, what, whom="clients beyond these", remedy=remedy, command="ulimit -n"
            )
        if self._refused:
            what = f"the configuration was read again and refused: {self._refused}"
            remedy, whom = "Mend it and reload; the one before is in use.", "changes since the last reload"
            yield Finding(
                "config_refused", Severity.DEGRADED, what, whom=whom, remedy=remedy, command="ranvier config --check"
            )
        if self._waiting:
            what = f"changes of the configuration wait for a restart: {', '.join(self._waiting[:KEYS_SHOWN])}"
            remedy = "Restart this node; one after the other, if there are several."
            yield Finding("restart_needed", Severity.NOTICE, what, remedy=remedy)

    def metrics(self) -> Iterable[Sample]:
        return samples("config", self.counters) if self._source is not None else ()

    def routes(self) -> Mapping[str, Handler]:
        return {
            "GET /admin/config": Route(lambda _: self._node.config.shown(), "The configuration, without secrets"),
            "POST /admin/reload": Route(self._ordered, "Read the configuration again, on all workers"),
        }

    async def _ordered(self, _: Asked) -> Mapping[str, Any]:
        """Reload because an operator asked one worker over its control port; others follow. Raises ConfigError."""
        if self._source is None:
            raise NotFound("this node has no configuration to read again")
        answer = await self.read(self._source, "the control port")
        self._source.spread()
        return answer

    async def read(self, source: ConfigSource, cause: str) -> Mapping[str, Any]:
        """Reload, and return what became of it. Raises ConfigError with all that is wrong, with nothing changed."""
        async with self._limiter:
            return await self._read(source, cause)

    async def _read(self, source: ConfigSource, cause: str) -> Mapping[str, Any]:
        before = self._config
        try:
            loaded = await self._loaded(source)
            answer = self.apply(source, loaded)
        except ConfigError as error:
            self.counters.reloads["refused"] += 1
            self._refused = error.problems[0]
            log.error(event("config.refused", cause=cause, problems=error.problems))
            raise
        self.counters.reloads["done"] += 1
        self._refused = ""
        renewed = await trio.to_thread.run_sync(self._renewed, before, loaded.config)
        answer["renewed"] = [name for name in renewed if self.takes(name)]
        answer["restart_needed"] += [name for name in renewed if not self.takes(name)]
        self._waiting = answer["restart_needed"]
        log.info(
            event("config.reloaded", cause=cause, applied=answer["applied"], restart_needed=answer["restart_needed"])
        )
        self._log_changes(before, loaded.config, answer)
        for note in loaded.notes:
            log.warning(event("config.note", note=note))
        return answer

    async def _loaded(self, source: ConfigSource) -> Loaded:
        """Read the configuration, and what it names. Raises ConfigError with all that is wrong."""
        after, problems = None, list[str]()
        try:
            loaded = await trio.to_thread.run_sync(source.load)
            after = loaded.config
        finally:
            for part in self._node.parts:
                try:
                    await part.reread(after)
                except ConfigError as error:
                    problems += error.problems
        if problems:
            raise ConfigError(problems)
        return loaded

    def _renewed(self, before: Config, after: Config) -> list[str]:
        """Return the keys of files that have other content since they were last used."""
        found = contents(after)
        names = replaced(before, after, self._contents, found)
        self._contents |= {name: digest for name, digest in found.items() if self.takes(name)}
        return names

    def _log_changes(self, before: Config, after: Config, answer: Mapping[str, Any]) -> None:
        for cause, effect in (("applied", ""), ("restart_needed", "needs a restart")):
            names = dict.fromkeys(name.partition(".")[0] for name in answer[cause])
            for key, old, new, note in changes(before, after, names):
                log.info(event("config.changed", key=key, before=old, after=new, note=note, effect=effect))
        for name in answer["renewed"]:
            log.info(event("config.renewed", what=renewal(name, KEYS[name].value_in(after))))

    def takes(self, name: str) -> bool:
        """Whether a new value of this key needs no restart."""
        return any(takes(part, name) for part in self._node.parts)

    def apply(self, source: ConfigSource, loaded: Loaded) -> dict[str, Any]:
        """Apply the changes that need no restart. Raises ConfigError, with nothing changed."""
        node, before, after = self._node, self._config, loaded.config
        differing = [name for name, key in KEYS.items() if key.value_in(before) != key.value_in(after)]
        held, is_held = {name for part in node.parts for name in part.held(before, after)}, False
        applied = [name for name in differing if self.takes(name) and name not in held]
        values = {name: KEYS[name].value_in(after) for name in applied}
        if "backend" in differing:
            values["backend"], is_held = with_event_streams_of(before.backend, after.backend)
            applied = [name for name in applied if name != "backend" or values["backend"] != before.backend]
        config = with_values(before, values)
        concerned = self._checked(before, config, applied)
        running, self._config = node.config, config
        node.config = within_descriptors(source.own(config), self._descriptors)
        change_logs(config.log_level, config.log_format, config.secret_values())
        for part in concerned:
            part.reload(running, node.config)
        restart = [name for name in differing if name not in values]
        restart += ["backend.kv_index"] if is_held else []
        return {
            "applied": applied,
            "restart_needed": restart,
            "unchanged": len(KEYS) - len(differing),
            "notes": list(loaded.notes),
        }

    def _checked(self, before: Config, config: Config, applied: Sequence[str]) -> list[Part]:
        """Return the parts that something new concerns. Raises ConfigError with all that is wrong."""
        problems = [f"{names[0]}: {message}" for names, message in contradictions(config)]
        concerned = []
        for part in self._node.parts:
            try:
                is_renewed = part.check(before, config)
            except ConfigError as error:
                problems += error.problems
            else:
                if is_renewed or any(takes(part, name) for name in applied):
                    concerned.append(part)
        if problems:
            raise ConfigError(problems)
        return concerned


def takes(part: Part | type[Part], name: str) -> bool:
    """Whether a part takes new values of this key."""
    return name not in NEEDS_RESTART and (name in part.keys or KEYS[name].path[0] in part.keys)


def with_event_streams_of(
    before: Sequence[BackendSpec], after: Sequence[BackendSpec]
) -> tuple[tuple[BackendSpec, ...], bool]:
    """Return the new backends with their present event streams, and whether other streams are wanted."""
    known = {spec.url: spec.kv_index for spec in before}
    made = tuple(spec.model_copy(update={"kv_index": known.get(spec.url, "")}) for spec in after)
    return made, made != tuple(after)


VALUE_CHARACTERS_MAX = 1000  # a line of the log stays readable though a hundred backends change

FOLLOWED = ("tls_certificate_file", "client_rules_file", "chat_template")
"""Keys of files that a node reads only when it starts or reloads, whose content is no key's value."""


def changes(before: Config, after: Config, names: Iterable[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield each key with its old and new value, and a note; of a long list the items that differ."""
    for name in names:
        old, new = KEYS[name].value_in(before), KEYS[name].value_in(after)
        texts, end = (toml_value(shown(old)), toml_value(shown(new))), ""
        if texts[0] == texts[1] or (name in SECRETS and None not in (old, new)):
            end = "what is not shown differs"
        elif max(map(len, texts)) > VALUE_CHARACTERS_MAX and isinstance(old, tuple):
            texts, end = (without(old, new), without(new, old)), "only what differs"
        yield name, cut(texts[0]), cut(texts[1]), end


def without(items: tuple[Any, ...], others: tuple[Any, ...]) -> str:
    return toml_value(shown(tuple(item for item in items if item not in others)))


def cut(text: str) -> str:
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[:VALUE_CHARACTERS_MAX]}…"


def renewal(name: str, path: Path) -> str:
    """Return how to name a file with other content: of a certificate what tells it from another. Blocks for a file."""
    text = f"{name} {path}"
    if name == "tls_certificate_file":
        with suppress(OSError, ValueError):  # OpenSSL has read it, but may be less strict
            text += f": {described(path)}"
    return text


def contents(config: Config) -> dict[str, bytes]:
    """Return a digest of each file in FOLLOWED that is configured, by key. Blocks for some small files."""
    found: dict[str, bytes] = {}
    for name in FOLLOWED:
        path: Path | None = KEYS[name].value_in(config)
        if path is not None:
            found[name] = digest_of(path)
    return found


def replaced(before: Config, after: Config, old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[str]:
    """Return the keys that name the same file as before, whose content is another one."""
    return [
        name
        for name, digest in new.items()
        if KEYS[name].value_in(before) == KEYS[name].value_in(after) and old.get(name, digest) != digest
    ]
