"""A control port that answers the same whatever happens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ranvier_py import __version__
from tests.pages import Pages

KEY = "the-key-of-the-control-port"
BACKEND = {"weight": 1.0, "url": "http://a:1", "name": "a", "health": "healthy", "draining": False, "probe_ms": None}
ENGINE_CACHE = {"name": "a", "level": "exact", "role": "reader", "applied": 12, "gaps": 1, "blocks": 90}
ENGINE_CACHES = {"engines": [ENGINE_CACHE], "counts": {"confirmed": 7, "voided": 0}, "trouble": ""}

CALIBRATION = {
    "route_precision": 0.98,
    "route_recall": None,
    "backends": [{"name": "a", "precision": 0.98, "recall": None, "answers": 40, "biases": ["salt"]}],
    "asking": {"asked": 3, "own": 1},
    "polls": {"probes": 7},
}


ENGINE = {"name": "a", "url": "http://a:1", "state": "down", "models": None, "level": "exact", "why": "", "load": 0}
ENGINE |= {"in_flight": 0, "running": 1, "waiting": 0, "tokens_per_s": None, "hit_share": 0.5, "weight": 1.0}
ENGINE |= {"predicted_tokens": 12, "cached_tokens": 11, "draining": False}
STATUS: dict[str, Any] = {
    "node": "n1",
    "release": __version__,
    "ready": False,
    "reason": "no backend can be asked",
    "severity": "well",
    "findings": [],
    "dropped": 0,
    "engines": [ENGINE],
    "peers": [],
    "requests": {"policy": "affinity", "predicted_share": 0.875, "cached_share": None},
}


class FakeControl(Pages):
    """Answers as the control port does. What it was sent is kept in the server's `asked`."""

    def answer(self, status: int, value: Mapping[str, Any]) -> None:
        self.reply(status, json.dumps(value).encode())

    def do_GET(self) -> None:
        answers = {
            "/readyz": (503, {"ready": False, "reason": "no backend can be asked"}),
            "/admin/status": (200, STATUS),
            "/admin/backends": (200, {"backends": [BACKEND]}),
            "/admin/cluster": (404, {"error": {"message": "this node does not gossip"}}),
            "/admin/engine-cache": (200, ENGINE_CACHES),
            "/admin/calibration": (200, CALIBRATION),
            "/admin/access": (200, {"needs_key": False}),
            "/admin/response-cache/stats": (200, {"enabled": False}),
            "/admin/routes": (200, {"rows": 3, "decisions": {"holder": 5}, "predicted_share": 0.875}),
        }
        if self.path not in answers and not self.path.startswith("/admin"):  # another test looks for its engine
            self.send_error(404)
            return
        self.server.asked.append((self.path, self.headers.get("authorization"), b""))
        self.answer(*answers[self.path])

    def do_POST(self) -> None:
        body = self.sent()
        self.server.asked.append((self.path, self.headers.get("authorization"), body))
        if body == b"no":
            self.answer(400, {"error": {"message": "the body is not JSON"}})
        else:
            self.answer(200, {"chosen": "a"})
