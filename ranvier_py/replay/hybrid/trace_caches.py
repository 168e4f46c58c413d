"""Caches that the requests of a trace use one after the other, and what they found. Pure.

Marconi = a tree under `utility` whose alpha is tuned once: the first eviction, after n lookups, sets a window of
`bootstrap` * n lookups; at its end all requests so far are replayed from an empty tree under each of ALPHAS, and the
one that saves most is taken for ever (ties: the lowest). `Retuned` is ours: it tunes again every so many requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ranvier_py.replay.hybrid.hybrid_model import HybridModel
from ranvier_py.replay.hybrid.state_tree import StateTree

ALPHAS = tuple(step / 10 for step in range(21))
RETUNED_ALPHAS = tuple(step / 5 for step in range(11))
VALUED_LOOKUPS = 500
"""So many of the last lookups of a replay count."""


class TokenRequest(NamedTuple):
    """Token ids as bytes, four of them each. `whole`: prompt and answer."""

    prompt: bytes
    whole: bytes


class TraceCache(Protocol):
    """`lookup`: tokens of a prompt that can be reused; it counts as a use. `insert`: the request is done."""

    def lookup(self, request: TokenRequest) -> int: ...

    def insert(self, request: TokenRequest) -> None: ...


class Vanilla:
    """No cache."""

    def lookup(self, request: TokenRequest) -> int:  # noqa: ARG002
        return 0

    def insert(self, request: TokenRequest) -> None:
        """Nothing is kept."""


class Static:
    """One tree as it is: SGLang+ under `lru`, and Marconi with an alpha that was given."""

    def __init__(self, tree: StateTree) -> None:
        self.tree = tree

    def lookup(self, request: TokenRequest) -> int:
        return self.tree.match(request.prompt).reusable

    def insert(self, request: TokenRequest) -> None:
        self.tree.insert(request.whole)


class Marconi:
    """`tuned_at`: the number of the request in whose insertion alpha was tuned, from 0; None: it was not."""

    def __init__(self, tree: StateTree, bootstrap: int = 5) -> None:
        self.tree = tree
        self.bootstrap = bootstrap
        self.window: int | None = None
        self.first_eviction: int | None = None  # lookups until then
        self.tuned_at: int | None = None
        self._lookups = 0
        self._log: list[TokenRequest] = []

    def lookup(self, request: TokenRequest) -> int:
        self._lookups += 1
        return self.tree.match(request.prompt).reusable

    def insert(self, request: TokenRequest) -> None:
        if self.tuned_at is None:
            self._log.append(request)
        if self._lookups == self.window:
            self.tree.alpha = best_alpha(self._empty(), self._log, ALPHAS)
            self.tuned_at = self._lookups - 1
            self._log.clear()
        self.tree.insert(request.whole)
        if self.first_eviction is None and self.tree.evictions:
            self.first_eviction, self.window = self._lookups, self.bootstrap * self._lookups

    def _empty(self) -> StateTree:
        return self.tree.empty(clock=1)


class Retuned:
    """Alpha is tuned every `every` requests, by those since the last time, from the tree as it was then."""

    def __init__(self, tree: StateTree, every: int) -> None:
        self.tree = tree
        self.every = every
        self.alphas: list[float] = []
        self._before = tree.copy()
        self._log: list[TokenRequest] = []

    def lookup(self, request: TokenRequest) -> int:
        return self.tree.match(request.prompt).reusable

    def insert(self, request: TokenRequest) -> None:
        self.tree.insert(request.whole)
        self._log.append(request)
        if len(self._log) == self.every:
            self.tree.alpha = best_alpha(self._before, self._log, RETUNED_ALPHAS)
            self.alphas.append(self.tree.alpha)
            self._before = self.tree.copy()
            self._log.clear()


def best_alpha(start: StateTree, log: Sequence[TokenRequest], alphas: Iterable[float]) -> float:
    """The alpha under which replaying `log` from `start` saves most, the lowest of several. `start` stays as it is."""
    best, most = 0.0, -1
    for alpha in alphas:
        tree = start.copy()
        tree.alpha = alpha
        found = run(Static(tree), log).reused[-VALUED_LOOKUPS:]
        saved = saved_flops(start.model, found)
        if saved > most:
            best, most = alpha, saved
    return best


def saved_flops(model: HybridModel, reused: Iterable[int]) -> int:
    """Operations that lookups saved which found so many tokens each."""
    return sum(model.prefix_flops(tokens) for tokens in reused)


@dataclass(slots=True)
class TraceRun:
    """What the lookups of a trace found, in order, in tokens."""

    reused: list[int] = field(default_factory=list)
    prompt_tokens: int = 0

    @property
    def reused_tokens(self) -> int:
        return sum(self.reused)

    @property
    def hit_rate(self) -> float:
        """Of tokens. That of requests means nothing: all share the template's first few."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def run(cache: TraceCache, requests: Iterable[TokenRequest]) -> TraceRun:
    """One request after the other: looked up, then inserted with its answer."""
    found = TraceRun()
    for request in requests:
        found.prompt_tokens += len(request.prompt) // 4
        found.reused.append(cache.lookup(request))
        cache.insert(request)
    return found
