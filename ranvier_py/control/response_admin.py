"""Administration of the response cache, in the JSON of Continuum Router's document plus our own members."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ranvier_py.core.clients.body_mender import MODEL_BYTES_MAX
from ranvier_py.core.errors import BadRequest, NotFound
from ranvier_py.core.response_cache.answer_store import ResponseCacheOptions
from ranvier_py.proxy.response_cache import ResponseCache

log = logging.getLogger(__name__)

CHOICES = ("model", "tenant", "older_than_s")


def response_cache_view(responses: ResponseCache | None) -> Mapping[str, Any]:
    """Answer GET /admin/response-cache/stats. The hit rate is hits of hits and misses, a string of 4 decimals."""
    if responses is None:
        return {"enabled": False}
    counters, options, elsewhere = responses.store.counters, responses.store.options, responses.elsewhere
    requests = counters.requests
    return {
        "enabled": True,
        "backend_type": options.backend,
        "entries": counters.entries,
        "capacity": options.capacity,
        "requests": {**requests, "total": sum(requests.values())},
        "hit_rate": f"{counters.hit_rate:.4f}",
        "evictions": counters.evictions,
        "size_bytes": counters.size_bytes,
        "shared": counters.shared,
        "unkept": counters.unkept,
        "saved_prompt_tokens": counters.saved_prompt_tokens,
        "saved_output_tokens": counters.saved_output_tokens,
        "config": config_view(options),
        **(elsewhere.view() if elsewhere is not None else {}),
    }


def config_view(options: ResponseCacheOptions) -> Mapping[str, Any]:
    minutes, seconds = divmod(options.ttl_s, 60)
    return {
        "backend": options.backend,
        "ttl": f"{minutes:.0f}m" if minutes and not seconds else f"{options.ttl_s:g}s",
        "capacity": options.capacity,
        "max_response_size": options.answer_bytes_max,
        "max_stream_buffer_size": options.stream_bytes_max,
    }


async def invalidate_responses(responses: ResponseCache | None, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """Answer POST /admin/response-cache/invalidate: drop all answers, or those of a model, of a tenant, of an age.

    All nodes that gossip do it. `cleared_entries` counts those of this node; null if nobody can count them.
    """
    if responses is None:
        raise NotFound("the response cache is off: response_cache turns it on")
    if wanted.get("clear_all") is True and len(wanted) == 1:
        return invalidated("clear_all", await responses.invalidate())
    model, tenant, older_s = (wanted.get(name) for name in CHOICES)
    texts = all(each is None or type(each) is str for each in (model, tenant))
    if not wanted or "clear_all" in wanted or not texts or not (older_s is None or type(older_s) in (int, float)):
        raise BadRequest('expected {"clear_all": true}, or some of model, tenant (texts) and older_than_s (a number)')
    if model is not None and not (0 < len(model.encode("utf-8", "replace")) <= MODEL_BYTES_MAX and model.isprintable()):
        raise BadRequest(f"model must be a printable name of at most {MODEL_BYTES_MAX} bytes")
    digest = None if tenant is None else responses.tenants.named(tenant.encode("utf-8", "replace"))
    return invalidated("invalidate", await responses.invalidate(model, digest, older_s))


def invalidated(action: str, cleared: int | None) -> Mapping[str, Any]:
    log.info("response_cache.invalidated %s, %s entries here (ordered over the control port)", action, cleared)
    return {"success": True, "action": action, "cleared_entries": cleared}
