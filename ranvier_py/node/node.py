"""The parts of one node, in the order in which they start. They stop together, after the public port has drained.

To add a feature, make it a `Part` and add a line to the list.
"""

from __future__ import annotations

import os
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from ranvier_py.config.config_model import Config
from ranvier_py.config.trace_options import target_of
from ranvier_py.core.answers.usage_injection import UsageAsker
from ranvier_py.io.logs import log_counters
from ranvier_py.io.resolver import Resolver
from ranvier_py.io.tokenizer_process import TokenizerProcess
from ranvier_py.io.tokenizer_worker import TokenizerWorker
from ranvier_py.node.access.access_parts import Access
from ranvier_py.node.access.limit_parts import LimitParts
from ranvier_py.node.checks.tokenizer_fit import TokenizerFit
from ranvier_py.node.client_parts import ClientReader
from ranvier_py.node.cluster_parts import ClusterParts, NoCluster
from ranvier_py.node.discovery.discovery_parts import DiscoveryParts
from ranvier_py.node.discovery.kept_orders import KeptOrders
from ranvier_py.node.engine_cache.calibration_parts import CalibrationParts
from ranvier_py.node.engine_cache.engine_event_parts import EngineEvents
from ranvier_py.node.engine_cache.engine_event_views import EngineEventViews
from ranvier_py.node.engine_cache.index_parts import IndexedTokenizer, index_parts_of
from ranvier_py.node.engine_cache.push_parts import KeyInbox, WorkerReports, key_inbox
from ranvier_py.node.fingerprints import scheme_of
from ranvier_py.node.name_parts import NameParts
from ranvier_py.node.part import Counted, Node, Part
from ranvier_py.node.parts.backend_orders import BackendOrders
from ranvier_py.node.parts.backend_parts import BackendParts
from ranvier_py.node.parts.decision_parts import DecisionParts
from ranvier_py.node.parts.model_parts import ModelLooks
from ranvier_py.node.parts.node_orders import NodeOrders
from ranvier_py.node.parts.request_parts import Explanations, PublicPort, RequestPath
from ranvier_py.node.parts.response_parts import INDEX_REDIS, RESPONSES_REDIS, Responses, redis_pools_of
from ranvier_py.node.parts.router_parts import RouterParts, ShadowPolicies, make_router
from ranvier_py.node.parts.tls_parts import EngineTls, TlsFiles
from ranvier_py.node.parts.upkeep import HangParts, Learner, PeerFollower, Polls, Sweep, recorder_of
from ranvier_py.node.parts.verdict_parts import VerdictParts
from ranvier_py.node.ranks.rank_parts import RankParts

if TYPE_CHECKING:  # imported where there is a collector
    from ranvier_py.node.tracing.trace_parts import TraceParts


def make_node(config: Config, tokenizer: TokenizerProcess, rng: Random, key: bytes) -> tuple[Node, KeyInbox]:
    """Make a node without parts, and what hashes its prompts. `tokenizer` must have started; `key` keys its
    fingerprints and this node's."""
    scheme = scheme_of(config, tokenizer.facts, key)
    inbox = key_inbox(config, scheme)
    router_of = partial(make_router, config, tokenizer.facts, scheme, rng=rng, prompt_hasher=inbox.hasher)
    return Node(config, scheme, router_of, rng), inbox


def parts_of(
    node: Node,
    tokenizer: TokenizerProcess,
    inbox: KeyInbox,
    clustering: ClusterParts | None = None,
    resolver: Resolver | None = None,
) -> list[Part]:
    """Make the parts; the last one is the public port."""
    config, router, rng = node.config, node.router, node.rng
    resolver, pools = resolver or Resolver(node.faults), redis_pools_of(config)
    asking, recorder = UsageAsker(enabled=config.ask_usage), recorder_of(node)
    clients = ClientReader(config, node.scheme, rng.getrandbits(64), clustering)
    router.observers += (clients,)
    worker = TokenizerWorker(tokenizer, router, inbox, queue_max=config.learn_queue_max)
    ranks, polls = RankParts(node), Polls(node, clustering)
    streams = clustering.peer.features.streams if clustering is not None else None
    events = EngineEvents(router, rng, polled=polls.poller, sharing=streams, faults=node.faults)
    calibration = CalibrationParts(
        router, asking, events, metrics_interval_s=config.polls.metrics_interval_s, polls=polls
    )
    limits, index = LimitParts(node, clustering), index_parts_of(node, events.engine_caches, pools.get(INDEX_REDIS))
    shadows, responses = ShadowPolicies(node, calibration), Responses(node, pools.get(RESPONSES_REDIS), clustering)
    models, tokens, tracer = ModelLooks(node, polls.poller), IndexedTokenizer(worker, index), tracer_of(node)
    path = RequestPath(node, tokens, asking, polls, responses, clients, models, reserve=limits.reserve, tracer=tracer)
    access = Access(node, clustering, limits, path.pipeline.realtime)
    names = NameParts(node, path.addresses, path.upstream, polls.poller, events)
    learner, kept, drains = Learner(worker), KeptOrders(node, clustering), NodeOrders(node, clustering)
    orders = BackendOrders(node, names, clustering, kept)
    return [
        Counted("resolver", lambda: resolver.counters, resolver.run),
        Counted("tokenizer", lambda: tokenizer.counters, tokenizer.run, "tokenizer_process"),
        learner,
        Counted("faults", lambda: node.faults.counters, prefix=""),
        Counted("logs", log_counters),
        RouterParts(node, [learner, *recorder, shadows]),
        DecisionParts(node),
        ranks,
        BackendParts(node, ranks, clustering),
        orders,
        kept,
        drains,
        DiscoveryParts(node),
        Sweep(node),
        clients,
        *recorder,
        shadows,
        *([NoCluster()] if clustering is None else [clustering, PeerFollower(node, clustering, polls, orders, drains)]),
        index,
        responses,
        models,
        path,
        polls,
        names,
        events,
        EngineEventViews(events),
        HangParts(node, path.pipeline.serving, polls, calibration, events),
        TokenizerFit(node, tokenizer.facts.probe),
        EngineTls(node, [path.upstream.trust, polls.poller.trust, index.trust]),
        TlsFiles(node),
        calibration,
        WorkerReports(router, events.engine_caches, inbox, faults=node.faults),
        access,
        limits,
        *([tracer] if tracer is not None else []),
        VerdictParts(node, clustering, calibration),
        Explanations(path.pipeline, worker, access),
        PublicPort(node, path, polls, clustering, access),
    ]


def tracer_of(node: Node) -> TraceParts | None:
    """Return the part that traces requests, if there is a collector. Raises ConfigError."""
    target = target_of(node.config.traces, os.environ)
    if target is None:
        return None
    from ranvier_py.node.tracing.trace_parts import TraceParts  # noqa: PLC0415  # imported where there is a collector

    return TraceParts(node, target)
