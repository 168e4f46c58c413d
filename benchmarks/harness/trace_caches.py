"""Runs the requests of a trace through a cache, one after the other, and counts what they reuse. Pure.

A symbol of a path is a token here. Marconi is a tree with rule `utility` and a tuner; SGLang+ one with `lru` and none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ranvier_py.replay.hybrid.alpha_search import TokenRequest, Tuner
from ranvier_py.replay.hybrid.state_tree import StateTree

TOKEN_BYTES = 4


class TraceCache(Protocol):
    """`lookup` returns how many prompt tokens can be reused, and counts as a use. `insert` adds a finished request."""

    def lookup(self, request: TokenRequest) -> int: ...

    def insert(self, request: TokenRequest) -> None: ...


class TreeOfTrace:
    """A tree and the tuner that sets its alpha, as a TraceCache."""

    def __init__(self, tree: StateTree, tuner: Tuner | None = None) -> None:
        self.tree = tree
        self.tuner = tuner or Tuner()

    def lookup(self, request: TokenRequest) -> int:
        return self.tree.match(request.prompt).reusable

    def insert(self, request: TokenRequest) -> None:
        self.tuner.before(self.tree, request)
        self.tree.insert(request.whole)
        self.tuner.after(self.tree, request)


@dataclass(slots=True)
class TraceRun:
    """Tokens of each prompt, and how many of them were reused, in order."""

    reused: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    @property
    def reused_tokens(self) -> int:
        return sum(self.reused)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens. A share of requests would mean nothing: all share the template's first tokens."""
        return sum(self.reused) / sum(self.prompts) if self.prompts else 0.0


def run(cache: TraceCache, requests: Iterable[TokenRequest]) -> TraceRun:
    """Look up each request, then insert it with its answer, one after the other."""
    found = TraceRun()
    for request in requests:
        found.prompts.append(len(request.prompt) // TOKEN_BYTES)
        found.reused.append(cache.lookup(request))
        cache.insert(request)
    return found
