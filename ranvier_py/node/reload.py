"""Reloads the configuration while a node runs: at SIGHUP, or by POST /admin/reload.

Changes that need no restart are applied at once, in one synchronous call: requests in flight go on, with new limits
from their next wait on. Changes that need a restart are named and not applied, so the next reload names them again. A
key that is in no table (APPLY_…) needs a restart; NEEDS_RESTART lists those, so that each key's place is deliberate.

Invariant: a reload is applied whole or not at all, interrupts no request, and logs no secret (test_reload.py,
test_reload_reports.py). Rules: a configuration without any backend is refused while there are some. Backends that an
operator or a peer added stay, though they are not in the configuration. Each change is logged (`config_changes`).
"""

from __future__ import annotations

import logging
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from secrets import randbits
from typing import Any, NamedTuple

import trio

from ranvier_py.config.config_loader import Loaded, contradictions
from ranvier_py.config.config_model import KEYS, Config, with_values
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.config.rule_files import rule_book
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.metrics import counter, increment
from ranvier_py.core.routing.placement.kv_score import ring_of
from ranvier_py.core.routing.placement.policies import POLICIES, make_policy
from ranvier_py.core.routing.placement.sticky_least_loaded import StickyLeastLoaded, StickyLeastLoadedOptions
from ranvier_py.io.logs import change_logs, request_line
from ranvier_py.node.answer_parts import share_answers
from ranvier_py.node.client_parts import body_mender_of, share_verdicts
from ranvier_py.node.config_changes import changes, contents, renewal, replaced
from ranvier_py.node.node import Node
from ranvier_py.node.parts import (
    authorization_of,
    debugger_of,
    placement_options,
    response_cache_of,
    shadows_of,
    source_options,
    tls_context,
    within_descriptors,
)

log = logging.getLogger(__name__)


class ConfigSource(NamedTuple):
    """Where a node's configuration came from.

    `load` reads it as at the start; it blocks for some small files, and raises ConfigError. `own` adapts it for one of
    several workers. `spread` makes the other workers reload it, too. `is_newer`: it was reloaded since this process was
    configured.
    """

    load: Callable[[], Loaded]
    own: Callable[[Config], Config] = lambda config: config
    spread: Callable[[], object] = lambda: None
    is_newer: bool = False


@dataclass(slots=True)
class ReloadCounters:
    """Reloads since the start."""

    reloads: dict[str, int] = counter("Times that the configuration was read again, by result.", label="result")


# --- what may change, and how ---------------------------------------------------------------------------------------


def apply_nothing(_node: Node, _: Config) -> None:
    """Do nothing, for options that are read from the configuration at each use."""


def apply_limits(node: Node, _: Config) -> None:
    """Set the limits of connections and requests together, since both sides of a request share the descriptors."""
    node.server.conversations.limits = node.config.server
    node.upstream.limits = node.config.upstream
    node.pipeline.limits = node.config.pipeline


def apply_policy(node: Node, before: Config) -> None:
    """Replace the policies whose options changed. A new policy learns anew, but keeps the count of openings."""
    after, kind = node.config, POLICIES[node.config.policy]
    old, new = placement_options(before), placement_options(after)
    if before.policy != after.policy or old.build(kind.options) != new.build(kind.options):
        known = ring_of(node.router.policy)
        node.router.policy = make_policy(after.policy, new)
        ring = ring_of(node.router.policy)
        if known is not None and ring is not None:
            ring.prefixes = known.prefixes
        node.index_parts.join(node.router.policy)
        node.keys.prefix_tokens = new.build(StickyLeastLoadedOptions).prefix_tokens
        if after.policy == StickyLeastLoaded.name:
            node.keys.hasher.keep((*node.keys.lengths, node.keys.prefix_tokens))
    if before.shadow != after.shadow or any(
        old.build(POLICIES[name].options) != new.build(POLICIES[name].options) for name in after.shadow
    ):
        if node.shadows is not None:
            node.shadows.close()
        replaced, node.shadows = node.shadows, shadows_of(after, node.router, Random(randbits(64)))  # noqa: S311
        kept = tuple(each for each in node.router.observers if each is not replaced)
        node.router.observers = kept if node.shadows is None else (node.shadows, *kept)


def apply_access(node: Node, _: Config) -> None:
    """Set who may use the control port, and see how requests were routed."""
    key = node.config.control_key
    node.control.key = key.get_secret_value() if key is not None else None
    node.control.metrics_public = node.config.metrics_public
    node.pipeline.may_see = debugger_of(node.config)


def apply_api_key(node: Node, _: Config) -> None:
    node.pipeline.authorization = authorization_of(node.config)
    node.poller.rekey(node.config.api_key)
    node.index_parts.rekey(node.config.api_key)


def apply_logs(node: Node, _: Config) -> None:
    """Set what logs requests. `Reloads.apply` sets levels, together with the secrets, which no log may show."""
    node.pipeline.report = node.server.conversations.report = request_line()


def apply_backends(node: Node, before: Config) -> None:
    """Add and remove backends as an operator would over the control port; weights change in place."""
    old = {spec.url: spec for spec in before.backend}
    new = {spec.url: spec for spec in node.config.backend}
    for url, spec in old.items():
        after = new.get(url)
        if (after is None or replace_needed(spec, after)) and node.registry.find(url) is not None:
            node.remove_backend(url)
    for url, spec in new.items():
        known = old.get(url)
        if node.registry.find(url) is None and (known is None or replace_needed(known, spec)):
            node.add_backend(url, spec.weight, spec.name, spec)
        elif known is not None and known.weight != spec.weight and node.registry.find(url) is not None:
            node.registry.reweigh(url, spec.weight)


def replace_needed(old: BackendSpec, new: BackendSpec) -> bool:
    return old.model_copy(update={"weight": new.weight}) != new


def apply_polls(node: Node, _: Config) -> None:
    node.poller.set_options(node.config.polls)
    node.hang_watch.hangs.hang_s = node.config.polls.hang_s
    node.calibration_parts.metrics_interval_s = node.config.polls.metrics_interval_s


def apply_ranks(node: Node, _: Config) -> None:
    node.rank_parts.set_options(node.config.ranks)


def apply_health(node: Node, _: Config) -> None:
    node.registry.limits = node.config.health
    for backend in node.registry:
        backend.vitals.limits = node.config.health


def apply_responses(node: Node, _: Config) -> None:
    """Set the options of the response cache. Answers stay as long as allowed; a cache that is turned off is dropped."""
    responses, options = node.pipeline.responses, node.config.responses
    if responses is None or not options.enabled:
        rng, tenants = Random(randbits(64)), node.pipeline.tenants  # noqa: S311
        responses = response_cache_of(node.config, node.scheme, {}, rng, tenants)
        node.pipeline.responses = responses
    else:
        responses.set_options(options)
    if responses is not None and node.clustering is not None:
        share_answers(responses, node.clustering)


def apply_index(node: Node, _: Config) -> None:
    node.index_parts.set_options(node.config.index, source_options(node.config))


def apply_tokens(node: Node, _: Config) -> None:
    node.tokenizer_worker.queue_max = node.config.learn_queue_max
    node.router.reader.memory.entries_max = node.config.prompt_memory_entries
    node.router.recent = deque(node.router.recent, node.config.recent_decisions)


def apply_route_life(node: Node, _: Config) -> None:
    """Set the lifetime of this node's routes. Peers' updates keep that of the start, or end if the table drops them."""
    for routes in (node.router.routes, *(node.shadows.tables if node.shadows is not None else ())):
        routes.ttl_s = node.config.route_ttl_s
    node.router.checkpoints.ttl_s = node.config.checkpoint_ttl_s


def apply_bodies(node: Node, _: Config) -> None:
    """Set what is changed in bodies for an engine."""
    node.asking.enabled = node.config.ask_usage
    node.pipeline.cache_control = node.config.anthropic_cache_control


def apply_rules(node: Node, _: Config) -> None:
    """Replace the rules, which have to prove themselves anew; peers send their verdicts about equal rules again."""
    book = rule_book(node.config.client_rules_file, node.config.client_rules)
    node.clients.book = book
    node.clients.mender = node.pipeline.mender = body_mender_of(node.config, node.scheme, book)
    share_verdicts(node.clients, node.clustering)


APPLY_PARTS: Mapping[str, Callable[[Node, Config], None]] = {
    "server": apply_limits,
    "upstream": apply_limits,
    "pipeline": apply_limits,
    "polls": apply_polls,
    "ranks": apply_ranks,
    "health": apply_health,
    "responses": apply_responses,
    "index": apply_index,
    "proof": apply_rules,
    "events": apply_index,
}
"""What applies a key, by the part of the configuration that has it, unless APPLY_KEYS or NEEDS_RESTART has it."""

APPLY_KEYS: Mapping[str, Callable[[Node, Config], None]] = {
    **dict.fromkeys(("control_key", "control_key_file", "metrics_public", "debug_headers"), apply_access),
    **dict.fromkeys(("metric_names", "drain_timeout_s", "reload_allow_empty"), apply_nothing),
    **dict.fromkeys(("tls_certificate_file", "tls_key_file"), apply_nothing),  # see `Reloads.apply`: always read
    "backend": apply_backends,
    **dict.fromkeys(("route_ttl_s", "checkpoint_ttl_s"), apply_route_life),
    **dict.fromkeys(("backend_api_key", "backend_api_key_file"), apply_api_key),
    **dict.fromkeys(("ask_usage", "anthropic_cache_control"), apply_bodies),
    **dict.fromkeys(("client_rules", "client_rules_file"), apply_rules),
    **dict.fromkeys(("learn_queue_max", "prompt_memory_entries", "recent_decisions"), apply_tokens),
    **dict.fromkeys(
        ("policy", "policy_option", "shadow", "load_factor", "load_floor", "placement_compatibility"), apply_policy
    ),
    **dict.fromkeys(("log_level", "log_format"), apply_logs),
}

NEEDS_RESTART = frozenset(
    """
    listen control workers
    kv_events
    tokenizer chat_template block_size_tokens
    route_capacity route_eviction tenant_isolation cluster_secret cluster_secret_file
    response_cache_backend response_cache_redis_url response_cache_redis_url_file response_cache_redis_prefix
    response_cache_redis_connections_max response_cache_redis_timeout_s response_cache_redis_connect_timeout_s
    response_cache_redis_bytes_max response_cache_redis_retry_s response_cache_fallback_to_memory
    response_cache_fallback_capacity response_cache_fallback_ttl_s
    kv_index_backend kv_redis_url kv_redis_url_file kv_redis_prefix kv_redis_timeout_s kv_redis_connect_timeout_s
    gossip advertise join cluster_key_file insecure_gossip cluster_name node_name gossip_profile gossip_udp
    gossip_bytes_per_s_max gossip_state_file gossip_admin_key gossip_admin_key_file
    record_file record_bytes_max record_files_max
    """.split()  # noqa: SIM905  # by section
)
"""They concern open sockets, processes and files, how fingerprints and routes are made, or what peers were given."""


def apply_of(name: str) -> Callable[[Node, Config], None] | None:
    """Return the function that applies a new value of this key; None if that needs a restart."""
    if name in NEEDS_RESTART:
        return None
    found = APPLY_KEYS.get(name)
    return APPLY_PARTS.get(KEYS[name].path[0]) if found is None and len(KEYS[name].path) > 1 else found


# --- reloading ------------------------------------------------------------------------------------------------------


class Reloads:
    """Reloads the configuration of one node.

    Args:
        config: as loaded; the node's own has a worker's ports, and fewer connections if there are few descriptors.
        descriptors: how many this process may have.
    """

    def __init__(self, node: Node, config: Config, source: ConfigSource, descriptors: int) -> None:
        self.counters = ReloadCounters()
        self._node = node
        self._config = config
        self._contents = contents(config)
        self._source = source
        self._descriptors = descriptors
        self._limiter = trio.CapacityLimiter(1)  # one at a time, in the order of the requests

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Reload at each SIGHUP, until cancelled. Only for the main thread, which gets the signals."""
        with trio.open_signal_receiver(signal.SIGHUP) as hang_ups:
            task_status.started()
            if self._source.is_newer:
                with suppress(ConfigError):  # logged
                    await self.reload("the start of a worker")
            async for _ in hang_ups:
                with suppress(ConfigError):
                    await self.reload("SIGHUP")

    async def ordered(self) -> Mapping[str, Any]:
        """Reload because an operator asked one worker over its control port; others follow. Raises ConfigError."""
        answer = await self.reload("the control port")
        self._source.spread()
        return answer

    async def reload(self, cause: str) -> Mapping[str, Any]:
        """Reload, and return what became of it. Raises ConfigError with all that is wrong, with nothing changed."""
        if self._node.clustering is not None:
            self._node.clustering.read_keys()
        before = self._config
        try:
            loaded = await trio.to_thread.run_sync(self._source.load, limiter=self._limiter)
            answer = self.apply(loaded)
        except ConfigError as error:
            increment(self.counters.reloads, "refused")
            log.error("config.refused by %s, going on as before: %s", cause, "; ".join(error.problems))
            raise
        increment(self.counters.reloads, "done")
        renewed = await trio.to_thread.run_sync(self._renewed, before, loaded.config, limiter=self._limiter)
        answer["renewed"] = [name for name in renewed if apply_of(name) is not None]
        answer["restart_needed"] += [name for name in renewed if apply_of(name) is None]
        applied, restart = (", ".join(answer[name]) or "nothing" for name in ("applied", "restart_needed"))
        log.info("config.reloaded by %s: applied %s; restart needed for %s", cause, applied, restart)
        self._log_changes(before, loaded.config, answer)
        for note in loaded.notes:
            log.warning("config.note %s", note)
        return answer

    def _renewed(self, before: Config, after: Config) -> list[str]:
        """Return the keys of files that have other content since they were last used."""
        found = contents(after)
        names = replaced(before, after, self._contents, found)
        self._contents |= {name: digest for name, digest in found.items() if apply_of(name) is not None}
        return names

    def _log_changes(self, before: Config, after: Config, answer: Mapping[str, Any]) -> None:
        for cause, end in (("applied", ""), ("restart_needed", "; needs a restart")):
            names = dict.fromkeys(name.partition(".")[0] for name in answer[cause])
            for text in changes(before, after, names):
                log.info("config.changed %s%s", text, end)
        for name in answer["renewed"]:
            log.info("config.renewed %s", renewal(name, KEYS[name].value_in(after)))

    def apply(self, loaded: Loaded) -> dict[str, Any]:
        """Apply the changes that need no restart. Raises ConfigError, with nothing changed."""
        node, before, after = self._node, self._config, loaded.config
        differing = [name for name, key in KEYS.items() if key.value_in(before) != key.value_in(after)]
        held, is_held = dict(self._held(before, after)), False
        applied = [name for name in differing if apply_of(name) is not None and name not in held]
        values = {name: KEYS[name].value_in(after) for name in applied}
        if "backend" in differing:
            values["backend"], is_held = with_event_streams_of(before.backend, after.backend)
            applied = [name for name in applied if name != "backend" or values["backend"] != before.backend]
        config = with_values(before, values)
        problems = [f"{names[0]}: {message}" for names, message in contradictions(config)]
        problems += self._taken(before.backend, config.backend)
        problems += self._emptied(before.backend, config.backend) if not after.reload_allow_empty else ()
        if problems:
            raise ConfigError(problems)
        certificate = tls_context(config)
        running, self._config = node.config, config
        node.config = within_descriptors(self._source.own(config), self._descriptors)
        node.server.tls = certificate
        change_logs(config.log_level, config.log_format, config.secret_values())
        steps = dict.fromkeys(apply_of(name) for name in applied)
        if rule_book(config.client_rules_file).rules != node.clients.book.rules:  # the file's content changed
            steps[apply_rules] = None
        for step in steps:
            assert step is not None, "what is applied has something that does"
            step(node, running)
        restart = [name for name in differing if name not in values]
        restart += ["backend.kv_index"] if is_held else []
        return {
            "applied": applied,
            "restart_needed": restart,
            "unchanged": len(KEYS) - len(differing),
            "notes": list(loaded.notes),
        }

    def _held(self, before: Config, after: Config) -> Iterator[tuple[str, None]]:
        """Yield keys that may change as a rule, but not from the present value to the new one."""
        for name in ("tls_certificate_file", "tls_key_file"):
            if (before.tls_certificate_file is None) != (after.tls_certificate_file is None):
                yield name, None  # the port can't change between plain HTTP and TLS
        if (before.polls.metrics_interval_s == 0) != (after.polls.metrics_interval_s == 0):
            yield "engine_metrics_interval_s", None  # polling can't begin or end
        if before.responses.backend != "memory":
            yield "response_cache", None  # stores outside this process are made at the start
        if before.responses.backend == "cluster":
            yield "response_cache_ttl_s", None  # invalidations are kept for so long

    def _taken(self, before: Sequence[BackendSpec], after: Sequence[BackendSpec]) -> Iterator[str]:
        """Yield a problem for each new backend whose name an added backend has that is not in the configuration."""
        urls = {spec.url for spec in before} | {spec.url for spec in after}
        others = {backend.name for backend in self._node.registry if backend.url not in urls}
        for index, spec in enumerate(after):
            if spec.label in others:
                yield f"backend[{index}]: {spec.label} is the name of a backend that was added while the node ran"

    def _emptied(self, before: Sequence[BackendSpec], after: Sequence[BackendSpec]) -> Iterator[str]:
        """Yield a problem if the node has backends now and would have none."""
        urls = {backend.url for backend in self._node.registry if not self._node.rank_parts.is_placed(backend)}
        if urls and not after and urls <= {spec.url for spec in before}:
            yield "backend: none would be left; if that is meant, set reload_allow_empty"


def with_event_streams_of(
    before: Sequence[BackendSpec], after: Sequence[BackendSpec]
) -> tuple[tuple[BackendSpec, ...], bool]:
    """Return the new backends with their present event streams, and whether other streams are wanted."""
    known = {spec.url: spec.kv_index for spec in before}
    made = tuple(spec.model_copy(update={"kv_index": known.get(spec.url, "")}) for spec in after)
    return made, made != tuple(after)
