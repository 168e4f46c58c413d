"""Tunes alpha, by which a full route table weighs what rows save against their last use, by replaying requests. Pure.

The latest requests, as keys and lengths and never as text, are replayed through an empty table under each of eleven
alphas, from 0 (the longest unused leaf goes) to 2, and under the one in use. What counts are the operations that the
last WINDOW lookups save; the WARM ones before them fill the table. Alpha changes only if the best one saves GAIN_LEAST
times as much, and then by half of the step; of equal ones the lowest is best.

A table of a million rows does not turn over within a few hundred requests. So for a large table a sample of its chats
is kept, and replayed through a table that is smaller by the same share: each chat as a whole or not at all, by its
fingerprint (Waldspurger et al., «Cache modeling and optimization using miniature simulations»).
Bounds: WARM + WINDOW requests of KEYS_MAX keys; the oldest goes. Nothing is tuned while nothing is evicted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from struct import Struct
from typing import NamedTuple

import orjson

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.prompts.prompt import Boundary, PrefixKey
from ranvier_py.core.routing.attempt import Attempt, Observer
from ranvier_py.core.routing.route_table.route_values import UTILITY, RouteTableOptions, Trust
from ranvier_py.core.routing.route_table.table import RouteTable
from ranvier_py.core.routing.route_table.utility_queue import ALPHA_MAX, DEPTH_SLOPE, UtilityQueue

WINDOW, WARM = 200, 100
KEYS_MAX = 1024
ALPHAS = tuple(ALPHA_MAX * step / 10 for step in (0, 5, 10, 2, 8, 1, 3, 4, 6, 7, 9))
"""In the order in which they are tried: both ends and the middle first, since time may not suffice for all."""

GAIN_LEAST = 1.02
STEP_LEAST = 0.05  # half steps shorter than this are made whole, so that alpha 0 can be reached
LONG_S = 1e9  # replayed routes don't expire

ONE_BACKEND, ONE_GENERATION = BackendId(0), (0,)
WHOLE = 1 << 32
"""The share of chats to replay that means all of them."""

ANSWER = Struct("<d")


class LoggedRequest(NamedTuple):
    """One lookup to replay. `chain` is that of prompt and answer, deepest first."""

    at: int  # second
    prompt_tokens: int
    chain: Sequence[PrefixKey]


class AlphaJob(NamedTuple):
    """A replay to run: `alpha` is the one in use, `capacity` the rows of the table to replay through."""

    alpha: float
    capacity: int
    requests: Sequence[LoggedRequest]


@dataclass(slots=True)
class AlphaCounters:
    alpha: float = gauge("How a full table weighs what a route saves against its last use; 0: it does not.")
    tunings: int = counter("Replays of the latest requests that were to find a better alpha.")
    changes: int = counter("Times that the route table's alpha was changed.")
    failed: int = counter("Replays for a better alpha that gave no answer, or took too long.")
    left_out: int = counter("Requests with too many prefixes to be replayed for a better alpha.")


class AlphaTuner(Observer):
    """Keeps the latest requests. When a tuning is `due`, run `job` and `take` its result."""

    def __init__(self, routes: RouteTable, chain_of: Callable[[Boundary], Iterable[PrefixKey]]) -> None:
        assert isinstance(routes.leaves, UtilityQueue), "an alpha means nothing to other orders"
        self.counters = AlphaCounters(alpha=routes.leaves.alpha)
        self._routes = routes
        self._queue = routes.leaves
        self._chain_of = chain_of
        self._requests: deque[LoggedRequest] = deque(maxlen=WARM + WINDOW)
        self._share = WHOLE
        self._seen = self._new = 0  # since the last tuning: all requests, and those that were kept
        self._created, self._evicted = routes.tree.counters.created, 0  # rows, up to the last tuning

    # ---- watching

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:  # noqa: ARG002
        self._seen += 1
        if not any(self._routes.tree.evicted):  # nothing to weigh so far
            return
        if not end.messages or attempt.prompt.kind == "opaque" or chat_of(end) % WHOLE >= self._share:
            return
        keys = list(islice(self._chain_of(end), KEYS_MAX + 1))
        if len(keys) > KEYS_MAX:
            self.counters.left_out += 1
            return
        self._requests.append(LoggedRequest(int(now), attempt.prompt.tokens, keys))
        self._new += 1

    # ---- tuning

    @property
    def due(self) -> bool:
        """Whether since the last tuning rows were evicted, and WINDOW more requests were kept."""
        return self._new >= WINDOW and sum(self._routes.tree.evicted) > self._evicted

    def job(self) -> AlphaJob | None:
        """Return the replay to run. None: from now on another share of chats is kept, so there is nothing to replay."""
        created, capacity = self._routes.tree.counters.created, self._routes.capacity
        rows = WARM * max(1.0, (created - self._created) / max(1, self._seen))
        share = min(WHOLE, int(WHOLE * rows / capacity) + 1)
        self._new = self._seen = 0
        self._created, self._evicted = created, sum(self._routes.tree.evicted)
        if not share / 2 <= self._share <= 2 * share:
            self._share = share
            self._requests.clear()
            return None
        return AlphaJob(self._queue.alpha, max(1, capacity * self._share // WHOLE), tuple(self._requests))

    def take(self, alpha: float | None) -> None:
        """Set the alpha that a job has found; None, or one out of range, counts as a failed replay."""
        self.counters.tunings += 1
        if alpha is None or not 0.0 <= alpha <= ALPHA_MAX:
            self.counters.failed += 1
            return
        self.counters.changes += alpha != self._queue.alpha
        self._queue.alpha = self.counters.alpha = alpha


def chat_of(end: Boundary) -> int:
    """Return the fingerprint up to a chat's second message: its turns share it, chats of one application do not."""
    at = end
    while at.messages > 2 and at.parent is not None:
        at = at.parent
    return at.text or at.token


# --- the replay -------------------------------------------------------------------------------------------------------


def found_alpha(job: AlphaJob, enough: Callable[[], bool] = lambda: False) -> float:
    """Return the alpha to go on with. Tries the one in use and 0 (LRU), and others as long as it is not `enough`."""
    saved: dict[float, float] = {}
    for alpha in (job.alpha, *ALPHAS):
        if len(saved) > 1 and enough():
            break
        saved[alpha] = saved_by(job, alpha)
    best = min(saved, key=lambda alpha: (-saved[alpha], alpha))
    if saved[best] < GAIN_LEAST * saved[job.alpha]:
        return job.alpha
    half = (job.alpha + best) / 2
    return best if abs(best - half) < STEP_LEAST else half


def saved_by(job: AlphaJob, alpha: float) -> float:
    """Return the operations that the last WINDOW lookups save under this alpha, in those of a prompt's first token."""
    table = RouteTable(capacity=job.capacity, ttl_s=LONG_S, options=RouteTableOptions(UTILITY))
    assert isinstance(table.leaves, UtilityQueue)
    table.leaves.alpha = alpha
    saved = 0.0
    valued = len(job.requests) - WINDOW
    for number, (at, prompt_tokens, keys) in enumerate(job.requests):
        prompt = [key for key in keys if key[0] <= prompt_tokens]
        found = table.match(prompt, ONE_GENERATION, at)
        if found and number >= valued:
            tokens = found[0].tokens
            saved += tokens * (1.0 + DEPTH_SLOPE * tokens / 2)
        table.learn(keys, ONE_BACKEND, ONE_GENERATION[0], Trust.LOCAL, at)
    return saved


# --- to and from another process --------------------------------------------------------------------------------------


def encode_job(job: AlphaJob) -> bytes:
    return orjson.dumps((job.alpha, job.capacity, [tuple(request) for request in job.requests]))


def decode_job(data: bytes) -> AlphaJob:
    """Decode what `encode_job` made. Raises ValueError for anything else."""
    alpha, capacity, requests = orjson.loads(data)
    found = [LoggedRequest(at, prompt_tokens, [*map(tuple, keys)]) for at, prompt_tokens, keys in requests]
    return AlphaJob(alpha, capacity, found)
