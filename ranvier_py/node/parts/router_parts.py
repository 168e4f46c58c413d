"""The router of a node: its policy, its routes and its decisions, as operators see and change them; and its shadows."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any

from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.addresses import OFF
from ranvier_py.core.errors import NotFound
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.history.joined_panes import of_shadows
from ranvier_py.core.metrics import Sample, samples, values
from ranvier_py.core.prompts.fingerprint import UNCOMPUTED_TOKENS, TextHasher, TokenHasher
from ranvier_py.core.prompts.prompt import PromptMemory
from ranvier_py.core.prompts.request_body import PromptReader
from ranvier_py.core.routing.backends import Backend, Registry
from ranvier_py.core.routing.placement.kv_score import ring_of
from ranvier_py.core.routing.placement.policies import POLICIES, PlacementOptions, make_policy
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.routing.route_table.prefix_map import prefix_map
from ranvier_py.core.routing.router import Router
from ranvier_py.core.shadows.shadow import Shadow, make_shadow
from ranvier_py.core.shadows.shadows import Shadows
from ranvier_py.core.tokenize.tokenize_job import TokenizerFacts
from ranvier_py.node.asked import LIMIT, Asked, Route, fingerprint_of
from ranvier_py.node.engine_cache.calibration_parts import CalibrationParts
from ranvier_py.node.fingerprints import FingerprintScheme
from ranvier_py.node.part import Handler, Node, Part

POLICY_OPTIONS = ("policy_option", "load_factor", "load_floor", "placement_compatibility")
"""Keys with options of policies."""


def placement_options(config: Config) -> PlacementOptions:
    """Return the options of policies; those in `policy_option` override the keys of their own."""
    keys = {"divert_factor": config.load_factor, "divert_floor": config.load_floor}
    named = PlacementOptions.parse(config.policy_option).named
    return PlacementOptions(**{**keys, "placement_compatibility": config.placement_compatibility, **named})


def differ(before: Config, after: Config, *policies: str) -> bool:
    """Whether any of these policies has other options."""
    old, new = placement_options(before), placement_options(after)
    return any(old.build(POLICIES[name].options) != new.build(POLICIES[name].options) for name in policies)


def make_routes(config: Config) -> RouteTable:
    return RouteTable(capacity=config.route_capacity, ttl_s=config.route_ttl_s, options=config.routes)


def make_router(
    config: Config,
    facts: TokenizerFacts,
    scheme: FingerprintScheme,
    registry: Registry,
    rng: Random,
    prompt_hasher: TokenHasher | None = None,
) -> Router:
    hasher = TokenHasher(scheme.key, config.block_size_tokens, short=UNCOMPUTED_TOKENS)
    reader = PromptReader(
        TextHasher(scheme.key),
        prompt_hasher or hasher,
        PromptMemory(config.prompt_memory_entries),
        identity=scheme.identity,
        bytes_per_token=facts.chars_per_token,
        digest_seed=secrets.randbits(64),
        hoists_system=facts.hoists_system,
        reasoning_moves=facts.reasoning_moves,
        results=facts.results,
    )
    router = Router(
        reader=reader,
        hasher=hasher,
        routes=make_routes(config),
        registry=registry,
        policy=make_policy(config.policy, placement_options(config)),
        rng=rng,
        texts_match=scheme.texts_match,
        recent_max=config.recent_decisions,
    )
    router.checkpoints.ttl_s = config.checkpoint_ttl_s
    router.owners.isolated = config.tenant_isolation != OFF
    return router


SWEEP_ROWS_MAX = 2000  # of each table, once a second
TREE_ROUTES_MAX = 1000
MAP_EVERY_S = 10.0  # the map of prefixes is made anew
SHADOW_PLACED_MIN, SHADOW_SAVED_S_MIN = 1000, 0.005
"""Requests, and seconds saved of each, from which on another policy is worth a change."""

STRATEGIES = ("prefix_hash", "overflow", "fallback")
"""Decisions of Continuum Router's tier 1, the ring, in its own terms."""


class RouterParts(Part):
    """See the module. `shown`: the parts whose views stand among the routes' figures."""

    name, sums_series = "routing", True
    keys = ("policy", *POLICY_OPTIONS, "route_ttl_s", "checkpoint_ttl_s", "prompt_memory_entries", "recent_decisions")

    def __init__(self, node: Node, shown: Sequence[Part]) -> None:
        self._node, self._router, self._shown = node, node.router, shown
        self._mapped_at = -MAP_EVERY_S

    def added(self, backend: Backend, spec: BackendSpec | None) -> None:
        self._router.policy.forget(backend.id)

    def sweep(self, now: float) -> None:
        self._router.routes.sweep(now, self._node.generations, SWEEP_ROWS_MAX)

    def reload(self, before: Config, after: Config) -> None:
        """A new policy learns anew, but keeps the count of openings. Peers' updates keep the lifetime of the start, or
        end if the table drops them."""
        router = self._router
        if before.policy != after.policy or differ(before, after, after.policy):
            known = ring_of(router.policy)
            router.policy = make_policy(after.policy, placement_options(after))
            ring = ring_of(router.policy)
            if known is not None and ring is not None:
                ring.prefixes = known.prefixes
        router.routes.ttl_s = after.route_ttl_s
        router.checkpoints.ttl_s = after.checkpoint_ttl_s
        router.reader.memory.entries_max = after.prompt_memory_entries
        router.recent.keep(after.recent_decisions)

    def panes(self, now: float, *, watched: bool) -> Mapping[str, Any]:
        """Show the prefixes only while somebody looks: to find those that were used last reads the whole table."""
        if not watched or now < self._mapped_at + MAP_EVERY_S:
            return {}
        self._mapped_at = now
        return {"prefixes": prefix_map(self._router.routes, now)}

    def series(self, now: float) -> Iterator[tuple[str, float]]:
        counters = self._router.counters
        yield "requests", sum(counters.decisions.values())
        for name in ("prompt_tokens", "predicted_tokens", "engine_prompt_tokens", "engine_cached_tokens"):
            yield name, getattr(counters, name)

    def metrics(self) -> Iterator[Sample]:
        router = self._router
        yield from samples("", router.counters)
        yield from samples("owners", router.owners.counters)
        yield from self._ring_metrics()
        yield from samples("routes", router.routes.counters)
        yield from samples("memory", router.reader.memory.counters)
        yield from samples("speculation", router.holders.speculation.counters)

    def routes(self) -> Mapping[str, Handler]:
        return {
            "GET /admin/routes": Route(lambda _: self.view(), "Numbers of the route table"),
            "GET /admin/routes/<fingerprint>": Route(self.tree, "The tree of prefixes below one", query=LIMIT),
            "GET /admin/prefix-routing/stats": Route(
                lambda _: self.ring_view(), "Decisions by a ring, as Continuum has it"
            ),
        }

    def view(self) -> Mapping[str, Any]:
        router = self._router
        counters = router.counters
        return {
            **values(router.routes.counters),
            "memory": values(router.reader.memory.counters),
            "speculation": values(router.holders.speculation.counters),
            **{part.name: view for part in self._shown if (view := part.view())},
            "decisions": dict(counters.decisions),
            "outcomes": dict(counters.outcomes),
            "prompt_tokens": counters.prompt_tokens,
            "predicted_share": share(counters.predicted_tokens, counters.prompt_tokens),
            "engine_cached_share": share(counters.engine_cached_tokens, counters.engine_prompt_tokens),
        }

    def tree(self, asked: Asked) -> Mapping[str, Any]:
        number = fingerprint_of(asked.path["fingerprint"])
        found = self._router.routes.subtree(number, limit=asked.limit(TREE_ROUTES_MAX))
        if not found:
            raise NotFound(f"no route has the fingerprint {number:016x}")
        names = {backend.id: backend.name for backend in self._node.registry}
        rows = [
            {
                "level": view.level,
                "tokens": view.tokens,
                "exact": view.exact,
                "token_fingerprint": f"{view.token_fingerprint:016x}" if view.token_fingerprint else None,
                "text_fingerprints": [f"{text:016x}" for text in view.text_fingerprints],
                "children": view.children,
                "idle_s": round(view.idle_s, 1),
                "holders": [
                    {
                        "backend": names.get(claim.backend, f"#{claim.backend}"),
                        "trust": claim.trust.name,
                        "age_s": round(claim.age_s, 1),
                    }
                    for claim in view.holders
                ],
            }
            for view in found
        ]
        return {"fingerprint": f"{number:016x}", "routes": rows}

    def ring_view(self) -> Mapping[str, Any]:
        """Answer GET /admin/prefix-routing/stats."""
        router = self._router
        ring = ring_of(router.policy)
        if ring is None:
            return {"enabled": False}
        decisions = {name: router.counters.decisions.get(name, 0) for name in STRATEGIES}
        total = sum(decisions.values())
        return {
            "enabled": True,
            "config": {
                "max_prefix_length": router.policy.opening_bytes,
                "prefix_source": router.policy.opening_source,
                "load_factor_epsilon": ring.options.load_factor_epsilon,
                "virtual_nodes": ring.options.virtual_nodes,
                "anthropic_cache_control_injection": self._node.config.anthropic_cache_control,
            },
            "routing_decisions": {
                "total": total,
                **decisions,
                "overflow_rate": f"{decisions['overflow'] / max(1, total):.4f}",
            },
            "backend_distribution": [
                {"backend": each.name, "in_flight_requests": each.work.own.inflight} for each in router.registry
            ],
            "unique_prefixes": ring.prefixes.estimate(),
        }

    def _ring_metrics(self) -> Iterator[Sample]:
        ring = ring_of(self._router.policy)
        if ring is None:
            return
        words = "Placements by the policy chwbl, by strategy."
        for name in STRATEGIES:
            count = self._router.counters.decisions.get(name, 0)
            yield Sample("prefix_routing_requests", "counter", words, count, {"strategy": name})
        words = "Requests in flight at each backend under prefix routing."
        for each in self._router.registry:
            yield Sample(
                "prefix_routing_backend_distribution", "gauge", words, each.work.own.inflight, {"backend": each.name}
            )
        words = "About how many different openings of prompts came."
        yield Sample("prefix_routing_prefix_cardinality", "gauge", words, ring.prefixes.estimate())


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


class ShadowPolicies(Part):
    """See the module."""

    name = "shadows"
    joins, sums_series = MappingProxyType({"shadows": of_shadows}), True
    keys = ("shadow", *POLICY_OPTIONS, "route_ttl_s")

    def __init__(self, node: Node, calibration: CalibrationParts) -> None:
        self._node, self._calibration = node, calibration.calibration
        self.shadows: Shadows | None = None
        self._begin()

    def _begin(self) -> None:
        """Make the policies that the configuration names, and let them observe attempts first of all."""
        node, config = self._node, self._node.config
        observers = tuple(each for each in node.router.observers if each is not self.shadows)
        options, self.shadows = placement_options(config), None
        if config.shadow:
            made = [
                make_shadow(
                    node.router,
                    make_policy(name, options),
                    make_routes(config),
                    Random(node.rng.getrandbits(64)),  # noqa: S311
                )
                for name in dict.fromkeys(config.shadow)
            ]
            self.shadows = Shadows(made, node.registry)
            observers = (self.shadows, *observers)
        node.router.observers = observers

    @property
    def tables(self) -> Sequence[RouteTable]:
        """Their route tables, which want to be swept."""
        return self.shadows.tables if self.shadows is not None else ()

    def sweep(self, now: float) -> None:
        if self.shadows is not None:
            self.shadows.tick(self._calibration.backends(), now)
        for routes in self.tables:
            routes.sweep(now, self._node.generations, SWEEP_ROWS_MAX)

    def added(self, backend: Backend, spec: BackendSpec | None) -> None:
        if self.shadows is not None:
            self.shadows.forget(backend.id)

    def reload(self, before: Config, after: Config) -> None:
        if before.shadow != after.shadow or differ(before, after, *after.shadow):
            if self.shadows is not None:
                self.shadows.close()
            self._begin()
        for routes in self.tables:
            routes.ttl_s = after.route_ttl_s

    def view(self) -> Any:
        return [shadow_view(each) for each in self._all()]

    def panes(self, now: float, *, watched: bool) -> Mapping[str, Any]:
        return {"shadows": {"live": self._node.router.policy.name, "shadows": self.view()}}

    def series(self, now: float) -> Iterator[tuple[str, float]]:
        for each in self._all():
            yield f"saved_s/{each.router.policy.name}", each.counters.saved_seconds

    def findings(self, now: float) -> Iterator[Finding]:
        """Yield the policy in the shadow that would have saved most, if it is worth a change."""
        best = max(self._all(), key=lambda each: each.counters.saved_seconds, default=None)
        if best is None or best.counters.placed < SHADOW_PLACED_MIN:
            return
        saved_s, placed, name = best.counters.saved_seconds, best.counters.placed, best.router.policy.name
        if saved_s >= SHADOW_SAVED_S_MIN * placed:
            what = f"policy {name} would have saved {saved_s:.0f} s of prefill in {placed:,} requests"
            remedy = f"Replay your traffic with it, then set policy = {name}."
            yield Finding(
                "shadow_better",
                Severity.NOTICE,
                what,
                about=name,
                whom="first tokens",
                remedy=remedy,
                command="ranvier replay TRACE",
            )

    def metrics(self) -> Iterator[Sample]:
        for each in self._all():
            yield from shadow_metrics(each)

    def _all(self) -> Sequence[Shadow]:
        return self.shadows.shadows if self.shadows is not None else ()


def shadow_view(shadow: Shadow) -> dict[str, Any]:
    """Return what a policy would have done with the requests so far. Less than 0 saved is a loss."""
    own = shadow.counters
    return {
        "policy": shadow.router.policy.name,
        "placed": own.placed,
        "elsewhere_share": share(own.elsewhere, own.placed),
        "predicted_share": share(own.predicted_tokens, own.prompt_tokens),
        "saved_share": share(own.saved_tokens, own.prompt_tokens),
        "saved_tokens": own.saved_tokens,
        "saved_s": round(own.saved_seconds, 3),
        "saved_ms_per_request": round(1000 * own.saved_seconds / max(1, own.placed), 2),
    }


def shadow_metrics(shadow: Shadow) -> Iterator[Sample]:
    label = {"policy": shadow.router.policy.name}
    counters = shadow.router.counters
    yield from samples("shadow", shadow.counters, label)
    for reason, number in counters.decisions.items():
        labels = {**label, "reason": reason}
        yield Sample("shadow_decisions", "counter", "Placements by a shadow policy, by reason.", number, labels)
