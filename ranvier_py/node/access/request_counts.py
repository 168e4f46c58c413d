"""Counts requests of tenants by path, model and status, and answers of backends by status.

Bounds: TENANTS_MAX tenants have a name of their own in metrics, those that came first; SERIES_MAX series, beyond which
only the status counts. The rest is `other`. Models are those that engines list, paths those of the table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ranvier_py.core.metrics import Sample
from ranvier_py.core.routing.request_paths import PATHS
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.proxy.stages.own_answer import MODELS_PATH

TENANTS_MAX = 256
SERIES_MAX = 10_000
OTHER = "other"

REQUESTS = "Requests by path, model, status and tenant, where keys or trusted proxies say who asks; the rest is other."
ANSWERS = "Requests by the backend that answered them and their status, where keys or trusted proxies say who asks."


class RequestCounts:
    """See the module."""

    def __init__(self) -> None:
        self._paths = frozenset(path.decode() for path in (*PATHS, MODELS_PATH))
        self._tenants: set[str] = set()
        self._requests: dict[tuple[str, str, int, str], int] = {}
        self._answers: dict[tuple[str, int], int] = {}

    def add(self, request: RequestSummary, models: Collection[str]) -> None:
        """Count a request that is over. `models`: those that have a name of their own."""
        path = request.path if request.path in self._paths else OTHER
        model = request.model if request.model in models or not request.model else OTHER
        series = path, model, request.status, self._label(request.tenant)
        if series not in self._requests and len(self._requests) >= SERIES_MAX:
            series = OTHER, OTHER, request.status, OTHER
        self._requests[series] = self._requests.get(series, 0) + 1
        if request.backend:
            answer = request.backend, request.status
            if answer not in self._answers and len(self._answers) >= SERIES_MAX:
                answer = OTHER, request.status
            self._answers[answer] = self._answers.get(answer, 0) + 1

    def _label(self, tenant: str) -> str:
        if tenant not in self._tenants:
            if len(self._tenants) >= TENANTS_MAX:
                return OTHER
            self._tenants.add(tenant)
        return tenant

    def samples(self) -> Iterator[Sample]:
        for (path, model, code, tenant), count in self._requests.items():
            labels = {"path": path, "model": model, "code": str(code), "tenant": tenant}
            yield Sample("access_requests", "counter", REQUESTS, count, labels)
        for (backend, code), count in self._answers.items():
            yield Sample("access_answers", "counter", ANSWERS, count, {"backend": backend, "code": str(code)})
