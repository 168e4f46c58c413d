"""A record as a node would write it, for tests of those who write and of those who read."""

from __future__ import annotations

from typing import Any

from ranvier_py.core.routing.request_record import RequestRecord


def a_record(**fields: Any) -> RequestRecord:
    """One that was served; its prefix keys are those of a prompt of 100 tokens unless said otherwise."""
    usual: dict[str, Any] = {
        "at": 1.5,
        "model": "m",
        "kind": "chat",
        "chain": ((16, 11), (32, 12), (64, 13), (96, 14)),
        "ends": (1, 3),
        "prompt_tokens": 100,
        "answer_tokens": 30,
        "backend": "a",
        "policy": "affinity",
        "reason": "warm",
        "source": "text",
        "matched_tokens": 32,
        "holders": 2,
        "outcome": "success",
        "status": 200,
        "first_token_s": 0.25,
        "total_s": 1.0,
        "cached_tokens": None,
        "request_bytes": 800,
        "sent_bytes": 90,
    }
    return RequestRecord(**{**usual, **fields})
