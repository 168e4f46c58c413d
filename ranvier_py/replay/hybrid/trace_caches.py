"""Caches that the requests of a trace use one after the other, and what they found. Pure.

Paths are of tokens here. Marconi is a tree under `utility` with a tuner, SGLang+ one under `lru` without.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ranvier_py.replay.hybrid.alpha_search import TokenRequest, Tuner, Untuned
from ranvier_py.replay.hybrid.state_tree import StateTree

TOKEN_BYTES = 4


class TraceCache(Protocol):
    """`lookup`: tokens of a prompt that can be reused; it counts as a use. `insert`: the request is done."""

    def lookup(self, request: TokenRequest) -> int: ...

    def insert(self, request: TokenRequest) -> None: ...


class TreeOfTrace:
    """One tree, and who sets its alpha."""

    def __init__(self, tree: StateTree, tuner: Tuner | None = None) -> None:
        self.tree = tree
        self.tuner = tuner or Untuned()

    def lookup(self, request: TokenRequest) -> int:
        return self.tree.match(request.prompt).reusable

    def insert(self, request: TokenRequest) -> None:
        self.tuner.before(self.tree, request)
        self.tree.insert(request.whole)
        self.tuner.after(self.tree, request)


@dataclass(slots=True)
class TraceRun:
    """What the lookups of a trace found, in order, in tokens."""

    reused: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    @property
    def reused_tokens(self) -> int:
        return sum(self.reused)

    @property
    def hit_rate(self) -> float:
        """Of tokens. That of requests means nothing: all share the template's first few."""
        return sum(self.reused) / sum(self.prompts) if self.prompts else 0.0


def run(cache: TraceCache, requests: Iterable[TokenRequest]) -> TraceRun:
    """One request after the other: looked up, then inserted with its answer."""
    found = TraceRun()
    for request in requests:
        found.prompts.append(len(request.prompt) // TOKEN_BYTES)
        found.reused.append(cache.lookup(request))
        cache.insert(request)
    return found
