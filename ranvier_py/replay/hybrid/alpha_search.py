"""Finds the alpha that would have saved most, by replaying past requests under each alpha. Pure.

`TunedOnce` is the published rule: the first eviction, after n lookups, sets a window of `bootstrap` * n lookups. At its
end all requests so far are replayed from an empty tree, and the best alpha is kept for good. `Retuned` is ours: it
tunes again after each window, from the tree as it was at the window's start. If damped, it goes only half the distance
to the best alpha, and only for a gain.

Ties go to the lowest alpha. Bound: a window of at most `REQUESTS_MAX`; beyond it `TunedOnce` leaves alpha as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ranvier_py.replay.hybrid.hybrid_model import HybridModel
from ranvier_py.replay.hybrid.state_tree import StateTree

ALPHAS = tuple(step / 10 for step in range(21))
RETUNED_ALPHAS = tuple(step / 5 for step in range(11))
VALUED_LOOKUPS = 500
"""Only so many of the last lookups of a replay count for what an alpha saves."""

REQUESTS_MAX = 20_000
GAIN_LEAST = 1.02
"""Damped retuning changes alpha only if the best one saves this many times the operations: two percent more."""


class TokenRequest(NamedTuple):
    """A request as paths of a `StateTree`. `whole`: prompt and answer."""

    prompt: bytes
    whole: bytes


class Tuner:
    """Sets the alpha of a tree. Called `before` and `after` the insertion of each request, which was looked up. This
    one leaves alpha as it is."""

    def before(self, tree: StateTree, request: TokenRequest) -> None: ...

    def after(self, tree: StateTree, request: TokenRequest) -> None: ...


class TunedOnce(Tuner):
    """Tunes alpha once. `tuned_at`: the request, counted from 0, before whose insertion that was; None: not yet."""

    def __init__(self, bootstrap: int = 5) -> None:
        self.bootstrap = bootstrap
        self.window: int | None = None
        self.first_eviction: int | None = None  # lookups until then
        self.tuned_at: int | None = None
        self._log: list[TokenRequest] = []

    def before(self, tree: StateTree, request: TokenRequest) -> None:
        if self.tuned_at is not None or len(self._log) == REQUESTS_MAX:
            return
        self._log.append(request)
        if len(self._log) == self.window:
            tree.alpha = best_alpha(tree.empty(clock=1), self._log, ALPHAS)
            self.tuned_at = len(self._log) - 1
            self._log.clear()

    def after(self, tree: StateTree, request: TokenRequest) -> None:  # noqa: ARG002
        if self.first_eviction is None and tree.evictions:
            self.first_eviction = len(self._log)
            self.window = self.bootstrap * self.first_eviction


class Retuned(Tuner):
    """Tunes alpha every `every` requests, by those since the last time."""

    def __init__(self, every: int, *, damped: bool = False) -> None:
        self.every = min(every, REQUESTS_MAX)
        self.damped = damped
        self.alphas: list[float] = []  # the alphas that were set, in order
        self._start: StateTree | None = None
        self._log: list[TokenRequest] = []

    def before(self, tree: StateTree, request: TokenRequest) -> None:  # noqa: ARG002
        if self._start is None:
            self._start = tree.empty()

    def after(self, tree: StateTree, request: TokenRequest) -> None:
        self._log.append(request)
        if len(self._log) < self.every:
            return
        assert self._start is not None
        found = best_alpha(self._start, self._log, RETUNED_ALPHAS)
        tree.alpha = self._damped(tree.alpha, found) if self.damped else found
        self.alphas.append(tree.alpha)
        self._start = tree.copy()
        self._log.clear()

    def _damped(self, alpha: float, found: float) -> float:
        assert self._start is not None
        gains = saved_under(self._start, self._log, found) >= GAIN_LEAST * saved_under(self._start, self._log, alpha)
        return (alpha + found) / 2 if gains else alpha


def best_alpha(start: StateTree, log: Sequence[TokenRequest], alphas: Iterable[float]) -> float:
    """Return the alpha under which replaying `log` from `start` saves most, of several the first. Keeps `start`."""
    best, most = 0.0, -1
    for alpha in alphas:
        saved = saved_under(start, log, alpha)
        if saved > most:
            best, most = alpha, saved
    return best


def saved_under(start: StateTree, log: Sequence[TokenRequest], alpha: float) -> int:
    """Return the operations that the last VALUED_LOOKUPS of a replay of `log` from `start` save. Keeps `start`."""
    tree = start.copy()
    tree.alpha = alpha
    reused = []
    for request in log:
        reused.append(tree.match(request.prompt).reusable * tree.unit_tokens)
        tree.insert(request.whole)
    return saved_flops(tree.model, reused[-VALUED_LOOKUPS:])


def saved_flops(model: HybridModel, reused: Iterable[int]) -> int:
    """Return the operations that lookups saved; `reused`: the tokens that each found."""
    return sum(model.prefix_flops(tokens) for tokens in reused)
