"""Counts requests, times and tokens by path, model, status and tenant, and by backend: never the product of both.

Rule: the end of a request appends one record, and nothing else is done on its path. Records are counted many at once,
when metrics are read, once a second, or when WAITING_MAX wait. Times to first tokens are those of streams alone.
Bounds: TENANTS_MAX tenants have a name of their own, those that came first; models are those that engines list, paths
those of the table; what has no room in a family is `other` (`core/metrics.py`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.metrics import LATENCY_BUCKETS_S, OTHER, Family, Sample
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.attempt import Attempt, Observer
from ranvier_py.core.routing.request_paths import PATHS
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.node.part import Node
from ranvier_py.proxy.call import Call
from ranvier_py.proxy.stages.own_answer import MODELS_PATH

TENANTS_MAX = 256
LIMITED = "429"
WAITING_MAX = 1024  # records, each of 200 bytes; they are counted in less than a millisecond

TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0)
"""From the fastest engines of small models to those that hardly decode at all."""


class Ended(NamedTuple):
    """One request that is over. Times are in seconds; -1: it was not measured."""

    path: bytes
    status: int
    tenant: str = ""
    model: str = ""
    backend: str = ""  # "": it was placed nowhere
    first_token: float = -1.0  # since the request was complete
    queue: float = 0.0
    duration: float = 0.0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    trace: str = ""  # its id, for exemplars


EndedFields = tuple[bytes, int, str, str, str, float, float, float, int, int, str]
ended_of: Callable[[EndedFields], Ended] = partial(tuple.__new__, Ended)
"""As `placement.match_of`."""


class Read(NamedTuple):
    """The counts of one answer that was read."""

    model: str
    backend: str
    tenant: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    per_token: float  # seconds of each token after the first; -1: it was not measured


class LabelledTimes:
    """The families of one label: the model, as clients see it, or the backend, from when a request was sent to it."""

    def __init__(self, label: str, prefix: str, of: str, since: str) -> None:
        def tokens(name: str, words: str) -> Family:
            return Family(prefix + name, f"{words}, by {of}.", (label,))

        def seconds(name: str, words: str, bounds: Sequence[float] = LATENCY_BUCKETS_S) -> Family:
            return Family(f"{prefix}{name}_seconds", f"{words}, by {of}.", (label,), bounds=bounds)

        self.label = label
        self.first_token = seconds("time_to_first_token", f"Seconds from {since} to the first token, of streams alone")
        self.duration = seconds("request_duration", f"Seconds from {since} to its end, of requests that were placed")
        words = "Seconds of each output token after the first, of streams whose tokens the engine counted"
        self.per_token = seconds("time_per_output_token", words, TOKEN_BUCKETS_S)
        self.prompt = tokens("prompt_tokens", "Tokens of prompts that were placed, exact or estimated")
        self.predicted = tokens("predicted_tokens", "Prompt tokens predicted to be cached where they were placed")
        self.counted = tokens("counted_prompt_tokens", "Prompt tokens of answers, as the engines counted them")
        self.cached = tokens("cached_tokens", "Prompt tokens found in a cache, as the engines counted them in answers")
        self.output = tokens("output_tokens", "Tokens of answers, as the engines counted them")

    def end(self, name: str, ended: Sequence[Ended], since: Sequence[float], at: float) -> None:
        """Count requests of one model or backend; `since`: how long after the request's end each of them began here."""
        streams = [(each, start) for each, start in zip(ended, since, strict=True) if each.first_token >= 0.0]
        if streams:
            first = [each.first_token - start for each, start in streams]
            self.first_token.histogram(name).observe_all(first, [each.trace for each, _ in streams], at)
        durations = [each.duration - start for each, start in zip(ended, since, strict=True)]
        self.duration.histogram(name).observe_all(durations, [each.trace for each in ended], at)
        self.prompt.add((name,), sum(each.prompt_tokens for each in ended))
        self.predicted.add((name,), sum(each.predicted_tokens for each in ended))

    def read(self, name: str, read: Sequence[Read]) -> None:
        self.counted.add((name,), sum(each.prompt_tokens for each in read))
        self.cached.add((name,), sum(each.cached_tokens for each in read))
        self.output.add((name,), sum(each.output_tokens for each in read))
        if per_token := [each.per_token for each in read if each.per_token >= 0.0]:
            self.per_token.histogram(name).observe_all(per_token)

    @property
    def families(self) -> Sequence[Family]:
        times = (self.first_token, self.per_token, self.duration)
        return (*times, self.prompt, self.predicted, self.counted, self.cached, self.output)


class TenantTokens:
    """The families of tokens by tenant, as engines counted them."""

    def __init__(self) -> None:
        def tokens(name: str, words: str) -> Family:
            return Family(f"tenant_{name}_tokens", f"{words}, as the engines counted them, by tenant.", ("tenant",))

        self.prompt = tokens("prompt", "Prompt tokens of answers")
        self.cached = tokens("cached", "Prompt tokens found in a cache")
        self.output = tokens("output", "Tokens of answers")

    def read(self, name: str, read: Sequence[Read]) -> None:
        self.prompt.add((name,), sum(each.prompt_tokens for each in read))
        self.cached.add((name,), sum(each.cached_tokens for each in read))
        self.output.add((name,), sum(each.output_tokens for each in read))

    def of(self, name: str) -> list[int]:
        """Return the tokens of a tenant: of prompts, of those the cached ones, and of answers."""
        return [each.rows.get((name,), 0) for each in self.families]

    @property
    def families(self) -> Sequence[Family]:
        return (self.prompt, self.cached, self.output)


class RequestMetrics(Observer):
    """See the module."""

    def __init__(self, node: Node) -> None:
        node.router.observers += (self,)
        self._names, self._registry = node.registry.pools.names, node.registry
        self._paths = {path: path.decode() for path in (*PATHS, MODELS_PATH)}
        self._tenants: set[str] = set()
        self._ended: list[Ended] = []
        self._read: list[Read] = []
        words = "Requests that are over, by path, model, status and tenant. 0: the client left before the answer began."
        self._requests = Family("requests", words, ("path", "model", "code", "tenant"), kept=("code",))
        words = "Requests that are over, by the backend where they were placed last, and status."
        self._answers = Family("backend_requests", words, ("backend", "code"), kept=("code",))
        words = "Seconds from a complete request to its last sending to an engine, by model: reading, placing, retries."
        self._queue = Family("queue_seconds", words, ("model",), bounds=LATENCY_BUCKETS_S)
        self._models = LabelledTimes("model", "", "the model that served", "a complete request")
        self._tokens = TenantTokens()
        self._backends = LabelledTimes("backend", "backend_", "backend", "sending a request")

    # --- on the path of a request ------------------------------------------------------------------------------------

    def ended(self, call: Call, now: float) -> None:
        """Take a request that is over."""
        attempt, identity, began = call.attempt, call.identity, call.started_at
        tenant = identity.tenant.name if identity is not None else ""
        if attempt is None:
            self._ended.append(Ended(call.request.path, call.status, tenant))
        else:
            prompt, decision = attempt.prompt, attempt.decision
            self._ended.append(
                ended_of(
                    (
                        call.request.path,
                        call.status,
                        tenant,
                        prompt.model,
                        decision.backend_name,
                        attempt.first_at - began if prompt.stream and attempt.first_at is not None else -1.0,
                        attempt.sent_at - began,
                        now - began,
                        decision.prompt_tokens,
                        decision.matched_tokens,
                        call.trace.trace_id if call.trace is not None and call.trace.is_sampled else "",
                    )
                )
            )
        if len(self._ended) >= WAITING_MAX:
            self.fold()

    def refused(self, request: RequestSummary) -> None:
        """Take a request that the pipeline never got."""
        self._ended.append(Ended(request.path.encode(), request.status, request.tenant))
        if len(self._ended) >= WAITING_MAX:
            self.fold()

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        """Take the counts of an answer, which is read beside the path of its request."""
        output, reply = answer.completion_tokens or 0, attempt.reply
        if answer.prompt_tokens is None and not output:
            return
        per_token = -1.0
        if attempt.prompt.stream and attempt.first_at is not None and reply.ended_at and output > 1:
            per_token = (reply.ended_at - attempt.first_at) / (output - 1)
        tokens = answer.prompt_tokens or 0, answer.cached_tokens or 0, output
        self._read.append(Read(attempt.prompt.model, attempt.target.name, attempt.prompt.owner, *tokens, per_token))
        if len(self._read) >= WAITING_MAX:
            self.fold()

    # --- many at once ------------------------------------------------------------------------------------------------

    def fold(self) -> None:
        """Count what waits."""
        (ended, self._ended), (read, self._read), at = (self._ended, []), (self._read, []), time.time()
        for (path, model, code, tenant), count in Counter((e.path, e.model, e.status, e.tenant) for e in ended).items():
            key = self._paths.get(path, OTHER), self._model(model), str(code), self._tenant(tenant)
            self._requests.add(key, count)
        here = {backend.name for backend in self._registry}  # what ends after its backend has gone is of nobody
        placed = [each for each in ended if each.backend]
        for (backend, code), count in Counter((e.backend, e.status) for e in placed if e.backend in here).items():
            self._answers.add((backend, str(code)), count)
        for model, own in grouped(placed, "model"):
            queue = [each.queue for each in own]
            self._models.end(self._model(model), own, [0.0] * len(own), at)
            self._queue.histogram(self._model(model)).observe_all(queue, [each.trace for each in own], at)
        for backend, own in grouped((each for each in placed if each.backend in here), "backend"):
            self._backends.end(backend, own, [each.queue for each in own], at)
        for model, answers in grouped(read, "model"):
            self._models.read(self._model(model), answers)
        for tenant, answers in grouped(read, "tenant"):
            self._tokens.read(self._tenant(tenant), answers)
        for backend, answers in grouped((each for each in read if each.backend in here), "backend"):
            self._backends.read(backend, answers)

    def _model(self, model: str) -> str:
        return model if not model or model in self._names.listed else OTHER

    def _tenant(self, tenant: str) -> str:
        if tenant not in self._tenants:
            if len(self._tenants) >= TENANTS_MAX:
                return OTHER
            self._tenants.add(tenant)
        return tenant

    def of_tenants(self) -> dict[str, list[int]]:
        """Return how many requests came of each tenant, how many of them a limit refused, and the tokens of the others:
        of prompts, of those the cached ones, and of answers."""
        self.fold()
        found: dict[str, list[int]] = {}
        for (_, _, code, tenant), count in self._requests.rows.items():
            counts = found.setdefault(tenant, [0, 0])
            counts[0] += count
            counts[1] += count if code == LIMITED else 0
        return {tenant: [*counts, *self._tokens.of(tenant)] for tenant, counts in found.items()}

    def removed(self, backend: str) -> None:
        self.fold()
        for each in (self._answers, *self._backends.families):
            each.forget("backend", backend)

    def samples(self) -> Iterator[Sample]:
        self.fold()
        labelled = (*self._models.families, *self._tokens.families, *self._backends.families)
        families = (self._requests, self._answers, self._queue, *labelled)
        yield from chain.from_iterable(each.samples() for each in families)
        words = "Times that a request counted under other, since its family of metrics has no room for another series."
        spilled = Family("series_spilled", words, ("family",))
        spilled.rows = {(each.name,): each.spilled for each in families if each.spilled}
        yield from spilled.samples()


def grouped(records: Iterable[Any], name: str) -> Iterable[tuple[str, list[Any]]]:
    """Return the records by one of their members."""
    found: dict[str, list[Any]] = {}
    for each in records:
        found.setdefault(getattr(each, name), []).append(each)
    return found.items()
